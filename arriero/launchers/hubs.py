"""How the servers of several hubs find each other: each writes where it is, and waits until all have.

    hold two ports -> broker/hub-K.json -> all are there -> start a server that knows the others

The ports stay held as long as the hub lives. A hub that was killed and starts again finds its own file, and
takes the same ports where it can; the others, and all clients, hear from them if it listens elsewhere now.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from arriero.engine.broker import BrokerError
from arriero.engine.certificates import CERTIFICATE, address, make_certificate, place
from arriero.engine.nats_access import Access
from arriero.engine.nats_cluster import Cluster, hold, together
from arriero.engine.nats_server import NatsServer, start_server, wait_for_earlier
from arriero.launchers.rundir import write_json
from arriero.schemas.messages import Message

_LOOPBACK, _EVERYWHERE = "127.0.0.1", "0.0.0.0"
_EARLIER_S = 10.0  # for the server of a killed hub to end
_EVERY_S = 0.05


class HubPlace(Message):
    """`broker/hub-K.json`, for its owner alone: where the server of hub `number` is reached.

    `port`: by clients; `route`: by the other servers. `token` opens all of them; it stands there where the
    hubs are on different hosts, in that of the first. `attempt` tells the runs of a job apart.
    """

    number: int
    host: str
    port: int
    route: int
    token: str = ""
    attempt: str = ""


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where one of several servers stands, and the others; `public` as in `start_server`.

    `url` is one of all of them, `token` opens it.
    """

    folder: Path
    url: str
    token: str = field(repr=False)
    port: int
    public: str
    certificate: Path | None
    cluster: Cluster
    held: tuple[socket.socket, socket.socket]  # its ports are its own as long as these are there

    def start(self, access: Access, *, store: Path | None = None, timeout_s: float = 10.0) -> NatsServer:
        """The server, or once more. Raises BrokerError."""
        return start_server(
            self.folder, port=self.port, token=self.token, public=self.public, certificate=self.certificate,
            cluster=self.cluster, access=access, store=store, timeout_s=timeout_s,
        )  # fmt: skip


def meet(
    broker: Path,
    number: int,
    count: int,
    *,
    token: str,
    port: int = 0,
    public: str = "",
    attempt: str = "",
    bound_s: float,
    told: Callable[[], bool] = lambda: False,
) -> Site:
    """The site of hub `number` of `count`, once all have written to the folder `broker` where they are.

    `port`: of the first hub, the next ones for the others; 0: free ones. `token` "": that of the first hub.
    Raises BrokerError that names who is missing after `bound_s`, or when it was `told` to stop.
    """
    broker.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder := broker / f"hub-{number}").mkdir(mode=0o700, exist_ok=True)
    wait_for_earlier(folder, _EARLIER_S)
    before = _places(broker, count, attempt).get(number)
    listen = _EVERYWHERE if public else _LOOPBACK
    held = (
        _held(listen, before.port if before else port and port + number),
        _held(listen, before.route if before else 0),
    )
    if public and number == 0:
        make_certificate(broker)
    own, route = (h.getsockname()[1] for h in held)
    shown = token if public and number == 0 else ""
    here = HubPlace(
        number=number, host=public or _LOOPBACK, port=own, route=route, token=shown, attempt=attempt
    )
    write_json(broker / f"hub-{number}.json", here, mode=0o600)
    try:
        found = _all(broker, count, attempt, bound_s, told)
    except BaseException:
        for one in held:
            one.close()
        raise
    certificate = broker / CERTIFICATE if public else None
    urls = [
        address(p.host, p.port, certificate) if certificate else f"nats://{place(p.host, p.port)}"
        for p in found
    ]
    return Site(
        folder=folder, url=together(urls), token=token or found[0].token, port=own, public=public,
        certificate=certificate, held=held,
        cluster=Cluster(
            name=f"hub-{number}", route=place(here.host, route),
            others=tuple(place(p.host, p.route) for p in found if p.number != number),
        ),
    )  # fmt: skip


def forget(broker: Path) -> None:
    """No hub has said yet where it is."""
    for file in broker.glob("hub-*.json"):
        file.unlink(missing_ok=True)


def _held(host: str, port: int) -> socket.socket:
    """The port if it is free, else any other. Raises BrokerError, OSError."""
    try:
        return hold(host, port)
    except OSError:
        return hold(host)


def _all(broker: Path, count: int, attempt: str, bound_s: float, told: Callable[[], bool]) -> list[HubPlace]:
    deadline = time.monotonic() + bound_s
    while True:
        found = _places(broker, count, attempt)
        missing = [f"hub-{k}" for k in range(count) if k not in found]
        if not missing:
            return [found[k] for k in range(count)]
        if told():
            raise BrokerError(f"it was told to stop while it waited for {', '.join(missing)}")
        if time.monotonic() > deadline:
            raise BrokerError(
                f"waited {bound_s:g} s for {', '.join(missing)} of {count} hubs to write to {broker} where "
                "they listen; see their logs"
            )
        time.sleep(_EVERY_S)


def _places(broker: Path, count: int, attempt: str) -> dict[int, HubPlace]:
    """Those of this attempt that are there."""
    found: dict[int, HubPlace] = {}
    for number in range(count):
        with suppress(FileNotFoundError):
            said = HubPlace.model_validate_json((broker / f"hub-{number}.json").read_bytes())
            if said.attempt == attempt:
                found[number] = said
    return found
