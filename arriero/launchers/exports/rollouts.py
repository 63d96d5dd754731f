"""The scored training groups of a run as JSONL, as `RecordedRollouts` reads them where there is no record."""

from __future__ import annotations

from pathlib import Path

from arriero.components.recorded import write_recorded
from arriero.components.recorded_runs import RecordedRun
from arriero.launchers.exports.subject import Subject


def write(about: Subject, path: Path) -> str:
    run = RecordedRun(str(about.run.path), by_step=True)
    write_recorded(path, (run.group(row) for block in range(len(run.sizes)) for row in run.read(block)))
    return f"{sum(run.sizes)} groups in {path}"
