"""When what happened in a run: `timeline.jsonl`, a line per look at the replicas and per event of the ledger.

The look is the one the launcher takes anyway, twice a second (less often for hundreds of replicas). Busy and
idle seconds are cumulative, so that nothing between two looks is lost, only its order within them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from arriero.engine.errors import UserError
from arriero.launchers.vitals import Vitals
from arriero.schemas.ledger import Admitted, DroppedEvent, Evaluated, Event, Trained
from arriero.schemas.run import Moment, NodeMoment

_PER_REPLICA_S = 0.01  # a run of 1,000 replicas is looked at every 10 s


class Timeline:
    """Writes it, while the run goes on."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")
        self._looked = 0.0

    def look(self, vitals: Vitals) -> None:
        """All replicas as they are now, unless that was a moment ago."""
        now = time.time()
        if now - self._looked < _PER_REPLICA_S * len(vitals.pulses):
            return
        self._looked = now
        nodes = tuple(
            NodeMoment(
                replica=f"{p.status.role}-{p.status.replica}-{p.status.rank}", node=n.node,
                busy_s=round(n.busy_s, 4), idle_s=round(n.idle_s, 4), waits_for=n.waits_for, ended=n.ended,
            )
            for p in vitals.pulses.values()
            for n in p.status.nodes
        )  # fmt: skip
        self._write(Moment(time=now, nodes=nodes, edges=vitals.queues()))

    def event(self, event: Event) -> None:
        """What became of prompts."""
        match event:
            case Admitted():
                self._write(Moment(time=time.time(), what="admitted", origins=(event.origin,)))
            case Trained():
                self._write(
                    Moment(time=time.time(), what="trained", origins=event.origins, version=event.version)
                )
            case DroppedEvent():
                self._write(Moment(time=time.time(), what=f"dropped: {event.reason}", origins=event.origins))
            case Evaluated():
                self._write(Moment(time=time.time(), what="evaluated", origins=(event.origin,)))
            case _:
                pass

    def close(self) -> None:
        self._file.close()

    def _write(self, moment: Moment) -> None:
        print(moment.model_dump_json(exclude_defaults=True), file=self._file, flush=True)


def moments(path: Path, most_bytes: int | None = None) -> Iterator[Moment]:
    """The lines of a file, of a longer one those in its last `most_bytes`; a torn last one is left out.

    UserError if there is none, or another is damaged.
    """
    if not path.exists():
        raise UserError(f"{path} isn't there: the run was made before timelines were kept, or never started")
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(first := max(0, size - (most_bytes or size)))
        lines = file.read().splitlines()[1 if first else 0 :]
    for number, line in enumerate(lines):
        try:
            yield Moment.model_validate_json(line)
        except ValidationError as error:
            if number < len(lines) - 1:
                raise UserError(
                    f"line {number + 1} of {path} is damaged: {line[:80].decode(errors='replace')}"
                ) from error
