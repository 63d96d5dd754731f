"""A run as the exports see it: what it was made of, how it went, and what it left."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import cast

from pydantic import JsonValue

from arriero.engine.errors import UserError
from arriero.launchers.rundir import RunDir
from arriero.launchers.runs import flat
from arriero.launchers.step_lines import Line, Scalars, scalars
from arriero.schemas.manifest import RunManifest
from arriero.schemas.run import RunSummary


@dataclass(frozen=True, kw_only=True)
class Subject:
    """`summary` is None while the run goes on, or if it was killed."""

    run: RunDir
    manifest: RunManifest
    summary: RunSummary | None
    lines: list[Line]

    @property
    def pipeline(self) -> str:
        return self.manifest.pipeline.function.rpartition(":")[2]

    @property
    def state(self) -> str:
        return self.summary.state if self.summary else "unknown"

    @property
    def head(self) -> str:
        """The head of the record's chain; empty for a run without one, or without an end."""
        return self.summary.lineage.head if self.summary and self.summary.lineage else ""

    @property
    def ended(self) -> datetime | None:
        if self.summary is None:
            return None
        return self.manifest.started + timedelta(seconds=self.summary.wall_s)

    def parameters(self) -> dict[str, str]:
        """The configuration by dotted key, each value as JSON unless it is text."""
        values = {**dict(flat(self.manifest.config)), "seed": self.manifest.seed}
        return {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}

    def measures(self) -> Iterator[tuple[int, float, Scalars]]:
        """Step, time in seconds since 1970, and every scalar of the step by its tag."""
        for line in self.lines:
            yield int(cast("int", line["step"])), float(cast("float", line["time"])), scalars(line)

    def results(self) -> dict[str, JsonValue]:
        """What the run came to, without what is only known in detail."""
        if self.summary is None:
            return {}
        found = self.summary.model_dump(mode="json", exclude={"evaluations", "lineage", "error"})
        return {k: v for k, v in found.items() if isinstance(v, int | float | str) and v != ""}


def subject(place: str) -> Subject:
    """The run at `place`. Raises UserError if it is no run directory."""
    run = RunDir(Path(place).absolute())
    if not run.manifest.exists():
        raise UserError(f"{place} is no run directory: there is no manifest.json in it")
    texts = run.metrics.read_text().splitlines() if run.metrics.exists() else []
    return Subject(
        run=run,
        manifest=run.read_manifest(),
        summary=run.read_summary() if run.summary.exists() else None,
        lines=[cast("Line", json.loads(text)) for text in texts],
    )
