"""Watching a run over its broker: the pass that lets somebody do so, and what he sees.

`watcher.json` in the run directory is all that a watcher needs, wherever he is. Its account hears what the
launcher shows and can send nothing, so that whoever has it can neither write nor take what others need.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from urllib.parse import parse_qs, urlsplit

from pydantic import ValidationError

from arriero.engine.broker import BrokerError
from arriero.engine.certificates import address, place
from arriero.engine.errors import UserError
from arriero.engine.nats import NatsBroker
from arriero.engine.nats_access import Account, credential
from arriero.engine.nats_cluster import servers, together
from arriero.launchers.seen import SEEN, Seen
from arriero.schemas.messages import Message

WATCHER_FILE = "watcher.json"
WATCHER = Account(name="the-watchers", beats=False, watches=True)
_CONNECT_S = 10.0


class Pass(Message):
    """`watcher.json`: where the broker of a run listens, what opens it to a watcher, and its certificate.

    `url` names all of its servers, where they replicate. `certificate` is its text, empty without TLS: a
    watcher needn't see the files of the run.
    """

    url: str
    run: str
    credential: str
    certificate: str = ""


def pass_for(url: str, token: str, run: str) -> Pass:
    """A pass to the broker at `url` (as `NatsServer` names it), made from its owner's token."""
    parts = urlsplit(url)
    files = parse_qs(parts.query).get("ca", [])
    return Pass(
        url=url.partition("?")[0], run=run, credential=credential(token, WATCHER.name),
        certificate=Path(files[0]).read_text() if files else "",
    )  # fmt: skip


def read_pass(path: Path) -> Pass:
    """Raises UserError if the file can't be read or is no pass."""
    try:
        return Pass.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"--credentials {path} can't be read: {error.strerror}; a run that goes on has "
                        f"{WATCHER_FILE} in its directory") from error  # fmt: skip
    except ValidationError as error:
        raise UserError(f"--credentials {path} is no {WATCHER_FILE} of a run") from error


class Watcher:
    """What is heard of a run, and when."""

    def __init__(self) -> None:
        self._seen: Seen | None = None
        self._at = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since the last word, or since the start."""
        return time.monotonic() - self._at

    def seen(self) -> Seen | None:
        """The newest word, and how old it is; None before the first."""
        if self._seen is None or self._seen.now is None:
            return self._seen
        return replace(self._seen, now=replace(self._seen.now, seen_s=self.silent_s))

    async def listen(self, broker: NatsBroker) -> None:
        """Without end. Raises ValidationError for what no launcher of this version says."""
        async for payload in broker.watch():
            self._seen, self._at = SEEN.validate_json(payload), time.monotonic()


@asynccontextmanager
async def watching(given: Pass, url: str = "") -> AsyncGenerator[tuple[Watcher, asyncio.Task[None]]]:
    """Listens to the run of the pass; at host and port of `url`, if given (of a tunnel, say).

    Raises UserError if nobody answers there, or the run is another one.
    """
    try:
        places = [(p.hostname or "", p.port or 4222) for p in map(urlsplit, servers(url or given.url))]
    except ValueError as error:
        raise UserError(f"{url}: {error}; give nats://HOST:PORT") from error
    try:
        if given.certificate:
            with NamedTemporaryFile("w", suffix=".crt") as file:  # read once, when it connects
                file.write(given.certificate)
                file.flush()
                broker = await _connected(together([address(*p, Path(file.name)) for p in places]), given)
        else:
            broker = await _connected(together([f"nats://{place(*p)}" for p in places]), given)
    except BrokerError as error:
        raise UserError(f"{error}; these credentials are of run {given.run}") from error
    watcher = Watcher()
    listening = asyncio.create_task(watcher.listen(broker))
    try:
        yield watcher, listening
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        await broker.close()


async def _connected(url: str, given: Pass) -> NatsBroker:
    return await NatsBroker.connect(url, given.credential, run=given.run, timeout_s=_CONNECT_S)
