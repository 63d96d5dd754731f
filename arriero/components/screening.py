"""Rows that a reward can't score, found before the first prompt is sent."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence

from arriero.components.verifiers.reward import RolloutReward
from arriero.engine.runtime.context import count, run_dir
from arriero.schemas.messages import Prompt

log = logging.getLogger(__name__)

REPORT = "quarantine.jsonl"
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
        _report(list(found.values()))
    return set(found)


def _report(found: Sequence[tuple[Prompt, str]]) -> None:
    count("rows_quarantined", len(found))
    folder = run_dir()
    told = f", see {folder / REPORT}" if folder else ""
    log.warning("%d rows are quarantined%s; the first: %s", len(found), told, found[0][1])
    if folder:
        with (folder / REPORT).open("a", encoding="utf-8") as file:
            for prompt, why in found:
                row = {"data": prompt.source, "row": prompt.row, "answer": prompt.answer, "reason": why}
                file.write(json.dumps(row) + "\n")
