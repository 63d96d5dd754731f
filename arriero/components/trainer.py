"""The trainer: one step per batch, a new version after each, published before it is announced."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from pydantic import ConfigDict, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.checkpoints import Checkpoints
from arriero.components.compute import ComputeThread, own_device
from arriero.components.health import Gate, HealthGates, judge
from arriero.components.labelled import HasMismatched
from arriero.components.losses import Aggregation, Facts, Loss, facts
from arriero.components.mismatch import MismatchGate
from arriero.components.model_directory import check_model_directory, head_problem, vocabulary_problem
from arriero.components.optimizer import AdamW, Optimizer
from arriero.components.placement import DevicePlacement, Devices
from arriero.components.publisher import WeightPlane
from arriero.components.recorded import RecordedRollouts
from arriero.components.reference import ReferenceLogprobs
from arriero.components.replay import Replay
from arriero.components.sampling import Sampling
from arriero.components.training_options import TrainingOptions
from arriero.components.versions import versions
from arriero.engine.errors import StepRefused
from arriero.engine.graph import GraphView
from arriero.engine.runtime.context import current
from arriero.engine.stream import Stream
from arriero.schemas.messages import Batch, Weights

if TYPE_CHECKING:
    from arriero.components.training import TrainState


@runtime_checkable
class Samples(Protocol):
    """A component upstream that draws tokens from the policy."""

    sampling: Sampling


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", arbitrary_types_allowed=True))
class Trainer:
    """Trains `model` for `steps` steps, one per batch, and saves it under `model/` of the run directory.

    A step takes an update on each of `minibatches` equal parts of the batch, `epochs` times. Micro-batches
    hold up to `token_budget` tokens, padding included; they don't change the result. With several ranks each
    trains its share of every batch. `horizon` divides under `aggregation="fixed_length"`. `training` is how
    steps are computed; `placement` must be that of the generators. `teacher`: a model of the same vocabulary
    that a loss compares the policy with, held beside it and split as it is.
    """

    model: str
    loss: Loss
    steps: PositiveInt
    optimizer: Optimizer = field(default_factory=AdamW)
    aggregation: Aggregation = "token_mean"
    horizon: PositiveFloat | None = None
    minibatches: PositiveInt = 1
    epochs: PositiveInt = 1
    token_budget: PositiveInt = 8192
    training: TrainingOptions = field(default_factory=TrainingOptions)
    mismatch: MismatchGate = field(default_factory=MismatchGate)
    health: HealthGates = field(default_factory=HealthGates)
    weights: WeightPlane = field(default_factory=WeightPlane)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    placement: DevicePlacement = field(default_factory=DevicePlacement)
    teacher: str | None = None
    save: bool = True
    computes: ClassVar[bool] = True

    def limit(self) -> int | None:
        return self.steps

    def checkpoint_place(self, run_dir: Path, run_id: str, node: str) -> str:
        return self.checkpoints.place(run_dir, run_id, node)

    def problems(self, view: GraphView) -> Iterable[str]:
        yield from check_model_directory(self.model)
        yield from self.weights.problems()
        yield from self.checkpoints.problems()
        yield from self.optimizer.problems(steps=self.steps)
        loss = type(self.loss).__name__
        if self.aggregation == "fixed_length" and self.horizon is None:
            yield "aggregation=fixed_length needs horizon, the number of tokens to divide by"
        if self.aggregation != "fixed_length" and self.horizon is not None:
            yield f"aggregation={self.aggregation} doesn't read horizon={self.horizon}; leave it out"
        yield from self.training.problems(ranks=view.ranks, optimizer=self.optimizer.kind)
        yield from self.training.lora.problems(self.model)
        yield from self._unmet(facts(self.loss), view)
        if view.staleness and not self.loss.ratio_control:
            yield f"staleness {view.staleness} with {loss}, which controls no ratio; use AIPO or a clip"
        if view.upstream(Replay) and not self.loss.ratio_control:
            yield f"replayed samples of any age with {loss}, which controls no ratio; use AIPO or a clip"
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
        made = any(c.mismatched for c in view.upstream(HasMismatched))  # type: ignore[type-abstract]  # as below
        if "kl_baseline" in wants.needs and not made:
            yield f"{loss} reads mismatched responses, but nothing upstream makes them; set its kl"
        if made and "kl_baseline" not in wants.needs:
            yield f"mismatched responses aren't read by {loss}; set mismatched=false"
        yield from self._about_teacher("divergence" in wants.needs)
        if wants.needs & {"proximal", "multiplier"} and self.minibatches * self.epochs == 1:
            yield f"{loss} limits what later updates on a batch change; set minibatches or epochs above 1"
        if wants.by_sequence and self.aggregation != "sequence_mean":
            what = "pairs" if wants.together > 1 else "responses"
            yield f"aggregation={self.aggregation} weighs the {what} of {loss} by length; use sequence_mean"

    def _about_teacher(self, wanted: bool) -> Iterable[str]:
        if self.teacher is None:
            if wanted:
                yield f"{type(self.loss).__name__} compares with a teacher, but there is none; set teacher"
            return
        if not wanted:
            yield f"teacher={self.teacher} isn't read by {type(self.loss).__name__}; leave it out"
            return
        yield from check_model_directory(self.teacher)
        yield from vocabulary_problem(self.teacher, self.model)
        yield from head_problem(self.teacher, self.model)
        if self.placement.devices == "turns":
            yield "placement.devices=turns: the memory of a teacher isn't given back; leave placement out"

    async def run(self, batches: Stream[Batch]) -> AsyncIterator[Weights]:
        context = current()
        with (
            ComputeThread("trainer") as thread,
            closing(Devices(thread, self.placement, context, alone=True)) as compute,
        ):
            state = await compute(self.load, context.ranks, bool(context.loop))
            if compute.shared:
                from arriero.components.parking import ParkedTraining

                parked = await compute(ParkedTraining, state)
                compute.asleep, compute.awake = parked.park, parked.unpark
            made = versions(
                state, state.step, batches, compute, context, steps=self.steps, checkpoints=self.checkpoints,
                plane=self.weights, judge=self._stop_if_unhealthy, save=self.save,
            )  # fmt: skip
            async for weights in made:
                yield weights

    def gates(self) -> tuple[Gate, ...]:
        return (*self.mismatch.gates(), *self.health.gates())

    def _stop_if_unhealthy(self, measured: Sequence[Mapping[str, float]], version: int) -> None:
        """StepRefused, before the weights of `version` are published, if a gate says so."""
        findings = judge(self.gates(), measured, version, current().node)
        if stops := tuple(f for f in findings if f.level == "stop"):
            raise StepRefused(stops)

    def load(self, ranks: int, followed: bool) -> TrainState:
        """What it trains, at version 0; `followed`: generators sample with it. All ranks call it together."""
        import torch.distributed as dist

        from arriero.components.training import TrainState, load_policy

        # What is split goes to the device layer by layer.
        device = own_device() if self.training.shards == 1 else "cpu"
        model, tokenizer = load_policy(self.model, device=device)
        teacher = None if self.teacher is None else load_policy(self.teacher, device=device)[0]
        return TrainState(
            model, tokenizer, loss=self.loss, optimizer=self.optimizer, steps=self.steps,
            token_budget=self.token_budget, aggregation=self.aggregation, horizon=self.horizon or 0,
            minibatches=self.minibatches, epochs=self.epochs, options=self.training,
            # Not whether there is a world: an engine in this process may have made one of its own.
            group=dist.group.WORLD if ranks > 1 else None,
            # Where nobody samples with these weights, version 0 of a token is that of another run.
            mismatch_bound=self.mismatch.token_bound if followed else None,
            teacher=teacher,
        )  # fmt: skip
