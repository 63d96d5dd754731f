"""A replica as the supervision sees it, whoever started its process and wherever that runs."""

from __future__ import annotations

import signal
from typing import Protocol


class Replica(Protocol):
    """`log` names where its output is to be found, for messages."""

    @property
    def role(self) -> str: ...
    @property
    def replica(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def hub(self) -> bool: ...
    @property
    def log(self) -> object: ...
    @property
    def alive(self) -> bool: ...

    async def ended(self) -> int:
        """The exit code at the moment its process ends; negative for a signal."""
        ...

    def signal(self, number: signal.Signals) -> None:
        """To its process and all that it has started; does nothing when it has ended."""
        ...

    def said(self) -> str:
        """Its log, or the end of it."""
        ...
