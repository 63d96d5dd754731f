"""What made a step or a version, and what a prompt or a rollout went into: one walk, in both directions.

prompt -> rollouts -> step -> weights -> (the rollouts that they sampled)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from arriero.engine.errors import UserError
from arriero.engine.lineage.reader import Lineage
from arriero.engine.lineage.tables import origins_of, rollout_id
from arriero.schemas.ledger import Admitted, DroppedEvent, Trained
from arriero.schemas.lineage import GroupEntry, WeightsEntry


@dataclass(frozen=True, kw_only=True)
class RolloutRow:
    """A rollout; `steps` are the versions made from it, `versions` the oldest and newest that sampled it.

    `recorded` is `<run id>:<rollout there>` if it was sampled in another run.
    """

    id: str
    prompt: str
    row: int
    reward: float | None
    outcome: str
    reward_version: str
    tokens: int
    versions: tuple[int, int]
    steps: tuple[int, ...]
    recorded: str = ""


@dataclass(frozen=True, kw_only=True)
class PromptRow:
    """An admission of a row of the data; `became` says what became of it."""

    id: str
    row: int
    epoch: int
    split: str
    became: str


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """A step: from which version to which, on what, with what result."""

    version: int
    node: str
    batch: str
    before: str
    after: str
    loss: float | None
    grad_norm: float | None
    reward: float
    staleness_max: int
    tokens: int


@dataclass(kw_only=True)
class Answer:
    """What stands around the thing that was asked for."""

    about: str
    steps: list[StepRow] = field(default_factory=list[StepRow])
    rollouts: list[RolloutRow] = field(default_factory=list[RolloutRow])
    prompts: list[PromptRow] = field(default_factory=list[PromptRow])


class Questions:
    """The record with its connections looked up once."""

    def __init__(self, lineage: Lineage) -> None:
        self._lineage = lineage
        self._steps = {s.version: s for s in reversed(lineage.steps)}
        self._of_batch = {s.batch: s for s in lineage.steps}
        self._trained: dict[str, list[tuple[int, int]]] = {}  # scored group -> (version, rollout)
        for b in lineage.batches.values():
            if (step := self._of_batch.get(b.id)) is not None:
                for g, r in zip(b.group, b.rollout, strict=True):
                    self._trained.setdefault(b.groups[g], []).append((step.version, r))
        self._weights = {w.version: w for w in lineage.weights}
        self._admitted = {a.origin: a for a in lineage.admitted}
        self._dropped = {k: d for d in lineage.dropped for k in d.origins}
        self._by_prompt: dict[str, list[str]] = {}
        for name, group in lineage.groups.items():
            self._by_prompt.setdefault(group.prompt.id, []).append(name)

    def step(self, version: int) -> Answer:
        """What version `version` was made from. Raises UserError if it wasn't made; so do the others."""
        if (step := self._steps.get(version)) is None:
            known = f"there are {min(self._steps)} to {max(self._steps)}" if self._steps else "there is none"
            raise UserError(f"no step {version} is recorded; {known}")
        entry = self._lineage.batches.get(step.batch)
        names = entry.groups if entry is not None else ()
        return self._around(f"step {version}", [step], names, origins=step.origins, only=version)

    def rollout(self, name: str) -> Answer:
        """The steps that a rollout (`group/number`), or all rollouts of a group, went into."""
        group, slash, number = name.rpartition("/")
        wanted = group if slash and number.isdigit() else name
        found = [k for k, g in self._lineage.groups.items() if wanted in (k, g.id)]
        if not found:
            raise UserError(
                f"no rollout or group {name!r} is recorded; `--sql 'select id from rollouts'` lists them"
            )
        answer = self._around(f"rollout {name}", self._steps_of(found), found)
        if wanted != name:
            answer.rollouts = [
                r for r in answer.rollouts if r.id == f"{self._lineage.groups[found[0]].id}/{number}"
            ]
            if not answer.rollouts:
                raise UserError(f"group {wanted} has no rollout {number}")
            kept = {v for r in answer.rollouts for v in r.steps}
            answer.steps = [s for s in answer.steps if s.version in kept]
        return answer

    def prompt(self, name: str) -> Answer:
        """What an admitted prompt went into: its rollouts and their steps."""
        return self._of_prompts(f"prompt {name}", lambda a: a.id == name)

    def row(self, number: int) -> Answer:
        """The same for a row of the training data, in all epochs."""
        return self._of_prompts(f"row {number}", lambda a: a.row == number and a.split == "train")

    def weights(self, name: str) -> Answer:
        """The step that made a version, told by its fingerprint (or the beginning of it) or its number."""
        found = [
            w
            for w in self._lineage.weights
            if name == str(w.version) or (len(name) >= 6 and w.fingerprint.startswith(name))
        ]
        if not found:
            raise UserError(
                f"no version {name!r} is recorded; see --sql 'select version, fingerprint from weights'"
            )
        if not found[0].version:
            return Answer(about=f"version 0 ({_told(found[0])}): what the run began with")
        answer = self.step(found[0].version)
        answer.about = f"version {found[0].version} ({_told(found[0])}), made by step {found[0].version}"
        return answer

    # --- rows ---------------------------------------------------------------------------------------------

    def _of_prompts(self, about: str, wanted: Callable[[Admitted], bool]) -> Answer:
        admitted = [a for a in self._lineage.admitted if wanted(a)]
        if not admitted:
            raise UserError(f"no {about} was admitted; `--sql 'select id, row from prompts'` lists them")
        names = [n for a in admitted for n in self._by_prompt.get(a.id, ())]
        return self._around(about, self._steps_of(names), names, origins=[a.origin for a in admitted])

    def _steps_of(self, groups: Iterable[str]) -> list[Trained]:
        versions = sorted({v for name in groups for v, _ in self._trained.get(name, ())})
        return [self._steps[v] for v in versions]

    def _around(
        self,
        about: str,
        steps: Iterable[Trained],
        groups: Iterable[str],
        *,
        origins: Iterable[int] | None = None,
        only: int | None = None,
    ) -> Answer:
        known = [self._lineage.groups[n] for n in groups if n in self._lineage.groups]
        if origins is None:
            origins = [k for g in known for k in origins_of(g)]
        rows = [row for g in known for row in self._rollout_rows(g)]
        return Answer(
            about=about,
            steps=[self._step_row(s) for s in steps],
            rollouts=[r for r in rows if only is None or only in r.steps],
            prompts=[
                self._prompt_row(self._admitted[k]) for k in dict.fromkeys(origins) if k in self._admitted
            ],
        )

    def _step_row(self, s: Trained) -> StepRow:
        return StepRow(
            version=s.version, node=s.node, batch=s.batch, before=_told(self._weights.get(s.version - 1)),
            after=_told(self._weights.get(s.version)), loss=s.metrics.get("loss"),
            grad_norm=s.metrics.get("grad_norm"), reward=s.reward_mean, staleness_max=s.staleness_max,
            tokens=s.tokens,
        )  # fmt: skip

    def _rollout_rows(self, g: GroupEntry) -> list[RolloutRow]:
        s = g.scores
        trained = self._trained.get(s.id if s else g.id, ())
        return [
            RolloutRow(
                id=rollout_id(g, k), prompt=g.prompt.id, row=g.prompt.row, tokens=g.sampled[k],
                reward=s.values[k] if s else None, outcome=s.outcomes[k].value if s else "",
                reward_version=s.reward_version if s else "", versions=(g.oldest[k], g.newest[k]),
                steps=tuple(v for v, r in trained if r == k),
                recorded=f"{g.recorded}/{k}" if g.recorded else "",
            )
            for k in range(len(g.lengths))
        ]  # fmt: skip

    def _prompt_row(self, a: Admitted) -> PromptRow:
        drop: DroppedEvent | None = self._dropped.get(a.origin)
        trained = sorted({v for n in self._by_prompt.get(a.id, ()) for v, _ in self._trained.get(n, ())})
        became = (
            f"trained in {', '.join(map(str, trained))}"
            if trained
            else "evaluated"
            if a.split == "eval"
            else ""
        )
        if drop is not None:
            became = f"dropped by {drop.node}: {drop.reason} {drop.detail}".rstrip()
        return PromptRow(id=a.id, row=a.row, epoch=a.epoch, split=a.split, became=became or "under way")


def _told(weights: WeightsEntry | None) -> str:
    return weights.fingerprint or weights.id if weights is not None else ""
