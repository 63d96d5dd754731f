"""What the page can ask about a run: each answer is what a command or the report says, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any

from arriero.engine.errors import UserError
from arriero.engine.lineage.queries import Answer, Questions
from arriero.engine.picture import svg
from arriero.launchers import charts, facts, runs
from arriero.launchers.exports.subject import subject
from arriero.launchers.report_rollouts import Pieces, pieces_of
from arriero.launchers.rundir import RunDir
from arriero.launchers.timeline import moments
from arriero.launchers.trace import slices
from arriero.launchers.ui import rollouts
from arriero.launchers.ui.record import Record
from arriero.launchers.ui.watch import Measures, Watch

Query = Mapping[str, str]
_TIMELINE_BYTES = 4 << 20  # the last half hour or so of a small run
_MOST_ROWS = 500  # of an answer about the lineage
_COMPARED = ("reward", "loss", "entropy", "grad_norm")


class Answers:
    """About one run; every method may run in a thread of its own. UserError if it is no run directory."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._subject = subject(str(run.path))
        self.watch = Watch(run)
        self._record = Record(run)
        self._measures = Measures(run.metrics)
        self.data: dict[str, Callable[[Query], Any]] = {
            "run": self._about, "measures": self._known, "rollouts": self._page, "rollout": self._one,
            "lineage": self._lineage, "runs": self._runs, "compare": self._compare,
        }  # fmt: skip
        self.pictures: dict[str, Callable[[Query], str]] = {
            "graph": lambda _: svg(self.watch.spec, self.watch.live()), "curve": self._curve,
            "distribution": self._distribution, "timeline": self._timeline, "compare": self._overlay,
        }  # fmt: skip

    @cached_property
    def _pieces(self) -> Pieces | None:
        return pieces_of(facts.tokenizer(self._subject))

    def _about(self, _: Query) -> dict[str, Any]:
        about = subject(str(self._run.path))
        sections = {"Result": facts.result(about), "Health": facts.health(about)}
        try:
            with self._record.index() as index:
                sections["Record"] = facts.record(about, index)
        except UserError as error:
            sections["Record"] = [("none", str(error))]
        sections["Configuration"] = sorted(about.parameters().items())
        return {"run": about.manifest.run_id, "timeline": facts.TIMELINE, "sections": sections}

    def _known(self, _: Query) -> dict[str, Any]:
        usual = {f"train/{key}": title for key, title in facts.CURVES.items()}
        found = sorted(self._measures.values())
        return {
            "usual": {tag: title for tag, title in usual.items() if tag in found},
            "all": found,
            "distributions": facts.DISTRIBUTIONS,
        }

    def _curve(self, query: Query) -> str:
        tag = query.get("measure", "")
        title = facts.CURVES.get(tag.removeprefix("train/"), tag)
        summary = self._run.read_summary() if self._run.summary.exists() else None
        marks = facts.held_out(summary) if tag == "train/reward" else []
        title += ", held out (dots)" if marks else ""
        return charts.line(title, self._measures.values().get(tag, []), marks=marks)

    def _distribution(self, query: Query) -> str:
        name = query.get("name", "")
        if name not in facts.DISTRIBUTIONS:
            raise UserError(f"no distribution {name!r}; there are {', '.join(facts.DISTRIBUTIONS)}")
        with self._record.index() as index:
            return charts.histogram(facts.DISTRIBUTIONS[name], facts.distribution(index, name))

    def _timeline(self, _: Query) -> str:
        if not self._run.timeline.exists():
            return ""
        found = slices([*moments(self._run.timeline, _TIMELINE_BYTES)])
        return charts.timeline({f"{replica} {node}": spans for (replica, node), spans in found.items()})

    # --- rollouts and lineage -----------------------------------------------------------------------------

    def _page(self, query: Query) -> rollouts.Page:
        asked = rollouts.Asked.model_validate({k: v for k, v in query.items() if v != ""}, strict=False)
        with self._record.index() as index:
            return rollouts.page(index, asked)

    def _one(self, query: Query) -> rollouts.One:
        with self._record.index() as index:
            return rollouts.one(index, query.get("id", ""), self._pieces)

    def _lineage(self, query: Query) -> dict[str, Any]:
        """About one of step, rollout, prompt, row and weights."""
        with self._record.index() as index:
            found = _asked(Questions(index), query)
        answer = asdict(found)
        left_out = max(0, len(found.rollouts) - _MOST_ROWS)
        return answer | {"rollouts": answer["rollouts"][:_MOST_ROWS], "left_out": left_out}

    # --- other runs ---------------------------------------------------------------------------------------

    def _beside(self) -> Iterable[RunDir]:
        """Runs in the same folder; nothing else can be named."""
        found = sorted(self._run.path.parent.glob("*/manifest.json"))
        return (RunDir(path.parent) for path in found if path.parent != self._run.path)

    def _other(self, query: Query) -> runs.Run:
        name = query.get("with", "")
        chosen = next((run for run in self._beside() if run.path.name == name), None)
        if chosen is None:
            raise UserError(f"no run {name!r} lies beside this one")
        return runs.read(chosen.path)

    def _runs(self, _: Query) -> list[str]:
        return [run.path.name for run in self._beside()]

    def _compare(self, query: Query) -> dict[str, Any]:
        own, other = runs.read(self._run.path), self._other(query)
        first = runs.first_difference(own, other)
        return {
            "differences": [(k, *values) for k, values in runs.differences(own, other).items()],
            "step": first[0] if first else None,
            "measures": [(k, *values) for k, values in first[1].items()] if first else [],
            "both": len(own.steps.keys() & other.steps.keys()),
            "curves": _COMPARED,
        }

    def _overlay(self, query: Query) -> str:
        key, own, other = query.get("measure", ""), runs.read(self._run.path), self._other(query)
        title = f"{key}: {own.path.name} (blue), {other.path.name} (orange)"
        first, second = (
            [(float(step), numbers[key]) for step, numbers in run.steps.items() if key in numbers]
            for run in (own, other)
        )
        return charts.line(title, first, other=second)


def _asked(questions: Questions, query: Query) -> Answer:
    by_name = {
        "rollout": questions.rollout, "prompt": questions.prompt, "weights": questions.weights,
    }  # fmt: skip
    by_number = {"step": questions.step, "row": questions.row}
    for key, value in query.items():
        if key in by_name:
            return by_name[key](value)
        if key in by_number and value.isdecimal() and len(value) < 18:
            return by_number[key](int(value))
    raise UserError(f"ask about one of step, row (a number), {', '.join(by_name)}")
