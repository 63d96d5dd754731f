"""TensorBoard's event files, written at once and in this thread.

tensorboardX's own writer hands events to a thread; when that dies, on a full disk say, the next events block
for ever.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# tensorboardX and its protocol buffers have no annotations.

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Protocol, cast

_FLUSH_S = 5.0


class _Events(Protocol):
    """The part of tensorboardX's untyped `EventsWriter` that is used here."""

    def write_event(self, event: object) -> None: ...
    def flush(self) -> bool: ...
    def close(self) -> bool: ...


class Board:
    """One event file in `folder`. All methods raise OSError."""

    def __init__(self, folder: Path) -> None:
        hide = "torch" not in sys.modules
        if hide:  # tensorboardX imports it if it can
            sys.modules["torch"] = None  # type: ignore[assignment]  # pyright: ignore[reportArgumentType]  # means: not there
        try:
            from tensorboardX.event_file_writer import EventsWriter
        finally:
            if hide:
                del sys.modules["torch"]
        folder.mkdir(parents=True, exist_ok=True)
        self._events = cast("_Events", EventsWriter(str(folder / "events")))
        self._flushed = time.monotonic()

    def add_scalar(self, tag: str, value: float, step: int, time_s: float | None = None) -> None:
        """At `time_s` in seconds since 1970; None: now."""
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]  # made at import
        from tensorboardX.summary import scalar

        at_s = time.time() if time_s is None else time_s
        self._events.write_event(Event(wall_time=at_s, step=step, summary=scalar(tag, value)))
        if (now := time.monotonic()) - self._flushed > _FLUSH_S:
            self._events.flush()
            self._flushed = now

    def close(self) -> None:
        self._events.close()
