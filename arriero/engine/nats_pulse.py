"""The pulse of a process: heartbeats and lease extensions from a thread with its own loop and connection.

It goes on while the main event loop computes; it stops when the process dies, which is the point.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from arriero.engine.broker import BrokerError
from arriero.engine.nats_link import Link

_log = logging.getLogger(__name__)
_EXTEND_BELOW = 2 / 3  # of a lease: a batch component holds hundreds, and each extension is a message


class Heartbeat(msgspec.Struct, frozen=True, array_like=True):
    """What is published: the state and (reply subject, lease_s) of every lease held at that moment."""

    payload: bytes
    leases: list[tuple[str, float]]


def read_beat(data: bytes) -> Heartbeat:
    """Raises BrokerError for what no pulse has sent."""
    try:
        return msgspec.msgpack.decode(data, type=Heartbeat)
    except msgspec.MsgspecError as error:
        raise BrokerError(f"{len(data)} bytes are no heartbeat: {error}") from None


class Extendable(Protocol):
    """A lease as the pulse sees it."""

    @property
    def lease_s(self) -> float: ...
    def left_s(self, now: float) -> float: ...
    def extended(self, now: float) -> None: ...


class Pulse:
    """`held` is written by the event loop's thread and read here: single dict operations, so no lock."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        subject: str,
        held: Mapping[str, Extendable],
        state: Callable[[], bytes],
        interval_s: float,
        timeout_s: float,
    ) -> None:
        self._url, self._token, self._timeout_s = url, token, timeout_s
        self._subject, self._held, self._state, self._interval_s = subject, held, state, interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"pulse {subject}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Blocks for at most a few seconds."""
        self._stop.set()
        self._thread.join(self._timeout_s + 5)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                asyncio.run(self._beat())
            except BrokerError as error:
                _log.warning("no heartbeat: %s", error)
            except Exception:  # noqa: BLE001  # a replica without a pulse would be called dead
                _log.exception("the pulse failed; it starts again")
                self._stop.wait(self._interval_s)

    async def _beat(self) -> None:
        link = await Link.open(self._url, self._token, name=self._subject, timeout_s=self._timeout_s)
        try:
            while not self._stop.is_set():
                began = time.monotonic()
                await self._once(link)
                rest = self._interval_s - (time.monotonic() - began)
                await asyncio.to_thread(self._stop.wait, max(rest, 0.001))
        finally:
            await link.close()

    async def _once(self, link: Link) -> None:
        now = time.monotonic()
        held = dict(self._held)
        for reply, lease in held.items():
            if lease.left_s(now) < _EXTEND_BELOW * lease.lease_s and await link.publish(reply, b"+WPI"):
                lease.extended(now)
        try:
            payload = self._state()
        except Exception:  # noqa: BLE001  # the caller's function; a beat is missed, which is seen
            _log.exception("no state for the heartbeat")
            return
        leases = [(reply, lease.lease_s) for reply, lease in held.items()]
        await link.publish(self._subject, msgspec.msgpack.encode(Heartbeat(payload, leases)))
