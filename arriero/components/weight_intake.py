"""From one version of the weights to the next, between decoding steps or beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

from arriero.components.compute import ComputeThread
from arriero.engine.stream import Stream
from arriero.schemas.messages import Weights

_LEAVE_S = 5.0
P = ParamSpec("P")
T = TypeVar("T")


class TakesWeights(Protocol):
    """`prepare` receives a version and may run in another thread; `load` puts it, or any other, in use."""

    @property
    def version(self) -> int: ...

    def prepare(self, weights: Weights) -> None: ...

    def load(self, weights: Weights) -> None: ...


class Computes(Protocol):
    """Runs a function off the event loop."""

    async def __call__(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T: ...


class WeightIntake:
    """The versions of a loop on their way into an engine; used by one coroutine.

    With `standby` a version is received in a thread of its own while the engine decodes, and what is left
    between two steps is the switch. Else it is received between two steps. A version that is overwritten
    before it could be read is passed over.
    """

    def __init__(
        self, weights: Stream[Weights], work: TakesWeights, compute: Computes, *, standby: bool
    ) -> None:
        self._weights, self._work, self._compute = weights, work, compute
        self._beside = ComputeThread("weights") if standby else None
        self._arriving: asyncio.Task[Weights] | None = None

    async def follow(self) -> None:
        """Between two steps: take the newest version, or what of it there is to do."""
        if self._beside is None:
            if (newer := self._weights.poll()) is not None:
                await self._use(newer)
            return
        if self._arriving is None and (newer := self._weights.poll()) is not None:
            self._arriving = asyncio.create_task(self._prepared(newer))
        if self._arriving is not None and self._arriving.done():
            await self._switch(self._arriving)

    async def reach(self, version: int) -> None:
        """Wait until this version or a newer one is in use."""
        while self._work.version < version:
            if self._arriving is not None:
                await self._switch(self._arriving)
            else:
                await self._use(await self._next())

    async def use(self, version: int) -> None:
        """Wait until exactly this version is in use."""
        if self._work.version != version:
            await self._compute(self._work.load, await self._weights.at(version))

    async def close(self) -> None:
        """Wait for what is under way, within a bound: it writes into memory of the engine."""
        if self._arriving is not None:
            await asyncio.wait([self._arriving], timeout=_LEAVE_S)
            self._arriving.cancel()
        if self._beside is not None:
            self._beside.__exit__(None, None, None)

    async def _switch(self, arriving: asyncio.Task[Weights]) -> None:
        weights = await arriving
        self._arriving = None
        await self._use(weights)

    async def _use(self, weights: Weights) -> None:
        from arriero.engine.weights import StaleWeights

        while True:
            try:
                await self._compute(self._work.load, weights)
            except StaleWeights:
                weights = await self._next()
            else:
                return

    async def _prepared(self, weights: Weights) -> Weights:
        from arriero.engine.weights import StaleWeights

        assert self._beside is not None, "only with standby"
        while True:
            try:
                await self._beside(self._work.prepare, weights)
            except StaleWeights:
                weights = await self._next()
            else:
                return weights

    async def _next(self) -> Weights:
        if (newer := await self._weights.next()) is None:
            raise RuntimeError("the loop of the weights ended while prompts still come")
        return newer
