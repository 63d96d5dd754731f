"""`arriero lineage RUN ...`: what trained these weights, and what became of this prompt."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, cast

from arriero.engine.errors import UserError, one_line
from arriero.engine.lineage.chain import ChainError
from arriero.engine.lineage.index import Index, Texts
from arriero.engine.lineage.queries import Answer, PromptRow, Questions, RolloutRow, StepRow
from arriero.engine.lineage.reader import Lineage
from arriero.launchers.redacting import redacting
from arriero.launchers.rundir import RunDir
from arriero.schemas.manifest import Ancestor

USAGE = """\
usage: arriero lineage RUN [QUESTION] [--text] [--json] [--picture FILE.mmd|FILE.svg] [--limit N]
       arriero lineage redact RUN WHAT [--reason TEXT]    take texts and tokens away; see its --help

  --step 12              what version 12 was made from: rollouts, rewards, prompts
  --rollout ID           the steps that a rollout (GROUP/NUMBER) or a group went into
  --prompt ID            what became of a prompt;  --row N  of a row of the data, in all epochs
  --weights FINGERPRINT  the step that made these weights (or its first six digits, or the version)
  --sql QUERY            over the tables steps, rollouts, samples, prompts, weights, events

--text shows what prompts, answers and responses say, of the first rollouts (--limit).
RUN is a run directory or the URL of a record. Without a question: what the record holds."""

_QUESTIONS = ("step", "rollout", "prompt", "row", "weights", "sql")
_SHOWN = 20


def lineage(args: Sequence[str], show: Callable[[str], int]) -> int:
    """Answer on `show`. Raises UserError."""
    if not args or {"--help", "-h"} & {*args}:
        return show(USAGE)
    if args[0] == "redact":
        return redacting(args[1:], show)
    place, given = args[0], _options(args[1:])
    index = indexed(place)
    if index.overview.broken:
        print(f"{place} is damaged, see arriero audit: {index.overview.broken}", file=sys.stderr)
    asked = [name for name in _QUESTIONS if name in given]
    if len(asked) > 1:
        raise UserError(f"one question at a time, not --{' and --'.join(asked)}")
    if not asked:
        return show(
            _json(index.overview.model_dump(mode="json"))
            if "json" in given
            else _overview(index, ancestors(place))
        )
    if asked == ["sql"]:
        return show(_sql(index, given["sql"], as_json="json" in given))
    answer = _ask(Questions(index), asked[0], given[asked[0]])
    if "picture" in given:
        _write_picture(answer, Path(given["picture"]))
    if (limit := _number("limit", given.get("limit", str(_SHOWN)))) < 1:
        raise UserError(f"--limit takes a number from 1 on, not {limit}")
    texts = index.texts([r.id for r in answer.rollouts[:limit]]) if "text" in given else {}
    if "json" in given:
        said = {"texts": {name: t.model_dump() for name, t in texts.items()}} if "text" in given else {}
        return show(_json(asdict(answer) | said))
    shown = answer.rollouts[:limit] if "text" in given else []
    return show("\n".join([_tables(answer, limit=limit), *_said(shown, texts)]))


def opened(place: str) -> Lineage:
    """The record of a run. Raises UserError if there is none or it can't be read."""
    with _reading(place):
        return Lineage(place)


def indexed(place: str) -> Index:
    """The index of the record of a run, made if need be. Raises UserError as `opened`."""
    with _reading(place):
        return Index(place)


@contextmanager
def _reading(place: str) -> Generator[None]:
    try:
        yield
    except UserError:
        raise
    except (ChainError, OSError, ValueError) as error:
        raise UserError(f"{place}: {error}") from error
    except Exception as error:
        if "://" not in place:
            raise
        raise UserError(f"{place} can't be read: {one_line(error)}") from error  # of the store's own library


