"""Why a run ends early, in the words that the terminal shows."""

from __future__ import annotations

import errno
import re
import shutil
import signal
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from arriero.engine.errors import UserError
from arriero.schemas.ledger import DroppedEvent, Ended

_TRACEBACK_LINES = 14
_SPACE_BYTES = 256 << 10  # less is none
# How torchrun says which rank ended first, and its exit code.
_ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*: (\d+).*?exitcode\s*: (-?\d+)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """`message` is all that is shown. Of failures seen together the lowest `weight` is the cause.

    `code`: 2 for what the user can mend, said in one line; 1 for a fault. `again`: all of the run may start
    again, from what is certain.
    """

    message: str
    code: int = 1
    weight: int = 1
    again: bool = False


def killed(name: str, number: int, log: object) -> Failure:
    """A process that a signal ended: nobody inside could say anything, and others fail because of it."""
    return Failure(message=f"{name} was killed by {signal_name(number)}; its log is {log}", weight=0)


def signal_name(number: int) -> str:
    """As in "signal 9 (SIGKILL)"."""
    known = {s.value: s.name for s in signal.Signals}
    return f"signal {number} ({known.get(number, 'unknown')})"


def node_failed(name: str, ended: Ended, log: object, waits: str) -> Failure:
    """A node said on the control log what went wrong; `waits` is shown if it had waited too long."""
    if ended.user:
        return Failure(message=ended.error, code=2)
    parts = [f"{name}: {ended.node} failed: {ended.error}", last_lines(ended.traceback)]
    if "WaitTimeout" in ended.error:
        parts += [waits, "If it may take that long, raise --wait-bound-s."]
    if log is not None:
        parts.append(f"The full log is {log}")
    return Failure(message="\n".join(p for p in parts if p))


def exited(name: str, code: int, log: object, text: str) -> Failure:
    """A process ended with `code` and no node of it had said why; `text` is what stands in its log."""
    text = text.rstrip()
    if code == 2 and text:
        return Failure(message=text.splitlines()[-1], code=2, weight=2)
    if (rank := _ROOT_CAUSE.search(text)) and int(rank[2]) < 0:
        return killed(f"{name} rank {rank[1]}", -int(rank[2]), log)
    if code == 0:
        return Failure(message=f"{name} left before its nodes had ended; its log is {log}", weight=2)
    return Failure(
        message=f"{name} ended with exit code {code}\n{last_lines(text)}\nThe full log is {log}", weight=2
    )


def silent(name: str, age_s: float, bound_s: float, log: object, waits: str) -> Failure:
    """A replica whose process is there but says nothing."""
    where = f"; its log is {log}" if log is not None else ""
    return Failure(
        message=f"{name} gave no sign of life for {age_s:.0f} s (bound {bound_s:g} s){where}\n{waits}",
        weight=2,
    )


def dead_letters(event: DroppedEvent, count: int, allowed: int) -> Failure:
    """More records failed for good than the run allows."""
    return Failure(
        message=f"{event.node} gave up record {event.parent}: {event.detail or 'no reason given'}; "
        f"{count} dead letters, --max-dead-letters allows {allowed}",
        code=2,
    )


def out_of_space(failure: Failure, folders: Iterable[Path]) -> Failure:
    """The cause behind `failure` if one of `folders` is full: who writes there can't even say what failed."""
    for folder in folders:
        if folder.exists() and shutil.disk_usage(folder).free < _SPACE_BYTES:
            first = failure.message.partition("\n")[0]
            message = f"no space is left in {folder}; make room, or choose another ({first})"
            return Failure(message=message, code=2)
    return failure


def raised(error: BaseException) -> Failure:
    """An exception that reached the launcher itself; of a group, the first one."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)  # isinstance leaves its parameter open
        return raised(group.exceptions[0])
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return Failure(message="no space is left for the record of the run; make room", code=2)
    if isinstance(error, (UserError, TimeoutError)):
        return Failure(message=str(error), code=2 if isinstance(error, UserError) else 1)
    return Failure(message=last_lines("".join(traceback.format_exception(error))))


def last_lines(text: str, count: int = _TRACEBACK_LINES) -> str:
    """The end of a log or traceback."""
    lines = text.rstrip().splitlines()
    return "\n".join(lines[-count:])
