"""How a generator goes through its prompts: continuously, or in deterministic runs one after the other.

Both only decide when; what a prompt becomes is the `Decoding`'s. Nothing here waits for the trainer unless a
prompt was admitted for a version that isn't there yet.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol, TypeVar

from arriero.components.compute import ComputeThread
from arriero.engine.stream import Stream
from arriero.schemas.messages import Dropped, Prompt, Weights

R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")


class Decoding(Protocol[R_co]):
    """Prompts in, records out, weights in place. `idle`: nothing is under way."""

    @property
    def version(self) -> int: ...

    @property
    def has_room(self) -> bool: ...

    @property
    def idle(self) -> bool: ...

    def load(self, weights: Weights) -> None: ...

    def add(self, prompt: Prompt) -> Dropped | None: ...

    def step(self) -> Sequence[R_co | Dropped]: ...


async def continuously(
    prompts: Stream[Prompt], weights: Stream[Weights], work: Decoding[R], compute: ComputeThread
) -> AsyncIterator[R | Dropped]:
    """Take the newest weights between two steps, and prompts whenever there is room."""
    waiting: Prompt | None = None
    while True:
        if (version := weights.poll()) is not None:
            await compute(work.load, version)
        while work.has_room and (prompt := waiting or prompts.poll()) is not None:
            waiting = None
            while work.version < prompt.min_version:
                await compute(work.load, await newer(weights))
            if (refused := work.add(prompt)) is not None:
                yield refused
        if work.idle:
            if (waiting := await prompts.next()) is None:
                return
            continue
        for group in await compute(work.step):
            yield group


async def one_by_one(
    prompts: Stream[Prompt], weights: Stream[Weights], work: Decoding[R], compute: ComputeThread
) -> AsyncIterator[R | Dropped]:
    """Each prompt alone, with exactly the version it was admitted for."""
    async for prompt in prompts:
        if work.version != prompt.min_version:
            await compute(work.load, await weights.at(prompt.min_version))
        if (refused := work.add(prompt)) is not None:
            yield refused
        while not work.idle:
            for group in await compute(work.step):
                yield group


async def newer(weights: Stream[Weights]) -> Weights:
    """The next version, waited for."""
    if (version := await weights.next()) is None:
        raise RuntimeError("the loop of the weights ended while prompts still come")
    return version
