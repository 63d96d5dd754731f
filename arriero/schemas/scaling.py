"""What `arriero scale` and the process that conducts a run say to each other, as files of its directory."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from arriero.schemas.messages import Message


class ScaleRequest(Message):
    """So many replicas of each role from now on; who is to leave has `within_s` to answer what he has."""

    id: str
    replicas: dict[str, PositiveInt]
    within_s: PositiveFloat


class ScaleAnswer(Message):
    """What became of a request, line by line; with an `error` nothing did."""

    lines: tuple[str, ...] = ()
    error: str = ""
