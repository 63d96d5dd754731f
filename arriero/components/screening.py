"""Rows that no response could be scored for, found where they enter: in memory, streamed, or held out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self

from arriero.components.verifiers.quarantine import Quarantine
from arriero.components.verifiers.reward import Isolated, RolloutReward, Scorer
from arriero.engine.errors import UserError
from arriero.schemas.messages import Prompt

_AT_ONCE = 256
_NONE_USABLE = 64  # rows met one by one, from the first on, that end a run


class Judging(Protocol):
    """What judges responses: a reward, or an environment with rewards in it."""

    def screens(self) -> Sequence[RolloutReward]:
        """The rewards that can tell rows of no use apart."""
        ...


class Screen:
    """Asks `rewards`, in workers of their own, which prompts can't be scored; those are told of once.

    Workers start with the first prompt and end with the context. `one_by_one`: prompts come along the way, so
    that one worker is enough. Raises UserError where a worker can't build its reward.
    """

    def __init__(self, rewards: Sequence[RolloutReward], *, one_by_one: bool = False) -> None:
        narrow = [replace(r, workers=1) if isinstance(r, Isolated) and one_by_one else r for r in rewards]
        self._rewards: Sequence[RolloutReward] = narrow
        self._scorers: list[Scorer] | None = None
        self._stack = AsyncExitStack()
        self._known: dict[tuple[str, str, int], bool] = {}
        self._bad = 0
        self._report = Quarantine()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def unscorable(self, prompts: Sequence[Prompt]) -> set[int]:
        """The rows of the prompts that no response could be scored for, written to `quarantine.jsonl`."""
        found: dict[int, tuple[Prompt, str]] = {}
        for scorer in await self._opened() if prompts else ():
            for first in range(0, len(prompts), _AT_ONCE):
                some = [p for p in prompts[first : first + _AT_ONCE] if p.row not in found]
                reasons = await asyncio.gather(*(scorer.unscorable(p) for p in some))
                found |= {p.row: (p, why) for p, why in zip(some, reasons, strict=True) if why}
        self._report.tell(list(found.values()))
        return set(found)

    async def refuses(self, prompt: Prompt) -> bool:
        """Whether the row can't be scored; asked once for each. UserError if none of the first 64 can."""
        if not self._rewards:
            return False
        row = (prompt.source, prompt.split, prompt.row)
        if row not in self._known:
            self._known[row] = bool(await self.unscorable([prompt]))
            self._bad += self._known[row]
            if self._bad == len(self._known) == _NONE_USABLE:
                raise UserError(
                    f"{prompt.source}: none of the first {_NONE_USABLE} rows can be scored, see the "
                    "quarantine report; set answer_field of the data, or another reward"
                )
        return self._known[row]

    async def _opened(self) -> list[Scorer]:
        if self._scorers is None:
            self._scorers = [await self._stack.enter_async_context(r.opened()) for r in self._rewards]
        return self._scorers
