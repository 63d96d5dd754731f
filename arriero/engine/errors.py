"""Errors that are the user's to mend: one line that names the thing, the value and the remedy."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

if TYPE_CHECKING:
    from arriero.schemas.ledger import Unhealthy

# Our own code, Python's and what is installed.
_NOT_THE_USERS = (
    Path(__file__).parents[1],
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


class UserError(ValueError):
    """A mistake in input, configuration or environment; the command prints it without a traceback."""


class GraphError(UserError):
    """The graph can't run as built: wrong record type, open loop, rates or capacities that don't fit."""


class StepRefused(UserError):
    """A gate ends the run before anybody sees what came of a step; `findings` go into the ledger."""

    def __init__(self, findings: tuple[Unhealthy, ...]) -> None:
        super().__init__("\n".join(f.detail for f in findings))
        self.findings = findings


def one_line(error: BaseException, limit: int = 300) -> str:
    """What is wrong, without line breaks; of a pydantic error each field with the value it got.

    An error that says nothing is called by its class.
    """
    text = str(error)
    if isinstance(error, ValidationError):
        found = error.errors(include_url=False, include_context=False)
        text = "; ".join(f"{_field(e['loc'])}{_reason(e['msg'])} (got {_short(e['input'])})" for e in found)
    text = " ".join(text.split()) or type(error).__name__
    return text if len(text) <= limit else f"{text[:limit]}..."


def describe(error: BaseException) -> str:
    """Type and message in one line; with the line of the user's own code, if it was raised from there."""
    place = users_line(error)
    said = error.msg if isinstance(error, SyntaxError) else one_line(error)
    return f"{type(error).__name__}: {said}{f' ({place})' if place else ''}"


def users_line(error: BaseException) -> str:
    """`file.py:7` of the user's own code that `error` came from; empty if it came from none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith("<frozen") and not _ours(Path(f.filename))]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""


def _ours(file: Path) -> bool:
    return any(folder in file.parents for folder in _NOT_THE_USERS)


def _field(place: tuple[int | str, ...]) -> str:
    return f"{'.'.join(map(str, place))}: " if place else ""


def _reason(message: str) -> str:
    return message.removeprefix("Value error, ")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
