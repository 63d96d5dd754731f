"""Evaluation as a graph: held-out prompts alone, and weights that stay as they are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, ClassVar

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from arriero.components.compute import ComputeThread
from arriero.components.model_directory import check_model_directory
from arriero.components.prompts import ScreenedSource
from arriero.engine.graph import Evaluation, GraphView
from arriero.engine.runtime.context import Context, current
from arriero.engine.stream import Stream
from arriero.schemas.messages import Prompt, ScoredGroup, Weights

if TYPE_CHECKING:
    from arriero.engine.weights import WeightSender


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", arbitrary_types_allowed=True))
class HeldOutSource(ScreenedSource):
    """The held-out prompts of its data sets, once; of a set that holds nothing out, all rows."""

    async def run(self) -> AsyncIterator[Prompt]:
        nothing: tuple[Prompt, ...] = ()
        for prompt in nothing:  # none is trained on
            yield prompt

    async def evaluation(self) -> Evaluation | None:
        parts = self._opened()
        held_out = [p.held_out() if p.config.holds_out else p.all_held_out() for p in parts]
        return Evaluation(prompts=await self._usable(held_out))

    def evaluates_every(self) -> int:
        return 0


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class FixedWeights:
    """Publishes the weights of a model directory as version 0, and makes no other.

    It stands where a trainer would: held-out prompts leave the graph here.
    """

    model: str
    computes: ClassVar[bool] = True

    def limit(self) -> int | None:
        return 0

    def problems(self, view: GraphView) -> Iterable[str]:
        yield from check_model_directory(self.model)

    async def run(self, scored: Stream[ScoredGroup]) -> AsyncIterator[Weights]:
        with ComputeThread("weights") as compute:
            sender, weights = await compute(self._publish, current())
            try:
                yield weights
                while await scored.next() is not None:
                    raise ValueError("a training prompt came to weights that stay as they are")
            finally:
                await compute(sender.close)

    def _publish(self, context: Context) -> tuple[WeightSender, Weights]:
        from arriero.components.engine_layout import engine_layouts
        from arriero.components.policy import load_model
        from arriero.components.trained_weights import TrainedWeights
        from arriero.components.training_options import Average
        from arriero.engine.weights import WeightSender

        model = load_model(self.model)
        tensors = TrainedWeights(model, Average()).raw()
        receivers = engine_layouts(model.config, tensors, context.parts)
        sender = WeightSender(context.weights_url, tensors, receivers=receivers, slots=2)
        return sender, Weights(version=0, manifest=sender.publish(0, tensors))
