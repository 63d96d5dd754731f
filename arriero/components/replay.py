"""A replay buffer: samples of the past, drawn again. For what may learn from data of any age.

    batch k -> the last `capacity` samples -> up to `samples` of them, drawn by a seed of run and batch

In the ledger a prompt is trained in the version whose batch brought it, once. That it is drawn again makes no
entry: drawn samples are marked `replayed`, and neither the account nor the bound on staleness counts them, so
`admitted = trained + dropped + in flight` holds whatever is replayed. How many were is a counter of the node.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import numpy as np
from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.recovery import RecordedSteps
from arriero.engine.graph import GraphView
from arriero.engine.runtime.context import Context, count, current
from arriero.engine.stream import Stream
from arriero.schemas.messages import Batch, Sample


def draw_seed(run_seed: int, batch: str) -> int:
    """Seed [0, 2**64) of the draw that answers a batch: so what was replayed follows from a record."""
    digest = hashlib.blake2b(f"{run_seed}/{batch}/replay".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Replay:
    """For each batch one of `samples` samples, drawn without repetition from the last `capacity`.

    Those of the batch itself are among them. With `fresh` they come first instead, as they are, and those
    drawn are older: so a policy can be trained on both, under a loss that controls the ratio. Without, all
    are drawn, for a critic beside the policy. After a restart the buffer is filled again from the record;
    without one it is empty, and draws are smaller until it fills.
    """

    capacity: PositiveInt
    samples: PositiveInt
    fresh: bool = False

    def checkpoint_place(self, run_dir: Path, run_id: str, node: str) -> str:
        """What it holds stands in the record."""
        return ""

    def problems(self, view: GraphView) -> Iterable[str]:
        if self.samples > self.capacity:
            yield f"samples={self.samples} are more than capacity={self.capacity} holds; lower samples"

    async def run(self, batches: Stream[Batch]) -> AsyncIterator[Batch]:
        context = current()
        kept = deque(await asyncio.to_thread(self._remembered, context), maxlen=self.capacity)
        async for batch in batches:
            if not self.fresh:
                kept.extend(batch.samples)
            rng = np.random.default_rng(draw_seed(context.seed, batch.id))
            chosen = rng.choice(len(kept), min(self.samples, len(kept)), replace=False) if kept else ()
            drawn = tuple(kept[int(i)].model_copy(update={"replayed": True}) for i in sorted(chosen))
            count("samples_replayed", len(drawn))
            first = batch.samples if self.fresh else ()
            yield batch.model_copy(update={"samples": (*first, *drawn), "parents": (batch.id,)})
            if self.fresh:
                kept.extend(batch.samples)

    def _remembered(self, context: Context) -> list[Sample]:
        """What the buffer held when an earlier life ended."""
        recorded = RecordedSteps(context)
        found: list[Sample] = []
        for step in reversed(context.made if context.record_url else ()):
            if len(found) >= self.capacity:
                break
            found = [*recorded.batches(step)[0].samples, *found]
        return found
