"""From one version of the weights to the next, between decoding steps or beside them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import ParamSpec, Protocol, TypeVar

from arriero.components.compute import ComputeThread
from arriero.engine.stream import Stream
from arriero.schemas.messages import Dropped, Prompt, Weights

_LEAVE_S = 5.0
_log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class NoMoreVersions(LookupError):
    """Training has ended, and the version that is asked for is not to be had any more."""


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
    overwritten before it could be read is passed over; where its sender has ended or died, it is waited for
    until another one announces it, or a newer one, or until training has ended.
    """

    def __init__(
        self, weights: Stream[Weights], work: TakesWeights, compute: Computes, *, beside: bool
    ) -> None:
        self._weights, self._work, self._compute = weights, work, compute
        self._beside = ComputeThread("weights") if beside else None
        self._arriving: asyncio.Task[Weights | None] | None = None
        self._newest: Weights | None = None

    async def begin(self) -> bool:
        """Wait for the first version; False if there is nothing to do, for training has ended without us."""
        try:
            await self.reach(0)
        except NoMoreVersions as error:
            _log.warning("leaving what there is to others: %s", error)
            return False
        return True

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
        """Wait until this version or a newer one is in use. Raises NoMoreVersions."""
        while self._work.version < version:
            if self._arriving is not None:
                used = await self._switch(self._arriving)
            else:
                newer = self._left() or await self._weights.next()
                used = newer is not None and await self._use(newer)
            if not used:
                raise NoMoreVersions(f"version {version} can't be had: training has ended")

    async def use(self, version: int) -> None:
        """Wait until exactly this version is in use. Raises LookupError if it isn't kept."""
        from arriero.engine.weights import SenderGone

        weights = await self._weights.at(version) if self._work.version != version else None
        while weights is not None:
            try:
                await self._compute(self._work.load, weights)
            except SenderGone as error:
                gone = f"version {version} can't be had: training has ended, and {error}"
                weights = await self._weights.instead(version, weights.id, exactly=True)
                if weights is None:
                    raise NoMoreVersions(gone) from error
            else:
                return

    async def ready_for(self, prompt: Prompt) -> Dropped | None:
        """Have the weights in use that `prompt` is to begin with; why it can't, if they aren't to be had.

        A held-out prompt begins with exactly its version, and only where nothing of another is under way.
        """
        if prompt.split == "train":
            return await self._unless_over(prompt, self.reach(prompt.min_version))
        if why := await self.hold(prompt.min_version):
            return Dropped(parent=prompt.id, reason="stale", detail=why)
        return None

    async def exactly_for(self, prompt: Prompt) -> Dropped | None:
        """As `ready_for`, with exactly the version that `prompt` was admitted for."""
        return await self._unless_over(prompt, self.use(prompt.min_version))

    async def _unless_over(self, prompt: Prompt, ready: Coroutine[None, None, None]) -> Dropped | None:
        try:
            await ready
        except NoMoreVersions as error:
            return Dropped(parent=prompt.id, reason="end_of_run", detail=str(error))
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
            await self._compute(self._work.load, await self._weights.at(version))
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

    async def _switch(self, arriving: asyncio.Task[Weights | None]) -> bool:
        """Put in use what has arrived; False as `_use`."""
        weights = await arriving
        self._arriving = None
        return weights is not None and await self._use(weights)

    async def _use(self, weights: Weights) -> bool:
        """Put a version in use, or what comes instead; False if training has ended without one to be had."""
        used = await self._tried(weights, lambda version: self._compute(self._work.load, version))
        self._newest = used  # where there is none, what is in use is the newest that we can have
        return used is not None

    async def _prepared(self, weights: Weights) -> Weights | None:
        assert self._beside is not None, "only beside"
        beside = self._beside
        return await self._tried(weights, lambda version: beside(self._work.prepare, version))

    async def _tried(
        self, weights: Weights | None, take: Callable[[Weights], Awaitable[None]]
    ) -> Weights | None:
        from arriero.engine.weights import SenderGone, StaleWeights

        while weights is not None:
            try:
                await take(weights)
            except (StaleWeights, SenderGone) as error:
                _log.info("version %d is not to be had: %s", weights.version, error)
                weights = await self._weights.instead(weights.version, weights.id)
            else:
                break
        return weights
