"""Errors that are the user's to mend: one line that names the thing, the value and the remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ValidationError

if TYPE_CHECKING:
    from arriero.schemas.ledger import Unhealthy


class UserError(ValueError):
    """A mistake in input, configuration or environment; the command prints it without a traceback."""


class GraphError(UserError):
    """The graph can't run as built: wrong record type, open loop, rates or capacities that don't fit."""


class StepRefused(UserError):
    """A gate ends the run before anybody sees what came of a step; `findings` go into the ledger."""

    def __init__(self, findings: tuple[Unhealthy, ...]) -> None:
        super().__init__("\n".join(f.detail for f in findings))
        self.findings = findings


def one_line(error: Exception, limit: int = 300) -> str:
    """What is wrong, without line breaks; of a pydantic error each field with the value it got.

    An error that says nothing is called by its class.
    """
    text = str(error)
    if isinstance(error, ValidationError):
        found = error.errors(include_url=False, include_context=False)
        text = "; ".join(f"{_field(e['loc'])}{_reason(e['msg'])} (got {_short(e['input'])})" for e in found)
    text = " ".join(text.split()) or type(error).__name__
    return text if len(text) <= limit else f"{text[:limit]}..."


def _field(place: tuple[int | str, ...]) -> str:
    return f"{'.'.join(map(str, place))}: " if place else ""


def _reason(message: str) -> str:
    return message.removeprefix("Value error, ")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
