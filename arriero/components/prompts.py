"""`PromptSource`: prompts from one or several data sets, epoch after epoch, and the held-out ones."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import fields
from itertools import count as numbers
from typing import Literal, Self

from pydantic import ConfigDict, NonNegativeInt, PositiveInt, model_validator
from pydantic.dataclasses import dataclass

from arriero.components.blocks import Whole
from arriero.components.curriculum import Curriculum
from arriero.components.prompt_data import OpenData, PromptData
from arriero.components.row_order import in_order
from arriero.components.screening import Judging, Screen
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

    def screened(self, judge: Judging) -> PromptSource:
        """This source without the rows that `judge`, a reward or an environment, can't score."""
        return ScreenedSource.of(self, judge) if self.screen and judge.screens() else self

    def judges(self) -> tuple[RolloutReward, ...]:
        """What tells of no use apart, before a row is given or held out."""
        return ()

    async def run(self) -> AsyncIterator[Prompt]:
        parts = self._opened()
        held = {k for part in parts for k in part.held_out_keys()} if self.overlap == "drop" else set[bytes]()
        async with Screen(self.judges()) as screen:
            for part in parts:
                await self._settle(part, held, screen)
        async with Screen(self.judges(), one_by_one=True) as screen:
            async for prompt in self._mixed(parts, held, screen):
                yield prompt

    async def _mixed(
        self, parts: Sequence[OpenData], held: set[bytes], screen: Screen
    ) -> AsyncGenerator[Prompt, None]:
        streams = [self._stream(part, held, screen) for part in parts]
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

    async def evaluation(self) -> Evaluation | None:
        """The held-out prompts that can be scored, data set by data set; None without any. UserError if
        something is held out and nothing is left of it.
        """
        if not any(d.holds_out for d in self.sets):
            return None
        return Evaluation(prompts=await self._usable([part.held_out() for part in self._opened()]))

    def evaluates_every(self) -> int:
        return self.eval_every

    async def _usable(self, parts: Sequence[Sequence[Prompt]]) -> list[Prompt]:
        """Those of the prompts of each data set that can be scored. Raises UserError if none can."""
        found: list[Prompt] = []
        async with Screen(self.judges()) as screen:
            for prompts in parts:
                gone = await screen.unscorable(prompts)
                found += [p for p in prompts if p.row not in gone]
        if not found:
            number = sum(map(len, parts))
            raise UserError(
                f"{self.path}: no row of {number} is left to evaluate on; change where or keep, "
                "or if their answers can't be read, answer_field or the reward"
            )
        return found

    def problems(self, view: GraphView) -> Iterable[str]:
        """What is wrong with the data, as far as it can be known without reading it."""
        yield from (p for data in self.sets for p in data.data_problems())
        if self.eval_every and not any(d.holds_out for d in self.sets):
            yield f"eval_every={self.eval_every}, but nothing is held out; set held_out or eval_path"

    def _opened(self) -> list[OpenData]:
        return [OpenData(config=d, place=k) for k, d in enumerate(self.sets)]

    async def _settle(self, part: OpenData, held: set[bytes], screen: Screen) -> None:
        """What of a data set in memory isn't trained on: known, counted and told before the first prompt."""
        if part.lazily:
            return
        rows, data = part.blocks.read(0), part.config
        unused = [n for n in part.numbers if not part.used(rows[n])]
        part.leave_out(unused)
        count("rows_filtered", len(unused))
        twice = [n for n in part.numbers if part.reader.key(rows[n]) in held]
        if twice:
            log.warning("%s: %d rows aren't trained on, for they are held out too", data.path, len(twice))
        count("rows_held_out_too", len(twice))
        part.leave_out(twice)
        prompts = [part.prompt(rows[n], n, "train", 0) for n in part.numbers] if self.judges() else []
        part.leave_out(await screen.unscorable(prompts))
        part.numbers = part.numbers[: data.limit]
        if not part.numbers:
            raise UserError(
                f"{data.path}: nothing is left to train on of {len(rows)} rows: {len(unused)} left out by "
                f"where or keep, {len(twice)} held out too (overlap=allow trains on them), the others "
                "without an answer that can be read: give them one, or choose a --reward that needs none "
                "(contains, function)"
            )

    async def _stream(self, part: OpenData, held: set[bytes], screen: Screen) -> AsyncGenerator[Prompt, None]:
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
                if part.lazily and part.reader.key(row) in held:
                    count("rows_held_out_too")
                    continue
                prompt = part.prompt(row, number, "train", epoch)
                if part.lazily and await screen.refuses(prompt):
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
    """The same for known rewards: rows that they can't score are quarantined, trained on or held out.

    They are listed in `quarantine.jsonl` of the run directory. What is in memory or held out is tried before
    the first prompt, anything else when it is reached.
    """

    rewards: tuple[RolloutReward, ...] = ()

    @classmethod
    def of(cls, source: PromptSource, judge: Judging) -> Self:
        """`source` with the rewards of `judge` that tell rows of no use apart."""
        given = {f.name: getattr(source, f.name) for f in fields(PromptSource)}
        return cls(**given, rewards=tuple(judge.screens()) if source.screen else ())

    def judges(self) -> tuple[RolloutReward, ...]:
        return self.rewards
