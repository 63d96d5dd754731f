"""Log-probabilities of a model that isn't trained: the reference of a penalty, or a teacher."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.compute import ComputeThread, own_device
from arriero.components.masked import on_mask
from arriero.components.model_directory import reader_problems
from arriero.components.planning import Layout
from arriero.engine.graph import GraphView
from arriero.engine.stream import Stream
from arriero.schemas.messages import Batch, Sample

if TYPE_CHECKING:
    from arriero.components.forward import PolicyForward


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class ReferenceLogprobs:
    """The batch with `reference` on every sample: what `model` says of the trained tokens, in nats.

    At the temperature the sample was drawn at, so that it is comparable with the policy's. The model must
    have the policy's vocabulary. Micro-batches hold up to `token_budget` tokens, in the layout `packing`.
    """

    model: str
    token_budget: PositiveInt = 8192
    packing: Layout = "shared_prefix"
    computes: ClassVar[bool] = True

    def problems(self, view: GraphView) -> Iterable[str]:
        yield from reader_problems(self.model, view)

    async def run(self, batches: Stream[Batch]) -> AsyncIterator[Batch]:
        with ComputeThread("reference") as compute:
            forward = await compute(self._load)
            async for batch in batches:
                yield await compute(self._read, forward, batch)

    def _load(self) -> PolicyForward:
        from arriero.components.forward import PolicyForward
        from arriero.components.policy import load_policy

        model, _ = load_policy(self.model, device=own_device())
        return PolicyForward(model, layout=self.packing)

    def _read(self, forward: PolicyForward, batch: Batch) -> Batch:
        from arriero.components.policy import sample_logprobs

        found = sample_logprobs(forward, batch.samples, token_budget=self.token_budget)
        samples = tuple(_with_reference(s, f) for s, f in zip(batch.samples, found, strict=True))
        return batch.model_copy(update={"samples": samples, "parents": (batch.id,)})


def _with_reference(sample: Sample, logprobs: np.ndarray[tuple[int], np.dtype[np.float32]]) -> Sample:
    return sample.model_copy(update={"reference": on_mask(sample.mask, logprobs, elsewhere=np.nan)})
