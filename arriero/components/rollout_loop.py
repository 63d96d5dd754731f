"""How a component without a backlog goes through its prompts: continuously, or in deterministic runs in turn.

Both only decide when; what a prompt becomes is the `Decoding`'s. Nothing here waits for the trainer unless a
prompt was admitted for a version that isn't there yet. Held-out prompts are sampled by exactly the version
that they were sent for: in a lane of their own, or with weights that stay until they are done.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol, TypeVar

from arriero.components.compute import ComputeThread
from arriero.components.evaluation_lane import EvaluationLane
from arriero.components.weight_intake import WeightIntake
from arriero.engine.stream import Stream
from arriero.schemas.messages import Dropped, Prompt

R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")


class Decoding(Protocol[R_co]):
    """Prompts in, records out. `idle`: nothing is under way."""

    @property
    def has_room(self) -> bool: ...

    @property
    def idle(self) -> bool: ...

    @property
    def evaluating(self) -> bool: ...

    def suits(self, prompt: Prompt) -> bool: ...

    def add(self, prompt: Prompt, /) -> Dropped | None: ...

    def step(self) -> Sequence[R_co | Dropped]: ...


async def continuously(
    prompts: Stream[Prompt],
    intake: WeightIntake,
    work: Decoding[R],
    compute: ComputeThread,
    lane: EvaluationLane[R] | None = None,
) -> AsyncIterator[R | Dropped]:
    """Take the newest weights between two steps, and prompts whenever there is room."""
    waiting: Prompt | None = None
    while True:
        if not work.evaluating:
            await intake.follow()
        while work.has_room and (prompt := waiting or prompts.poll()) is not None:
            waiting = None
            if lane is not None and lane.takes(prompt):
                continue
            if not work.suits(prompt):
                waiting = prompt
                break
            if (refused := await intake.ready_for(prompt) or work.add(prompt)) is not None:
                yield refused
        if lane is not None and lane.busy:
            for record in await lane.step():
                yield record
        elif work.idle and (waiting := waiting or await prompts.next()) is None:
            return
        if not work.idle:
            for record in await compute(work.step):
                yield record


async def one_by_one(
    prompts: Stream[Prompt], intake: WeightIntake, work: Decoding[R], compute: ComputeThread
) -> AsyncIterator[R | Dropped]:
    """Each prompt alone, with exactly the version it was admitted for."""
    async for prompt in prompts:
        if (refused := await intake.exactly_for(prompt) or work.add(prompt)) is not None:
            yield refused
        while not work.idle:
            for record in await compute(work.step):
                yield record
