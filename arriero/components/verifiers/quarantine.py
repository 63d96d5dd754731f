"""The report of rows that a reward can't score: `quarantine.jsonl` of the run directory."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from arriero.engine.runtime.context import count, run_dir
from arriero.schemas.messages import Prompt

log = logging.getLogger(__name__)

REPORT = "quarantine.jsonl"
Place = tuple[str, str, int]


class Quarantine:
    """Tells of rows, each once: a warning, the counter `rows_quarantined`, a line of the report.

    A row that stands in the report already (of an earlier epoch, or before a restart) isn't told again.
    """

    def __init__(self) -> None:
        self._told: set[Place] | None = None

    def tell(self, found: Sequence[tuple[Prompt, str]]) -> None:
        """`found` are prompts with their reasons."""
        folder = run_dir()
        if found and self._told is None:
            self._told = _read(folder / REPORT) if folder else set()
        told = self._told or set()
        new = {(p.source, p.split, p.row): (p, why) for p, why in found}
        new = {place: row for place, row in new.items() if place not in told}
        if not new:
            return
        count("rows_quarantined", len(new))
        # Of those that are met one by one there may be many: one warning is enough.
        level = logging.DEBUG if told and len(new) == 1 else logging.WARNING
        see = f", see {folder / REPORT}" if folder else ""
        rows = "1 row is" if len(new) == 1 else f"{len(new)} rows are"
        log.log(level, "%s quarantined%s; the first: %s", rows, see, next(iter(new.values()))[1])
        self._told = told | new.keys()
        if folder:
            with (folder / REPORT).open("a", encoding="utf-8") as file:
                file.writelines(_line(prompt, why) for prompt, why in new.values())


def _line(prompt: Prompt, why: str) -> str:
    row = {
        "data": prompt.source, "split": prompt.split, "row": prompt.row, "answer": prompt.answer,
        "reason": why,
    }  # fmt: skip
    return json.dumps(row) + "\n"


def _read(report: Path) -> set[Place]:
    lines = report.read_text(encoding="utf-8").splitlines() if report.is_file() else []
    rows = [json.loads(line) for line in lines]
    return {(str(r["data"]), str(r["split"]), int(r["row"])) for r in rows}
