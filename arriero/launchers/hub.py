"""The hub, first role of every launch: starts the message broker, declares all edges, says where it is.

    start nats-server -> declare edges and logs -> publish hub.json -> wait for SIGTERM -> stop, clean up

Of several hubs each starts a server that replicates the others', and the first declares and publishes. One
that is killed is started again, with what it had stored, while clients go on with the others.

It also cleans up: it is told to stop last, and when the launcher dies the kernel tells it. What opens the
broker is in the environment variable ARRIERO_TOKEN and nowhere else that others could read: all of it for the
hub, the account of its role for every other process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType

from arriero.engine.backlog import backlog_edge
from arriero.engine.broker import Broker, BrokerError, EdgeDecl
from arriero.engine.claim_stores import ClaimStore, FolderStore, UrlStore
from arriero.engine.elastic import elastic_roles
from arriero.engine.errors import UserError
from arriero.engine.fused import fused_edges
from arriero.engine.lineage.recorder import RECORD, recorded
from arriero.engine.nats import NatsBroker
from arriero.engine.nats_access import Access, Account, credential, derived
from arriero.engine.nats_server import NatsServer, start_server
from arriero.engine.rates import backlogs, capacities
from arriero.engine.runtime.journal import record
from arriero.launchers.hubs import forget, meet
from arriero.launchers.parent import die_with_launcher
from arriero.launchers.place import attempt
from arriero.launchers.resuming import fill_ledger
from arriero.launchers.rundir import RunDir
from arriero.launchers.watcher import WATCHER, WATCHER_FILE, pass_for
from arriero.schemas.graph import GraphSpec
from arriero.schemas.ledger import CONTROL_LOG, LEDGER_LOG, Restarted, lengths_log, loop_log
from arriero.schemas.messages import Message
from arriero.schemas.run import RunOptions

TOKEN = "ARRIERO_TOKEN"
WEIGHTS_SECRET = "ARRIERO_WEIGHTS_SECRET"
AGENT = "the-agents"  # the account of what starts the roles on a cluster
HUB_FILE = "hub.json"
BROKER = "broker"
FORM_S = 50.0  # for several hubs to find each other, and to choose who leads
CLAIMS = "claims"  # large payloads of a run on several hosts


class HubAddress(Message):
    """`hub.json`: where the broker of this run listens; all of its servers, where they replicate.

    On a cluster, whose replicas can't inherit it, the `token` too: only the owner can read the file.
    `attempt` tells the runs of a job that was started again apart.
    """

    url: str
    token: str = ""
    attempt: str = ""


def edges(spec: GraphSpec, options: RunOptions) -> list[EdgeDecl]:
    """One edge per node that has consumers, with a group per port that reads it and one for the record; one
    per backlog. Those that stay in a process aren't among them.
    """
    inside = fused_edges(spec, options)
    readers = {n.name: tuple(f"{c.name}-{i.port}" for c, i in spec.consumers(n.name)) for n in spec.nodes}
    outside = [n for n in spec.nodes if readers[n.name] and n.name not in inside]
    between = [(n.name, n, capacities(spec)[n.name]) for n in outside]
    own = [(backlog_edge(n.name), n, backlogs(spec)[backlog_edge(n.name)]) for n in spec.nodes if n.puts_back]
    taped = recorded(spec) if options.record else ()
    elastic = elastic_roles(spec) if options.elastic else frozenset[str]()
    return [
        EdgeDecl(
            name=name,
            groups=readers.get(name, (name,)) + ((RECORD,) if name in taped else ()),
            producers=node.replicas,
            capacity=room,
            lease_s=options.lease_s,
            max_deliveries=options.max_deliveries,
            open=node.role in elastic,
        )
        for name, node, room in (*between, *own)
    ]


def logs(spec: GraphSpec) -> list[str]:
    own = [lengths_log(n.name) for n in spec.nodes if n.puts_back]
    return [LEDGER_LOG, CONTROL_LOG, *(loop_log(loop.name) for loop in spec.loops), *own]


def access(spec: GraphSpec, options: RunOptions) -> Access:
    """What each role may do on the broker: an account for each, called like it; and one for who looks on."""
    declared = {e.name for e in edges(spec, options)}
    roles = (_account(spec, role, declared) for role in spec.roles)
    return Access(run=options.run_id, accounts=(*roles, WATCHER))


def _account(spec: GraphSpec, role: str, declared: set[str]) -> Account:
    nodes = spec.roles[role]
    own = [backlog_edge(n.name) for n in nodes if n.puts_back]
    read = [(i.source, f"{n.name}-{i.port}") for n in nodes for i in n.inputs if not i.loop]
    made = [loop_log(loop.name) for loop in spec.loops if loop.producer in {n.name for n in nodes}]
    return Account(
        name=role,
        fills=(*(n.name for n in nodes if n.name in declared), *own),
        empties=(*((edge, group) for edge, group in read if edge in declared), *((e, e) for e in own)),
        writes=(LEDGER_LOG, CONTROL_LOG, *made, *(lengths_log(n.name) for n in nodes if n.puts_back)),
        reads=tuple(loop_log(i.source) for n in nodes for i in n.inputs if i.loop),
    )


async def declare(broker: Broker, spec: GraphSpec, options: RunOptions) -> None:
    """Everything that the graph's roles will send on, before anybody sends."""
    await broker.declare(edges(spec, options), logs(spec))