def _options(words: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    rest = list(words)
    while rest:
        name, equals, value = rest.pop(0).removeprefix("--").partition("=")
        if name in ("json", "text"):
            found[name] = ""
        elif name in (*_QUESTIONS, "picture", "limit"):
            if not equals and not rest:
                raise UserError(f"--{name} needs a value")
            if name in found:
                raise UserError(f"--{name} is given twice; one question at a time")
            found[name] = value if equals else rest.pop(0)
        else:
            raise UserError(f"unknown option --{name}; see arriero lineage --help")
    return found


def _ask(questions: Questions, kind: str, value: str) -> Answer:
    match kind:
        case "step":
            return questions.step(_number("step", value))
        case "rollout":
            return questions.rollout(value)
        case "prompt":
            return questions.prompt(value)
        case "row":
            return questions.row(_number("row", value))
        case _:
            return questions.weights(value)


def _number(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UserError(f"--{name} takes a number, not {value!r}") from None


def ancestors(place: str) -> tuple[Ancestor, ...]:
    """The runs that the run at `place` was made from; none where there is no manifest beside the record."""
    run = RunDir(Path(place))
    return run.read_manifest().ancestors if run.manifest.exists() else ()


def _overview(index: Index, made_from: Sequence[Ancestor]) -> str:
    about = index.overview
    closed = f"closed, {about.state}" if about.state else "not closed: the run goes on, or was killed"
    versions = f", versions {about.versions[0]} to {about.versions[-1]}" if about.versions else ""
    redacted = f", {about.redacted} redacted" if about.redacted else ""
    return "\n".join(
        [
            f"record {index.url}: {closed}",
            *([f"  DAMAGED   {about.broken}; what stands behind isn't shown"] if about.broken else []),
            f"  chain     {about.anchor.entries} entries, head {about.anchor.head}",
            f"  steps     {about.steps}{versions}",
            f"  rollouts  {about.rollouts} in {about.groups} groups{redacted}",
            f"  prompts   {about.admitted} admitted, {about.dropped} drops",
            f"  held out  {about.evaluated} evaluated",
            f"  health    {about.warnings} warnings, {about.stops} stops of a gate (table events)",
            f"  lives     {about.restarts} restarts of a process, {about.resumes} of the whole run",
            *_family(made_from),
        ]
    )


def _family(made_from: Sequence[Ancestor], indent: str = "  ") -> Iterator[str]:
    """The runs that it was made from, and those that they were, as far as their directories are there."""
    for a in made_from:
        step = "" if a.step is None else f" at step {a.step}"
        yield f"{indent}made from {a.took} of {a.run_id}{step} in {a.run_dir} ({a.option})"
        yield from _family(ancestors(a.run_dir), indent + "  ")


def _sql(index: Index, query: str, *, as_json: bool) -> str:
    found = index.sql(query)
    if as_json:
        return _json(found.to_pylist())
    rows = [[str(v) for v in row.values()] for row in found.to_pylist()]
    return text_table(list(found.column_names), rows)


def _tables(answer: Answer, *, limit: int) -> str:
    parts = [answer.about]
    for title, kind, rows in (
        ("steps", StepRow, answer.steps),
        ("rollouts", RolloutRow, answer.rollouts),
        ("prompts", PromptRow, answer.prompts),
    ):
        if rows:
            names = [f.name for f in fields(kind)]
            shown = [[_cell(getattr(row, n)) for n in names] for row in rows[:limit]]
            more = f" ({limit} shown; --limit N, --json)" if len(rows) > limit else ""
            parts.append(f"\n{title}: {len(rows)}{more}\n{text_table(names, shown)}")
    return "\n".join(parts)


def _said(rollouts: Sequence[RolloutRow], texts: Mapping[str, Texts]) -> Iterator[str]:
    for r in rollouts:
        if (t := texts.get(r.id)) is None:
            yield f"\n{r.id}\n  redacted"
            continue
        yield f"\n{r.id}\n  prompt   {t.prompt!r}, answer {t.answer!r}\n  response {t.response!r}"
        if r.reward is not None:
            yield f"  reward   {r.reward:g} {r.outcome}" + (f", {t.detail!r}" if t.detail else "")


def _json(value: object) -> str:
    """JSON has no numbers that aren't finite: they are null."""
    return json.dumps(_finite(value), indent=2, default=str, allow_nan=False)


def _finite(value: object) -> object:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(k): _finite(v) for k, v in cast("dict[object, object]", value).items()}
        case list() | tuple():
            return [_finite(v) for v in cast("Sequence[object]", value)]
        case _:
            return value


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple):
        return " ".join(map(str, cast("tuple[object, ...]", value)))
    return "" if value is None else str(value)


def text_table(names: list[str], rows: list[list[str]]) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=200 if not sys.stdout.isatty() else None, markup=False, highlight=False).print(
        table
    )
    return out.getvalue().rstrip()


def mermaid(answer: Answer) -> str:
    """The answer as a flow chart: prompts, rollouts, steps and the weights between them."""
    lines = ["flowchart LR"]
    names: dict[str, str] = {}

    def node(label: str, left: str = "[", right: str = "]") -> str:
        if label not in names:
            names[label] = f"n{len(names)}"
            quoted = label.replace('"', "'")
            lines.append(f'  {names[label]}{left}"{quoted}"{right}')
        return names[label]

    for r in answer.rollouts[:_SHOWN]:
        rollout = node(f"{r.id} reward {r.reward}")
        lines.append(f"  {node(f'prompt {r.prompt} row {r.row}', '([', '])')} --> {rollout}")
        lines += [f"  {rollout} --> {node(f'step {v}', '{{', '}}')}" for v in r.steps]
    if len(answer.rollouts) > _SHOWN:
        node(f"and {len(answer.rollouts) - _SHOWN} rollouts more")
    for s in answer.steps:
        step = node(f"step {s.version}", "{{", "}}")
        lines.append(f"  {node(f'weights {s.before[:12]}', '[(', ')]')} --> {step}")
        lines.append(f"  {step} --> {node(f'weights {s.after[:12]}', '[(', ')]')}")
    return "\n".join(lines) + "\n"


def _write_picture(answer: Answer, path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise UserError(f"--picture {path}: there is no directory {path.parent}")
    if path.suffix == ".mmd":
        path.write_text(mermaid(answer), encoding="utf-8")
    elif path.suffix == ".svg":
        from arriero.launchers.lineage_picture import draw

        draw(answer, path)
    else:
        raise UserError(f"--picture {path}: write FILE.mmd or FILE.svg")
