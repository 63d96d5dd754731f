"""Held-out prompts in an engine of their own, which changes its weights only between two evaluations.

    training   | v1  v2  v3  v4  v5 ...   newest weights, taken under way
    held out   | v0 ......  v4 ........   the version that is due, from the first prompt to the last

So an evaluation is of one version, however many come while it goes on, and nobody waits for it.

| a held-out prompt | moved by                                                                            |
|-------------------|-------------------------------------------------------------------------------------|
| waits             | `takes`; until there is room, and its version is in use                                |
| is sampled        | `step`; the engine takes the next version only when it is idle                       |
| is dropped        | `step`, if its version isn't to be had any more: it is missing, and never of another |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from arriero.components.weight_intake import Computes, WeightIntake
from arriero.engine.runtime.context import Context
from arriero.engine.stream import Stream
from arriero.schemas.messages import Dropped, Prompt, Weights

R_co = TypeVar("R_co", covariant=True)


class Evaluates(Protocol[R_co]):
    """Prompts in, records out. `version`: of the weights in use; `idle`: nothing is under way."""

    @property
    def version(self) -> int: ...

    @property
    def has_room(self) -> bool: ...

    @property
    def idle(self) -> bool: ...

    def prepare(self, weights: Weights) -> None: ...

    def load(self, weights: Weights) -> None: ...

    def add(self, prompt: Prompt, /) -> Dropped | None: ...

    def step(self) -> Sequence[R_co | Dropped]: ...

    def close(self) -> None: ...


def beside(context: Context) -> Context:
    """The place of the second engine: the weight plane tells who reads a version by their names."""
    return replace(context, node=f"{context.node}-held-out")


class EvaluationLane(Generic[R_co]):
    """Evaluations, one after the other; used by one coroutine. `opened` loads the engine, at the first."""

    def __init__(
        self, weights: Stream[Weights], compute: Computes, opened: Callable[[], Evaluates[R_co]]
    ) -> None:
        self._weights, self._compute, self._opened = weights, compute, opened
        self._work: Evaluates[R_co] | None = None
        self._intake: WeightIntake | None = None
        self._waiting: deque[Prompt] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or (self._work is not None and not self._work.idle)

    def takes(self, prompt: Prompt) -> bool:
        """Take up a held-out prompt of any version but the first; no other belongs here."""
        mine = prompt.split == "eval" and prompt.min_version > 0
        if mine:
            self._waiting.append(prompt)
        return mine

    async def step(self) -> Sequence[R_co | Dropped]:
        """Begin what may be begun, and decode one token of what is under way."""
        if self._work is None or self._intake is None:
            self._work = await self._compute(self._opened)
            self._intake = WeightIntake(self._weights, self._work, self._compute, beside=False)
        work, out = self._work, list[R_co | Dropped]()
        if work.idle and self._waiting:
            version = self._waiting[0].min_version
            if why := await self._intake.hold(version):
                gone = [p for p in self._waiting if p.min_version == version]
                self._waiting = deque(p for p in self._waiting if p.min_version != version)
                return [Dropped(parent=p.id, reason="stale", detail=why) for p in gone]
        while self._waiting and self._waiting[0].min_version == work.version and work.has_room:
            if (refused := work.add(self._waiting.popleft())) is not None:
                out.append(refused)
        return out if work.idle else [*out, *await self._compute(work.step)]

    async def close(self) -> None:
        if self._work is not None:
            await self._compute(self._work.close)