def claim_store(options: RunOptions) -> ClaimStore:
    """Where large payloads lie: in the memory of this host, or where all hosts of the run reach them."""
    return UrlStore(options.claims_url) if options.claims_url else FolderStore.in_memory(options.run_id)


def private(token: str, role: str) -> dict[str, str]:
    """What a process of `role` gets in its environment, and nobody else: derived from the run's token."""
    return {TOKEN: credential(token, role), WEIGHTS_SECRET: derived(token, "weights")}


async def wait_for_hub(run_dir: Path, *, bound_s: float, attempt: str | None = "") -> HubAddress:
    """The address, once the hub of this attempt (None: any) has declared everything. Raises TimeoutError."""
    deadline = time.monotonic() + bound_s
    while True:
        with suppress(FileNotFoundError):
            found = HubAddress.model_validate_json((run_dir / HUB_FILE).read_bytes())
            if attempt is None or found.attempt == attempt:
                return found
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"waited {bound_s:.0f} s for the hub to write {run_dir / HUB_FILE}; see its log"
            )
        await asyncio.sleep(0.02)


def clean(run_dir: Path, run_id: str) -> None:
    """Remove what isn't the record of a run: address, token, messages; payloads and weights in memory."""
    (run_dir / HUB_FILE).unlink(missing_ok=True)
    (run_dir / WATCHER_FILE).unlink(missing_ok=True)
    forget(run_dir / BROKER)
    for folder in (run_dir / BROKER, *(run_dir / BROKER).glob("hub-*")):
        (folder / "nats-server.conf").unlink(missing_ok=True)
        shutil.rmtree(folder / "store", ignore_errors=True)
    FolderStore.in_memory(run_id).destroy()
    shutil.rmtree(run_dir / CLAIMS, ignore_errors=True)
    # As arriero.engine.weights.destroy for every loop, without importing torch for it.
    for segment in Path("/dev/shm").glob(f"arriero-arriero-{run_id}-*"):
        segment.unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when told to stop, 2 for a mistake of the user, said in one line."""
    die_with_launcher(signal.SIGTERM)
    parser = argparse.ArgumentParser(prog="arriero.launchers.hub")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0, help="of the first of several; theirs follow it")
    parser.add_argument("--replica", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        return _serve(args.run_dir, args.port, args.replica)
    except (UserError, BrokerError) as error:
        print(error, file=sys.stderr)
        return 2


class _Told:
    """Whether SIGTERM or SIGINT came. They never end this process by themselves: a launcher that dies sends
    one SIGTERM for each of its threads, and the later ones arrive while we clean up.
    """

    def __init__(self) -> None:
        self.come = False
        self._wake: Callable[[], object] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.come = True
        if self._wake is not None:
            self._wake()

    async def or_dead(self, server: NatsServer) -> None:
        """Until a signal comes, or the server ends."""
        loop, enough = asyncio.get_running_loop(), asyncio.Event()
        handle = os.pidfd_open(server.process.pid)
        loop.add_reader(handle, enough.set)
        self._wake = partial(loop.call_soon_threadsafe, enough.set)
        try:
            if not self.come:
                await enough.wait()
        finally:
            self._wake = None
            loop.remove_reader(handle)
            os.close(handle)


def _serve(run_dir: Path, port: int, number: int) -> int:
    told = _Told()
    run = RunDir(run_dir)
    spec, options = run.read_graph(), run.read_options()
    own, token = access(spec, options), os.environ.pop(TOKEN, "")
    again: Callable[[], NatsServer]
    if options.hubs == 1:
        start = partial(start_server, run_dir / BROKER, access=own)
        server = start(port=port, token=token)
        again = partial(start, port=server.port, token=server.token)
        name, url = "", server.url
    else:
        site = meet(
            run_dir / BROKER, number, options.hubs, token=token, port=port, attempt=attempt(),
            bound_s=FORM_S, told=lambda: told.come,
        )  # fmt: skip
        again = partial(site.start, own)
        server, name, url = again(), site.cluster.name, site.url
    servers = [server]
    try:
        return asyncio.run(_Hub(run, spec, options, name, url, server.token).live(servers, told, again))
    finally:
        servers[-1].stop(timeout_s=2.0)
        clean(run_dir, options.run_id)


class _Hub:
    """The life of a hub, whose server has started; `name` is that of one among several."""

    def __init__(
        self, run: RunDir, spec: GraphSpec, options: RunOptions, name: str, url: str, token: str
    ) -> None:
        self._run, self._spec, self._options = run, spec, options
        self._name, self._url, self._token = name, url, token

    async def live(self, servers: list[NatsServer], told: _Told, start: Callable[[], NatsServer]) -> int:
        """Until it is told to stop; a server that ends by itself is started again: the last one lives."""
        broker = await connect(self._url, self._token, self._options)
        try:
            if self._name in ("", "hub-0"):
                await self._open(broker)
            await told.or_dead(servers[-1])
            while (code := servers[-1].process.poll()) is not None:
                why = f"nats-server ended by itself with code {code}"
                if (number := len(servers)) > self._options.restarts:
                    raise BrokerError(f"{why}; see {servers[-1].log}")
                again = f"it starts again ({number} of {self._options.restarts})"
                print(f"{why}; {again}", file=sys.stderr, flush=True)
                # With what it had stored; who is connected comes back by himself.
                servers.append(start())
                if not self._name:
                    await declare(broker, self._spec, self._options)  # what stood in memory only
                server = f"nats-server of {self._name}" if self._name else "nats-server"
                await record(broker, Restarted(name=server, number=number, why=why))
                await told.or_dead(servers[-1])
            return 0
        finally:
            with suppress(BrokerError, TimeoutError):
                await asyncio.wait_for(broker.close(), 2.0)

    async def _open(self, broker: NatsBroker) -> None:
        """Everything is declared, and everybody may come."""
        await declare(broker, self._spec, self._options)
        await fill_ledger(broker, self._run)
        publish(self._run.path / WATCHER_FILE, pass_for(self._url, self._token, self._options.run_id))
        publish(self._run.path / HUB_FILE, HubAddress(url=self._url, attempt=attempt()))


async def connect(url: str, token: str, options: RunOptions) -> NatsBroker:
    """The connection of who declares the edges of a run; its patience is that for several hubs to agree."""
    connect = partial(NatsBroker.connect, url, token, run=options.run_id)
    return await (connect(replicas=options.hubs, timeout_s=FORM_S) if options.hubs > 1 else connect())


def publish(path: Path, record: Message) -> None:
    """For the owner alone, and atomically: a role reads all of it or nothing."""
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(record.model_dump_json())
    part.rename(path)


if __name__ == "__main__":
    sys.exit(main())
