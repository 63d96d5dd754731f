"""What made a step or a version, and what a prompt or a rollout went into: one walk, in both directions.

prompt -> rollouts -> step -> weights -> (the rollouts that they sampled)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from arriero.engine.errors import UserError
from arriero.engine.lineage.index import Index


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
    """What can be asked of a record; each answer is a few queries over its index."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def step(self, version: int) -> Answer:
        """What version `version` was made from. Raises UserError if it wasn't made; so do the others."""
        if not self._index.rows("select 1 from steps where version = ?", [version]):
            known = self._index.overview.versions
            told = f"there are {known[0]} to {known[-1]}" if known else "there is none"
            raise UserError(f"no step {version} is recorded; {told}")
        ids = self._index.rows(
            "select rollout, origin from samples where version = ? order by batch, number", [version]
        )
        rollouts = self._rollouts("id", [r["rollout"] for r in ids if r["rollout"]])
        origins = sorted({r["origin"] for r in ids})
        return self._answer(f"step {version}", [version], rollouts, origins)

    def rollout(self, name: str) -> Answer:
        """The steps that a rollout (`group/number`), or all rollouts of a group, went into."""
        found = self._rollouts("id", [name]) or [
            r for column in ("group", "scored") for r in self._rollouts(column, [name])
        ]
        if not found:
            group, _, number = name.rpartition("/")
            if group and self._rollouts("group", [group]):
                raise UserError(f"group {group} has no rollout {number}")
            raise UserError(
                f"no rollout or group {name!r} is recorded; `--sql 'select id from rollouts'` lists them"
            )
        return self._around(f"rollout {name}", found)

    def prompt(self, name: str) -> Answer:
        """What an admitted prompt went into: its rollouts and their steps."""
        return self._of_prompts(f"prompt {name}", "id = ?", name)

    def row(self, number: int) -> Answer:
        """The same for a row of the training data, in all epochs."""
        return self._of_prompts(f"row {number}", "row = ? and split = 'train'", number)

    def weights(self, name: str) -> Answer:
        """The step that made a version, told by its fingerprint (or the beginning of it) or its number."""
        least = name if len(name) >= 6 else "-"
        found = self._index.rows(
            "select version, fingerprint, id from weights where cast(version as varchar) = ? "
            "or starts_with(fingerprint, ?) order by version",
            [name, least],
        )
        if not found:
            raise UserError(
                f"no version {name!r} is recorded; see --sql 'select version, fingerprint from weights'"
            )
        version, told = found[0]["version"], found[0]["fingerprint"] or found[0]["id"]
        if not version:
            return Answer(about=f"version 0 ({told}): what the run began with")
        answer = self.step(version)
        answer.about = f"version {version} ({told}), made by step {version}"
        return answer

    # --- rows ---------------------------------------------------------------------------------------------

    def _of_prompts(self, about: str, where: str, value: object) -> Answer:
        origins = [
            r["origin"]
            for r in self._index.rows(f"select origin from prompts where {where} order by origin", [value])
        ]
        if not origins:
            raise UserError(f"no {about} was admitted; `--sql 'select id, row from prompts'` lists them")
        return self._around(about, self._rollouts("origin", origins), origins)

    def _around(self, about: str, rollouts: list[RolloutRow], origins: Sequence[int] | None = None) -> Answer:
        """The answer about `rollouts`: the steps that they went into, and their prompts, or those given."""
        if origins is None:
            ids = [r.id for r in rollouts]
            known = self._index.rows(
                "select distinct origin from rollouts where id in (select unnest(?))", [ids]
            )
            origins = sorted(r["origin"] for r in known if r["origin"] is not None)
        versions = sorted({v for r in rollouts for v in r.steps})
        return self._answer(about, versions, rollouts, origins)

    def _answer(
        self, about: str, versions: Sequence[int], rollouts: list[RolloutRow], origins: Sequence[int]
    ) -> Answer:
        return Answer(
            about=about, steps=self._steps(versions), rollouts=rollouts, prompts=self._prompts(origins)
        )

    def _steps(self, versions: Sequence[int]) -> list[StepRow]:
        rows = self._index.rows(_STEPS, [list(versions)])
        return [StepRow(**row) for row in rows]

    def _rollouts(self, column: str, values: Sequence[object]) -> list[RolloutRow]:
        """The rollouts with these values in `column`, in the order of the values, then of their numbers."""
        rows = self._index.rows(_ROLLOUTS.format(column=column), [list(values)])
        return [
            RolloutRow(
                id=r["id"], prompt=r["prompt"], row=r["row"], reward=r["reward"], outcome=r["outcome"] or "",
                reward_version=r["reward_version"], tokens=r["sampled"], versions=(r["oldest"], r["newest"]),
                steps=tuple(r["steps"] or ()), recorded=r["recorded"],
            )
            for r in rows
        ]  # fmt: skip

    def _prompts(self, origins: Sequence[int]) -> list[PromptRow]:
        rows = self._index.rows(_PROMPTS, [list(origins), list(origins)])
        return [
            PromptRow(id=r["id"], row=r["row"], epoch=r["epoch"], split=r["split"], became=_became(r))
            for r in rows
        ]


_STEPS = """
select s.version, s.node, s.batch, coalesce(nullif(b.fingerprint, ''), b.id, '') as before,
       coalesce(nullif(a.fingerprint, ''), a.id, '') as after, s.loss, s.grad_norm, s.reward_mean as reward,
       s.staleness_max, s.tokens
from steps s left join weights a on a.version = s.version and a.batch = s.batch
left join weights b on b.version = s.version - 1 and b.loop = coalesce(a.loop, b.loop)
where s.version in (select unnest(?)) order by s.version, s.node"""

_ROLLOUTS = """
with wanted as (
    select r.*, w.place from rollouts r
    join (select unnest(v) as value, generate_subscripts(v, 1) as place from (select ? as v)) w
    on r."{column}" = w.value
), trained as (
    select rollout, list(distinct version order by version) as steps from samples
    where version is not null and rollout in (select id from wanted) group by rollout
)
select wanted.*, trained.steps from wanted left join trained on trained.rollout = wanted.id
order by place, wanted."group", number"""

_PROMPTS = """
with trained as (
    select origin, list(distinct version order by version) as versions from samples
    where version is not null and origin in (select unnest(?)) group by origin
)
select p.*, trained.versions from prompts p left join trained on trained.origin = p.origin
where p.origin in (select unnest(?)) order by p.origin"""


def _became(row: Mapping[str, Any]) -> str:
    """What became of a prompt, in words."""
    if row["dropped"]:
        return f"dropped by {row['dropped_by']}: {row['dropped']} {row['detail']}".rstrip()
    if row["versions"]:
        return f"trained in {', '.join(map(str, row['versions']))}"
    return "evaluated" if row["split"] == "eval" else "under way"
