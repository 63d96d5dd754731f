"""Turns at devices that several processes of one host share: all of one side at once, never both sides.

    byte 0 of the file   held for writing by the side that is alone, for reading by each of the others
    byte 1               held by whoever asks, so that those who share can't starve the one alone

The kernel gives the locks of a process back when it dies, however it dies; whoever waits then goes on.

| who waits     | for what                       | unblocked by                                    |
|---------------|--------------------------------|-------------------------------------------------|
| the one alone | all of the others to give      | the last of them that rests, or dies            |
| the others    | the one alone to give          | its rest, or its death                          |
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from arriero.engine.locks import try_lock, unlock

_DEVICES, _LINE = 0, 1
_PAUSE_S = (1e-3, 20e-3)


class Turn:
    """The turn of process `name` at the devices of `path`, taken and given any number of times.

    `alone`: nobody else may have it meanwhile; else those who aren't alone have it together. TimeoutError,
    naming the file and both sides, if it can't be had within `bound_s`.
    """

    def __init__(self, path: Path, name: str, *, alone: bool, bound_s: float) -> None:
        self._path, self._name, self._alone, self._bound_s = path, name, alone, bound_s
        self._fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self.held = False

    async def take(self) -> None:
        """Wait for the turn; nothing to do if it is held."""
        if self.held:
            return
        until = time.monotonic() + self._bound_s
        try:
            await self._lock(_LINE, until, shared=False)
            await self._lock(_DEVICES, until, shared=not self._alone)
            self.held = True
        finally:
            unlock(self._fd, _LINE)

    def give(self) -> None:
        """Let the other side have the devices."""
        if self.held:
            self.held = False
            unlock(self._fd, _DEVICES)

    def close(self) -> None:
        """Give the turn back for good."""
        self.held = False
        os.close(self._fd)

    async def _lock(self, byte: int, until: float, *, shared: bool) -> None:
        pause_s, longest_s = _PAUSE_S
        while not try_lock(self._fd, byte, shared=shared):
            if time.monotonic() > until:
                other = "the others" if self._alone else "the one that uses them alone"
                raise TimeoutError(
                    f"{self._name} has waited {self._bound_s:.0f} s for its turn at the devices of "
                    f"{self._path}: {other} didn't give them; raise placement.turn_bound_s if a turn may "
                    "take so long"
                )
            # The kernel could wake a thread of ours, but no bound can be given to that wait.
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
