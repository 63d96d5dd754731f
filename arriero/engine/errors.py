"""Errors that are the user's to mend: one line that names the thing, the value and the remedy."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in input, configuration or environment; the command prints it without a traceback."""


class GraphError(UserError):
    """The graph can't run as built: wrong record type, open loop, rates or capacities that don't fit."""
