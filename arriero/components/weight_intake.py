"""From one version of the weights to the next, between decoding steps or beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

from arriero.components.compute import ComputeThread
from arriero.engine.stream import Stream
from arriero.schemas.messages import Dropped, Prompt, Weights

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

    With `beside` a version is received in a thread of its own while the engine decodes, and what is left
    between two steps is to put it in use. Else it is received between two steps. A version that is
    overwritten before it could be read is passed over.
    """

    def __init__(
        self, weights: Stream[Weights], work: TakesWeights, compute: Computes, *, beside: bool
    ) -> None:
        self._weights, self._work, self._compute = weights, work, compute
        self._beside = ComputeThread("weights") if beside else None
        self._arriving: asyncio.Task[Weights] | None = None
        self._newest: Weights | None = None

    async def follow(self) -> None:
        """Between two steps: take the newest version, or what of it there is to do."""
        newer = None if self._arriving is not None else self._weights.poll()
        if newer is not None and self._beside is not None:
            self._arriving = asyncio.create_task(self._prepared(newer))
        elif newer is not None:
            await self._use(newer)
        elif self._arriving is not None and self._arriving.done():
            await self._switch(self._arriving)
        elif (left := self._left()) is not None:
            await self._use(left)

    async def reach(self, version: int) -> None:
        """Wait until this version or a newer one is in use."""
        while self._work.version < version:
            if self._arriving is not None:
                await self._switch(self._arriving)
            else:
                await self._use(self._left() or await self._next())

    async def use(self, version: int) -> None:
        """Wait until exactly this version is in use."""
        if self._work.version != version:
            await self._compute(self._work.load, await self._weights.at(version))

    async def ready_for(self, prompt: Prompt) -> Dropped | None:
        """Have the weights in use that `prompt` is to begin with; why it can't, if they aren't to be had.

        A held-out prompt begins with exactly its version, and only where nothing of another is under way.
        """
        if prompt.split == "train":
            await self.reach(prompt.min_version)
        elif why := await self.hold(prompt.min_version):
            return Dropped(parent=prompt.id, reason="stale", detail=why)
        return None

    async def hold(self, version: int) -> str:
        """Put exactly this version in use, unless it is; why it isn't to be had, else empty.

        With something of another version under way it must be in use. What was in use before comes back when
        the engine follows again.
        """
        from arriero.engine.weights import WeightError

        if self._work.version == version:
            return ""
        if self._arriving is not None:
            await self._switch(self._arriving)
        try:
            await self.use(version)
        except LookupError as error:
            return str(error)
        except WeightError as error:  # overwritten, or its sender has begun a new life
            if (left := self._left()) is not None:
                await self._use(left)
            return f"version {version} can't be had any more: {error}"
        return ""

    async def close(self) -> None:
        """Wait for what is under way, within a bound: it writes into memory of the engine."""
        if self._arriving is not None:
            await asyncio.wait([self._arriving], timeout=_LEAVE_S)
            self._arriving.cancel()
        if self._beside is not None:
            self._beside.__exit__(None, None, None)

    def _left(self) -> Weights | None:
        """The newest version that was in use, if an older one is now: it doesn't come a second time."""
        newest = self._newest
        return newest if newest is not None and newest.version > self._work.version else None

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
                self._newest = weights
                return

    async def _prepared(self, weights: Weights) -> Weights:
        from arriero.engine.weights import StaleWeights

        assert self._beside is not None, "only beside"
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
