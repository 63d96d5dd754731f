"""The report of rows that a reward can't score: `quarantine.jsonl` of the run directory."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from arriero.engine.runtime.context import count, run_dir
from arriero.schemas.messages import Prompt

log = logging.getLogger(__name__)

REPORT = "quarantine.jsonl"


def quarantine(found: Sequence[tuple[Prompt, str]]) -> None:
    """Tell of these rows, each with its reason: a warning, the counter `rows_quarantined`, a line each."""
    count("rows_quarantined", len(found))
    folder = run_dir()
    told = f", see {folder / REPORT}" if folder else ""
    log.warning("%d rows are quarantined%s; the first: %s", len(found), told, found[0][1])
    if folder:
        with (folder / REPORT).open("a", encoding="utf-8") as file:
            for prompt, why in found:
                row = {
                    "data": prompt.source, "split": prompt.split, "row": prompt.row,
                    "answer": prompt.answer, "reason": why,
                }  # fmt: skip
                file.write(json.dumps(row) + "\n")
