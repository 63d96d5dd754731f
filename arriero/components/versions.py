"""The life of what makes versions: those of before, if it had one, then a step for each batch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from arriero.components.checkpoints import Checkpointer, Checkpoints
from arriero.components.placement import Devices
from arriero.components.publisher import Publisher, WeightPlane
from arriero.components.recovery import Recovery
from arriero.engine.runtime.context import Context
from arriero.engine.stream import Stream
from arriero.schemas.ledger import Trained
from arriero.schemas.messages import Batch, Weights

if TYPE_CHECKING:
    from arriero.components.learner import Learner

Metrics = dict[str, float]


async def versions(
    state: Learner,
    step: Callable[[Batch], Metrics],
    batches: Stream[Batch],
    compute: Devices,
    context: Context,
    *,
    steps: int,
    checkpoints: Checkpoints,
    plane: WeightPlane,
    judge: Callable[[Sequence[Mapping[str, float]], int], None],
    save: bool,
) -> AsyncIterator[Weights]:
    """Version 0, or what was announced last, and one for each batch up to `steps`; what is left is `save`d.

    `step` takes a step of `state`; `judge` hears the metrics of all steps and the version before it is
    published, and raises if it isn't to be. All ranks run this together.
    """
    publish = await compute(Publisher, state, plane, context)
    checkpoint = await compute(Checkpointer, state, checkpoints, context)
    past = await compute(Recovery, state, checkpoints, context, checkpoint.ranks, step)
    measured: list[Mapping[str, float]] = [s.metrics for s in context.made if isinstance(s, Trained)]
    lacks = True
    while lacks:
        if past.wanted(state.version):
            weights = await compute(publish, state.version, past.metrics(state.version))
            past.check(weights)
            yield weights
        lacks = await compute(past.step)
    while state.version < steps:
        await compute.rest()
        if (batch := await batches.next()) is None:
            break
        metrics = await compute(step, batch)
        measured.append(metrics)
        judge(measured, state.version)
        weights = await compute(publish, state.version, metrics)
        await compute(checkpoint)
        yield weights
    await compute(checkpoint.close, last=True)
    if save:
        await compute(state.save, context.run_dir / "model")
    await compute.rest()
    await compute.aside(publish.close)  # it may wait for a generator that waits for its turn
