"""Rows that a reward can't score, found before the first prompt is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from arriero.components.verifiers.quarantine import quarantine
from arriero.components.verifiers.reward import RolloutReward
from arriero.schemas.messages import Prompt

_AT_ONCE = 256


async def screened(reward: RolloutReward, prompts: Sequence[Prompt]) -> set[int]:
    """The rows of the prompts that no response could be scored for, written to `quarantine.jsonl`."""
    found: dict[int, tuple[Prompt, str]] = {}
    for part in reward.screens():
        async with part.opened() as scorer:
            for first in range(0, len(prompts), _AT_ONCE):
                some = [p for p in prompts[first : first + _AT_ONCE] if p.row not in found]
                reasons = await asyncio.gather(*(scorer.unscorable(p) for p in some))
                found |= {p.row: (p, why) for p, why in zip(some, reasons, strict=True) if why}
    if found:
        quarantine(list(found.values()))
    return set(found)
