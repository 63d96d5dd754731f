"""Recorded rollouts as data: groups that were sampled and scored at another time, by any policy.

They come from the record of a run, or from a file that anything may have written.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    FiniteFloat,
    NonNegativeInt,
    PositiveFloat,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass

from arriero.components.formats import Row
from arriero.components.recorded_runs import RecordedRun, names_a_run
from arriero.components.row_source import RowSource
from arriero.engine.errors import UserError
from arriero.engine.graph import GraphView
from arriero.schemas.messages import Outcome, Prompt, Rollout, RolloutGroup, Score, ScoredGroup


class RecordedRollout(BaseModel):
    """One response: `logprobs` and `sampled` go with `token_ids`; sampled is false for an observation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    token_ids: tuple[NonNegativeInt, ...]
    logprobs: tuple[FiniteFloat | None, ...]
    sampled: tuple[bool, ...]
    reward: FiniteFloat
    text: str = ""
    finish: Literal["stop", "length"] = "stop"

    @model_validator(mode="after")
    def _of_one_length(self) -> RecordedRollout:
        if not len(self.token_ids) == len(self.logprobs) == len(self.sampled) > 0:
            raise ValueError("token_ids, logprobs and sampled must be of one length, at least 1")
        return self


class RecordedGroup(BaseModel):
    """A line of a file of recorded rollouts: a prompt with its responses, as token ids."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str
    prompt_ids: tuple[NonNegativeInt, ...]
    rollouts: tuple[RecordedRollout, ...]
    temperature: PositiveFloat = 1.0


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class RecordedRollouts(RowSource):
    """Scored groups of a run, or from JSONL, one `RecordedGroup` a line. A string is a path.

    `path` is the directory of a recorded run, the URL of its record, or a file as `RowSource` reads it. Of a
    run `stream` is how many of its steps are shuffled together. Token ids are taken as they are: the model
    must have the tokenizer that made them. The lineage of what is made of them names them.
    """

    def problems(self, view: GraphView) -> Iterable[str]:
        if not names_a_run(self.path):
            yield from super().problems(view)
        elif "://" not in self.path and not Path(self.path).is_dir():
            yield f"{self.path}: no such run; give the directory of a recorded run, or a file of data"

    async def run(self) -> AsyncIterator[ScoredGroup]:
        async for epoch, row, group in self._groups():
            name = f"e{epoch}-r{row}"
            prompt = group.group.prompt.model_copy(update={"id": name, "epoch": epoch, "row": row})
            inner = group.group.model_copy(update={"id": name, "prompt": prompt})
            yield group.model_copy(update={"id": name, "group": inner})

    def _groups(self) -> AsyncGenerator[tuple[int, int, ScoredGroup], None]:
        if not names_a_run(self.path):
            return self.rows(_scored)
        run = RecordedRun(self.path, by_step=bool(self.stream))
        return self.rows(run.group, run)


def write_recorded(path: Path, groups: Iterable[ScoredGroup]) -> None:
    """Write `groups` as `RecordedRollouts` reads them, without greedy rollouts and what has no verdict."""
    with path.open("w", encoding="utf-8") as file:
        for scored in groups:
            file.write(_recorded(scored).model_dump_json() + "\n")


def _recorded(scored: ScoredGroup) -> RecordedGroup:
    pairs = [
        (rollout, score)
        for rollout, score in zip(scored.group.rollouts, scored.scores, strict=True)
        if score.outcome in (Outcome.OK, Outcome.WRONG) and not rollout.greedy
    ]
    first = scored.group.rollouts[0]
    head = int(np.flatnonzero(first.mask)[0]) if first.mask.any() else len(first.mask)
    return RecordedGroup(
        prompt=scored.group.prompt.text,
        prompt_ids=tuple(first.tokens[:head].tolist()),
        rollouts=tuple(
            RecordedRollout(
                token_ids=tuple(r.tokens[head:].tolist()),
                logprobs=tuple(float(x) if np.isfinite(x) else None for x in r.logprobs[head:]),
                sampled=tuple(r.mask[head:].tolist()),
                reward=s.value,
                text=r.text,
                finish=r.finish,
            )
            for r, s in pairs
        ),
        temperature=first.temperature,
    )


def _scored(row: Row) -> ScoredGroup:
    try:
        recorded = RecordedGroup.model_validate_json(json.dumps(row.values))
        rollouts = tuple(_rollout(recorded, r) for r in recorded.rollouts)
        group = RolloutGroup(prompt=Prompt(text=recorded.prompt), rollouts=rollouts)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(p) for p in first["loc"])
        raise UserError(f"{row.where}: {place}: {first['msg']}; write it with write_recorded") from error
    scores = tuple(
        Score(value=r.reward, outcome=Outcome.OK if r.reward > 0 else Outcome.WRONG)
        for r in recorded.rollouts
    )
    return ScoredGroup(group=group, scores=scores)


def _rollout(group: RecordedGroup, rollout: RecordedRollout) -> Rollout:
    head = len(group.prompt_ids)
    mask = np.array([False] * head + list(rollout.sampled), np.bool_)
    nothing: list[float | None] = [None] * head
    logprobs = np.array([np.nan if x is None else x for x in [*nothing, *rollout.logprobs]], np.float32)
    return Rollout(
        tokens=np.array([*group.prompt_ids, *rollout.token_ids], np.int32),
        mask=mask,
        logprobs=logprobs,
        versions=np.where(mask, 0, -1).astype(np.int32),
        text=rollout.text,
        finish=rollout.finish,
        temperature=group.temperature,
    )
