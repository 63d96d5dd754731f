"""A source rank's receivers: who has joined, who reads which version, what came of it.

    state of a receiver   entered by               left by
    joined                Join                     Leave, or the end of its connection
    leased                Take                     Release, the end of its connection, or `free` at its bound

One thread per receiver answers its requests, one at a time: whatever happens to a receiver, the others have
threads of their own. The senders write to no connection unasked, so a stuck receiver can't hold them up.
"""

import errno
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Listener
from threading import Condition, Thread

from arriero.engine.weights import lease_messages as messages
from arriero.engine.weights.layout import WeightError
from arriero.engine.weights.transport import Outcome
from arriero.schemas.weights import WeightManifest

log = logging.getLogger(__name__)
_CLOSE_S = 5.0


@dataclass
class Visitor:
    """A receiver that has joined. `slot` is the one it holds a lease on."""

    name: str
    outcome: Outcome = field(default_factory=lambda: Outcome(-1))
    slot: int | None = None
    since: float = 0.0
    version: int = -1  # that it took last


Welcoming = Callable[[messages.Join], tuple[bytes, Callable[[], Callable[[int, messages.Send], None] | None]]]
"""Gives the bytes for `Welcome.extra`, and what to do once they are sent: it gives what serves a `Send`."""


class LeaseServer:
    """Listens at (host, port) from its start; port 0 is any free one. `welcome` is the transport's part."""

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        plan: bytes,
        session: str,
        slots: int,
        welcome: Welcoming,
    ) -> None:
        self._secret, self._plan, self._session, self._welcome = secret, plan, session, welcome
        self._listener = Listener(address, backlog=128)
        self.address: tuple[str, int] = (address[0], _port(self._listener))
        self.addresses: list[tuple[str, int]] = [self.address]
        self._changed = Condition()
        self._versions: list[int | None] = [None] * slots
        self._manifest: WeightManifest | None = None
        self._visitors: dict[str, Visitor] = {}
        self._links: dict[messages.Link, Thread] = {}
        self._visited = self._closed = False
        Thread(target=self._accept, name="arriero-weights", daemon=True).start()

    def free(self, slot: int, timeout_s: float) -> tuple[str, ...]:
        """Let nobody begin to read the slot, and wait for those who do; names of those that take too long."""
        with self._changed:
            self._versions[slot] = None
            while readers := [v for v in self._visitors.values() if v.slot == slot]:
                left_s = max(v.since for v in readers) + timeout_s - time.monotonic()
                if left_s <= 0:
                    for visitor in readers:
                        visitor.slot = None
                        log.warning("receiver %s reads too long; going on without it", visitor.name)
                    return tuple(visitor.name for visitor in readers)
                self._changed.wait(left_s)
        return ()

    def commit(self, manifest: WeightManifest) -> None:
        """The slot holds this version; whoever waits for it has it now."""
        with self._changed:
            self._versions[manifest.slot] = manifest.version
            self._manifest = manifest
            self._changed.notify_all()

    def somebody_reads(self, within_s: float) -> bool:
        """Whether a lease is held, now or within so many seconds."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closed or any(v.slot is not None for v in self._visitors.values()), within_s
            )

    def await_left(self, within_s: float) -> None:
        """Wait until every receiver has left or died; those that are waited for are named."""
        with self._changed:
            if names := self._present():
                log.info("waiting until %s have left, up to %.0f s", ", ".join(names), within_s)
                self._changed.wait_for(lambda: self._closed or not self._present(), within_s)
            if names := self._present():
                log.warning("%s have not left within %.0f s; going on", ", ".join(names), within_s)

    def _present(self) -> list[str]:
        return sorted(v.name for v in self._visitors.values() if not v.outcome.gone)

    def await_visitor(self, within_s: float) -> bool:
        """Whether a receiver has ever joined, now or within so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._visited, within_s)

    def outcomes(self) -> Mapping[str, Outcome]:
        with self._changed:
            return {name: visitor.outcome for name, visitor in self._visitors.items()}

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            links = list(self._links.items())
        # Closing it would not wake the thread that accepts from it either, and that would let one more in.
        with suppress(OSError):
            socket.create_connection(self.address, _CLOSE_S).close()
        with suppress(OSError):
            self._listener.close()
        for link, _ in links:
            # Closing it would not wake the thread that reads from it.
            with suppress(OSError, ValueError), socket.socket(fileno=os.dup(link.fileno())) as shared:
                shared.shutdown(socket.SHUT_RDWR)
        until = time.monotonic() + _CLOSE_S
        for _, thread in links:
            thread.join(max(until - time.monotonic(), 0))

    def _accept(self) -> None:
        while True:
            try:
                link: messages.Link = self._listener.accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    return  # closed
                time.sleep(0.01)  # too many open files: those who try again may find room
                continue
            if self._closed:
                link.close()
                return
            thread = Thread(target=self._visit, args=(link,), name="arriero-receiver", daemon=True)
            with self._changed:
                self._links[link] = thread
            thread.start()

    def _visit(self, link: messages.Link) -> None:
        visitor: Visitor | None = None
        try:
            messages.prove(link, self._secret, first=True)
            visitor, serve = self._join(link)
            while True:
                request = messages.receive_request(link)
                answer = self._answer(visitor, request)
                messages.send(link, answer)
                if isinstance(request, messages.Leave):
                    return
                if (
                    isinstance(request, messages.Send)
                    and isinstance(answer, messages.Granted)
                    and serve is not None
                ):
                    serve(answer.slot, request)
        except (EOFError, OSError):
            if visitor is not None:
                self._ended(visitor, gone=True)
        except Exception as error:
            log.warning("receiver %s is cut off", visitor.name if visitor else "unknown", exc_info=True)
            if visitor is not None:
                # A transport may notice a death before the connection does.
                self._ended(visitor, gone=_hung_up(link), error=f"cut off: {type(error).__name__}: {error}")
        finally:
            with self._changed:
                self._links.pop(link, None)
            link.close()

    def _join(self, link: messages.Link) -> tuple[Visitor, Callable[[int, messages.Send], None] | None]:
        join = messages.receive_request(link)
        if not isinstance(join, messages.Join):
            raise WeightError(f"{type(join).__name__} before Join")
        extra, then = self._welcome(join)
        messages.send(link, messages.Welcome(self._session, self._plan, self.addresses, extra))
        serve = then()
        visitor = Visitor(join.name)
        with self._changed:
            self._visitors[join.name] = visitor
            self._visited = True
            self._changed.notify_all()
        return visitor, serve

    def _answer(self, visitor: Visitor, request: messages.Request) -> messages.Answer:
        with self._changed:
            match request:
                case messages.Newest(after, wait_s):
                    self._changed.wait_for(lambda: self._closed or self._beyond(after) is not None, wait_s)
                    manifest = self._beyond(after)
                    return messages.Found(b"" if manifest is None else manifest.model_dump_json().encode())
                case messages.Take(session, version):
                    if session != self._session:
                        return messages.Refused(f"version {version} is of another run")
                    if version not in self._versions:
                        return messages.Refused(f"version {version} is no longer there", stale=True)
                    visitor.slot, visitor.since = self._versions.index(version), time.monotonic()
                    visitor.version = version
                    self._changed.notify_all()
                    return messages.Granted(visitor.slot)
                case messages.Send():
                    if visitor.slot is None:
                        return messages.Refused("the lease has been taken away", stale=True)
                    return messages.Granted(visitor.slot)
                case messages.Release():
                    held, visitor.slot = visitor.slot is not None, None
                    self._changed.notify_all()
                    return messages.Done(held)
                case messages.Report(version, error):
                    visitor.outcome = Outcome(version, error)
                    self._changed.notify_all()
                    return messages.Done()
                case messages.Leave():
                    self._visitors.pop(visitor.name, None)
                    self._changed.notify_all()
                    return messages.Done()
                case messages.Join():
                    return messages.Refused(f"{visitor.name} has joined already")

    def _beyond(self, after: int) -> WeightManifest | None:
        manifest = self._manifest
        return manifest if manifest is not None and manifest.version > after else None

    def _ended(self, visitor: Visitor, *, gone: bool = False, error: str = "") -> None:
        with self._changed:
            visitor.slot = None
            before = visitor.outcome
            visitor.outcome = (
                Outcome(visitor.version, error)
                if error and not gone
                else Outcome(before.version, before.error, gone)
            )
            self._changed.notify_all()


def _hung_up(link: messages.Link) -> bool:
    try:
        if link.poll(1.0):
            link.recv_bytes()
    except (EOFError, OSError):
        return True
    return False


def _port(listener: Listener) -> int:
    address = listener.address
    assert isinstance(address, tuple), "a TCP address"
    return int(address[1])
