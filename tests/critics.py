"""Runs a critic on batches in memory, by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from arriero.components.checkpoints import Checkpoints
from arriero.components.critic import Critic
from arriero.schemas.messages import Batch
from tests.drive import in_admission_order, kept, outputs, stream


async def judged(critic: Critic, batches: Sequence[Batch]) -> list[Batch]:
    """The batches as `critic` gives them on; nothing is kept of it."""
    alone = replace(critic, checkpoints=Checkpoints(every=0))
    with in_admission_order(0):
        return kept(await outputs(alone.run(stream(batches, Batch))))
