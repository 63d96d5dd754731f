"""`PromptSource`: prompts from one or several data sets, epoch after epoch, and the held-out ones."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import fields
from itertools import count as numbers
from typing import Literal, Self

from pydantic import ConfigDict, NonNegativeInt, PositiveInt, model_validator
from pydantic.dataclasses import dataclass

from arriero.components.blocks import Whole
from arriero.components.curriculum import Curriculum
from arriero.components.prompt_data import OpenData, PromptData, content_key
from arriero.components.row_order import in_order
from arriero.components.screening import screened
from arriero.components.verifiers.reward import RolloutReward
from arriero.engine.errors import UserError
from arriero.engine.graph import Evaluation, GraphView
from arriero.engine.runtime.context import count
from arriero.schemas.messages import Prompt

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class PromptSource(PromptData):
    """Prompts of a data set, and of others that are mixed in by weight.

    Every row comes once per epoch of its data set, in an order that depends on `seed`, the epoch and the
    blocks of the file alone. With several data sets the next prompt is always of the one that is furthest
    behind its share; one that has ended leaves its share to the others.
    """

    epochs: PositiveInt | None = None  # of each data set; None: for ever
    shuffle: bool = True
    seed: NonNegativeInt = 0
    overlap: Literal["drop", "allow"] = "drop"
    """Rows with the text of a held-out one: not trained on, or trained on all the same."""
    eval_every: NonNegativeInt = 0  # versions; 0: before and after training only
    screen: bool = True  # try every row's answer on the reward before the first prompt is sent
    mix: tuple[PromptData, ...] = ()
    """Further data sets."""
    curriculum: Curriculum | None = None
    """Leave out, from the second epoch on, what the policy always or never solves."""

    @model_validator(mode="after")
    def _told_apart(self) -> Self:
        names = [d.called for d in self.sets]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise ValueError(f"two data sets are called {', '.join(twice)}; give them a name each")
        return self

    @property
    def sets(self) -> tuple[PromptData, ...]:
        """All data sets."""
        return (self, *self.mix)

    def screened(self, reward: RolloutReward) -> PromptSource:
        """This source without the rows that `reward` can't score."""
        if not self.screen:
            return self
        return ScreenedSource(**{f.name: getattr(self, f.name) for f in fields(self)}, reward=reward)

    async def run(self) -> AsyncIterator[Prompt]:
        parts = self._opened()
        evaluated = (p for part in parts for p in part.held_out()) if self.overlap == "drop" else ()
        held = {content_key(p.text) for p in evaluated}
        for part in parts:
            await self._settle(part, held)
        streams = [self._stream(part, held) for part in parts]
        behind = [0.0] * len(parts)  # how much more each was to give than it gave
        live = list(range(len(parts)))
        while live:
            total = sum(parts[k].config.weight for k in live)
            for k in live:
                behind[k] += parts[k].config.weight / total
            chosen = max(live, key=lambda k: behind[k])
            prompt = await anext(streams[chosen], None)
            if prompt is None:
                live.remove(chosen)
                behind = [0.0] * len(parts)
            else:
                behind[chosen] -= 1.0
                yield prompt

    def evaluation(self) -> Evaluation | None:
        """The held-out prompts, data set by data set; None without any. Raises UserError."""
        if not any(d.eval_path or d.held_out for d in self.sets):
            return None
        prompts = tuple(p for part in self._opened() for p in part.held_out())
        return Evaluation(prompts=prompts, every=self.eval_every)

    def problems(self, view: GraphView) -> Iterable[str]:
        """What is wrong with the data, as far as it can be known without reading it."""
        yield from (p for data in self.sets for p in data.data_problems())
        if self.eval_every and not any(d.held_out or d.eval_path for d in self.sets):
            yield f"eval_every={self.eval_every}, but nothing is held out; set held_out or eval_path"

    def _opened(self) -> list[OpenData]:
        return [OpenData(config=d, place=k) for k, d in enumerate(self.sets)]

    async def _settle(self, part: OpenData, held: set[bytes]) -> None:
        """What of a data set in memory isn't trained on: known, counted and told before the first prompt."""
        if part.lazily:
            return
        rows, data = part.blocks.read(0), part.config
        unused = [n for n in part.numbers if not part.used(rows[n])]
        part.leave_out(unused)
        count("rows_filtered", len(unused))
        prompts = [part.prompt(rows[n], n, "train", 0) for n in part.numbers]
        twice = [p.row for p in prompts if content_key(p.text) in held]
        if twice:
            log.warning("%s: %d rows aren't trained on, for they are held out too", data.path, len(twice))
        count("rows_held_out_too", len(twice))
        part.leave_out(twice)
        part.leave_out(await self._unscorable([p for p in prompts if p.row not in set(twice)]))
        part.numbers = part.numbers[: data.limit]
        if not part.numbers:
            raise UserError(
                f"{data.path}: nothing is left to train on of {len(rows)} rows: {len(unused)} left out by "
                f"where or keep, {len(twice)} held out too (overlap=allow trains on them), the others "
                "without an answer that can be read"
            )

    async def _unscorable(self, prompts: list[Prompt]) -> set[int]:
        return set()

    async def _stream(self, part: OpenData, held: set[bytes]) -> AsyncGenerator[Prompt, None]:
        """One data set, epoch after epoch."""
        blocks = part.blocks if part.lazily else Whole([part.blocks.read(0)[n] for n in part.numbers])
        asked: dict[int, str] = {}  # the last record of each row
        for epoch in numbers() if self.epochs is None else range(self.epochs):
            given = False
            order = in_order(
                blocks, stop=len(part.numbers), seed=self.seed, epoch=epoch, window=part.config.stream or 1,
                shuffle=self.shuffle,
            )  # fmt: skip
            async for place, row in order:
                number = part.numbers[place]
                if part.lazily and not part.used(row):
                    count("rows_filtered")
                    continue
                prompt = part.prompt(row, number, "train", epoch)
                if part.lazily and content_key(prompt.text) in held:
                    count("rows_held_out_too")
                    continue
                if self.curriculum and not self.curriculum.wants(asked.get(number, ""), epoch):
                    count("rows_outside_curriculum")
                    continue
                given, asked[number] = True, prompt.id if self.curriculum else ""
                yield prompt
            if not given:
                log.warning("%s gave no prompt in epoch %d, and ends", part.config.path, epoch)
                return


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", arbitrary_types_allowed=True))
class ScreenedSource(PromptSource):
    """The same for a known reward: rows that it can't score are quarantined before the first prompt.

    They are listed in `quarantine.jsonl` of the run directory. Of a data set that isn't in memory they are
    found where they are scored.
    """

    reward: RolloutReward

    async def _unscorable(self, prompts: list[Prompt]) -> set[int]:
        return await screened(self.reward, prompts)
