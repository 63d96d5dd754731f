"""Log-probabilities of the policy that a batch is about to train, for what is computed before the trainer.

    batch ..... | wait for what was given before | read with the weights of now | -> critic -> trainer

| waits for                       | unblocked by                                            |
|---------------------------------|---------------------------------------------------------|
| the batches it gave before      | the trainer: they are trained, or dropped on their way   |
| the version that they have made | the loop of the weights                                 |
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.compute import ComputeThread, own_device
from arriero.components.masked import on_mask
from arriero.components.model_directory import reader_problems
from arriero.components.planning import Layout
from arriero.components.weight_intake import NoMoreVersions, WeightIntake
from arriero.engine.graph import GraphView
from arriero.engine.runtime.context import Context, current
from arriero.engine.stream import Stream
from arriero.schemas.messages import Batch, Dropped, Weights

if TYPE_CHECKING:
    from torch import Tensor

    from arriero.components.forward import PolicyForward


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class PolicyLogprobs:
    """The batch with `policy` on every sample: what the weights that it is about to train say of it, in nats.

    It follows the weights as a generator does. A batch is read when all that were given before have been
    trained or dropped, so with exactly the version that it replaces; trainer and reader take turns for that.
    Only after this node was started again may a batch that is still under way make it one version older. At
    the temperature the sample was drawn at; micro-batches hold up to `token_budget` tokens.
    """

    model: str
    token_budget: PositiveInt = 8192
    packing: Layout = "shared_prefix"
    computes: ClassVar[bool] = True

    def problems(self, view: GraphView) -> Iterable[str]:
        yield from reader_problems(self.model, view)

    async def run(self, batches: Stream[Batch], weights: Stream[Weights]) -> AsyncIterator[Batch | Dropped]:
        context = current()
        if context.next_version is None:
            raise RuntimeError(f"{context.node} doesn't fire once per version; put it before the critic")
        with ComputeThread("policy") as compute:
            follower = await compute(_Follower, self, context)
            intake = WeightIntake(weights, follower, compute, beside=False)
            try:
                async for batch in batches:
                    version = await context.next_version()
                    try:
                        # After a start of this node a newer one may be there, which does as well.
                        await (intake.use(version) if context.deterministic else intake.reach(version))
                    except NoMoreVersions as over:
                        yield Dropped(parent=batch.id, reason="end_of_run", detail=str(over))
                    else:
                        yield await compute(follower.read, batch)
            finally:
                await compute(follower.close)


class _Follower:
    """A policy in this process, and the receiver that fills it; as `TakesWeights` says."""

    def __init__(self, config: PolicyLogprobs, context: Context) -> None:
        from arriero.components.forward import PolicyForward
        from arriero.components.policy import load_model
        from arriero.engine.weights import WeightReceiver

        model: Any = load_model(config.model, device=own_device())  # its state isn't typed
        self._budget = config.token_budget
        self._forward: PolicyForward = PolicyForward(model, layout=config.packing)
        self._into: dict[str, Tensor] = model.state_dict(keep_vars=True)
        self._receiver = WeightReceiver(f"{context.node}-{context.replica}", context.secret)
        self.version = -1

    def prepare(self, weights: Weights) -> None:
        raise NotImplementedError("it has no second set of parameters")

    def load(self, weights: Weights) -> None:
        from arriero.components.group_decoding import published

        if weights.version != self.version:
            self._receiver.receive(published(weights), self._into)
            self.version = weights.version

    def read(self, batch: Batch) -> Batch:
        from arriero.components.policy import sample_logprobs

        found = sample_logprobs(self._forward, batch.samples, token_budget=self._budget)
        samples = tuple(
            s.model_copy(update={"policy": on_mask(s.mask, f, elsewhere=np.nan)})
            for s, f in zip(batch.samples, found, strict=True)
        )
        return batch.model_copy(update={"samples": samples, "parents": (batch.id,)})

    def close(self) -> None:
        self._receiver.close()
