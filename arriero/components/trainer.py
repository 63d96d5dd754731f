"""The trainer: one step per batch, a new version after each, published before it is announced."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import field
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from pydantic import ConfigDict, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.compute import ComputeThread, own_device
from arriero.components.losses import Aggregation, Facts, Loss, facts
from arriero.components.mismatch import MismatchGate
from arriero.components.model_directory import check_model_directory
from arriero.components.optimizer import AdamW
from arriero.components.recorded import RecordedRollouts
from arriero.components.reference import ReferenceLogprobs
from arriero.components.sampling import Sampling
from arriero.engine.graph import GraphView
from arriero.engine.runtime.context import Context, current
from arriero.engine.stream import Stream
from arriero.schemas.messages import Batch, Weights

if TYPE_CHECKING:
    from arriero.components.training import TrainState
    from arriero.engine.weights import WeightSender


@runtime_checkable
class Samples(Protocol):
    """A component upstream that draws tokens from the policy."""

    sampling: Sampling


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", arbitrary_types_allowed=True))
class Trainer:
    """Trains `model` for `steps` steps, one per batch, and saves it under `model/` of the run directory.

    A step takes an update on each of `minibatches` equal parts of the batch, `epochs` times. Micro-batches
    hold up to `token_budget` tokens, padding included; they don't change the result. With several ranks each
    trains its share of every batch. `horizon` divides under `aggregation="fixed_length"`.
    """

    model: str
    loss: Loss
    steps: PositiveInt
    optimizer: AdamW = field(default_factory=AdamW)
    aggregation: Aggregation = "token_mean"
    horizon: PositiveFloat | None = None
    minibatches: PositiveInt = 1
    epochs: PositiveInt = 1
    token_budget: PositiveInt = 8192
    mismatch: MismatchGate = field(default_factory=MismatchGate)
    save: bool = True
    computes: ClassVar[bool] = True

    def limit(self) -> int | None:
        return self.steps

    def problems(self, view: GraphView) -> Iterable[str]:
        yield from check_model_directory(self.model)
        loss = type(self.loss).__name__
        if self.aggregation == "fixed_length" and self.horizon is None:
            yield "aggregation=fixed_length needs horizon, the number of tokens to divide by"
        if self.aggregation != "fixed_length" and self.horizon is not None:
            yield f"aggregation={self.aggregation} doesn't read horizon={self.horizon}; leave it out"
        yield from self._unmet(facts(self.loss), view)
        if view.staleness and not self.loss.ratio_control:
            yield f"staleness {view.staleness} with {loss}, which controls no ratio; use AIPO or a clip"
        samplers = view.upstream(Samples)  # type: ignore[type-abstract]  # an instance check needs no class
        for sampler in samplers:
            if sampler.sampling.top_p < 1.0 or sampler.sampling.greedy:
                yield (
                    f"sampling with top_p={sampler.sampling.top_p}, greedy={sampler.sampling.greedy}: "
                    "the trainer can't reproduce those log-probabilities; train with top_p=1, greedy=false"
                )
        known = bool(samplers) or bool(view.upstream(RecordedRollouts))
        if self.loss.needs_behaviour and not known:
            yield f"{loss} needs behaviour log-probabilities, but nothing upstream samples; use CrossEntropy"

    def _unmet(self, wants: Facts, view: GraphView) -> Iterable[str]:
        """What the loss asks of the graph and of this configuration, and doesn't get."""
        loss = type(self.loss).__name__
        if "reference" in wants.needs and not view.upstream(ReferenceLogprobs):
            yield f"{loss} needs reference log-probabilities; put a ReferenceLogprobs before the trainer"
        if "proximal" in wants.needs and self.minibatches * self.epochs == 1:
            yield f"{loss} clips what later updates on a batch change; set minibatches or epochs above 1"
        if wants.together > 1 and self.aggregation != "sequence_mean":
            yield (f"aggregation={self.aggregation} weighs the pairs of {loss} by length; use sequence_mean")

    async def run(self, batches: Stream[Batch]) -> AsyncIterator[Weights]:
        context = current()
        with ComputeThread("trainer") as compute:
            state = await compute(self._load)
            publish = await compute(_Publisher, state, context)
            yield await compute(publish, 0, {})
            async for batch in batches:
                metrics = await compute(state.step, batch)
                if self.mismatch.check(state.version - 1, metrics):
                    context.count("mismatch_warnings", 1)
                yield await compute(publish, state.version, metrics)
                if state.version == self.steps:
                    break
            if self.save and context.rank == 0:
                await compute(state.save, context.run_dir / "model")

    def _load(self) -> TrainState:
        import torch.distributed as dist

        from arriero.components.training import TrainState, load_policy

        model, tokenizer = load_policy(self.model, device=own_device())
        return TrainState(
            model, tokenizer, loss=self.loss, optimizer=self.optimizer, steps=self.steps,
            token_budget=self.token_budget, aggregation=self.aggregation, horizon=self.horizon or 0,
            minibatches=self.minibatches, epochs=self.epochs,
            group=dist.group.WORLD if dist.is_initialized() else None,
            mismatch_bound=self.mismatch.token_bound,
        )  # fmt: skip


class _Publisher:
    """Makes the `Weights` of a version; where a loop follows, the bytes go onto the weight plane first."""

    def __init__(self, state: TrainState, context: Context) -> None:
        from arriero.engine.weights import WeightSender

        self._state = state
        self._sender: WeightSender | None = None
        if context.loop and context.rank == 0:
            self._sender = WeightSender(
                context.weights_url, state.state_dict_for_weights(), slots=context.staleness + 2
            )

    def __call__(self, version: int, metrics: dict[str, float]) -> Weights:
        tensors = self._state.state_dict_for_weights()
        manifest = self._sender.publish(version, tensors) if self._sender is not None else None
        return Weights(version=version, manifest=manifest, metrics=metrics)
