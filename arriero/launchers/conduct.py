"""The hub of a run on a cluster, first role of its job: the message broker, and what conducts the run.

    start nats-server -> declare -> publish hub.json -> all replicas arrive -> supervise, record -> all leave

Its exit code is that of the run. A run that SIGTERM told to stop (preemption, the time limit), and one that
lost a process which can't come back alone, end with code 75, for which the job is started again; one that
`arriero cancel` stopped has a file `cancelled`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import shutil
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from arriero.engine.broker import BrokerError
from arriero.engine.claims import ClaimChecked
from arriero.engine.errors import UserError
from arriero.engine.nats_access import Access, Account
from arriero.engine.nats_server import NatsServer, start_server
from arriero.engine.runtime.journal import record
from arriero.launchers.conductor import INTERRUPTED, Conductor, end_roles, interrupts
from arriero.launchers.crew import RemoteCrew
from arriero.launchers.guests import Guests
from arriero.launchers.hub import (
    AGENT,
    BROKER,
    HUB_FILE,
    HubAddress,
    access,
    claim_store,
    clean,
    connect,
    edges,
    logs,
    publish,
)  # fmt: skip
from arriero.launchers.hubs import Site, meet
from arriero.launchers.options import LaunchOptions
from arriero.launchers.place import attempt, own_address
from arriero.launchers.resuming import fill_ledger, go_on, prepared
from arriero.launchers.rundir import ATTEMPTS, OUTPUTS, RunDir
from arriero.launchers.sinks import can_write
from arriero.launchers.watcher import WATCHER_FILE, pass_for
from arriero.schemas.crew import CREW_LOG, ORDERS_LOG
from arriero.schemas.graph import GraphSpec
from arriero.schemas.ledger import Restarted, Resumed
from arriero.schemas.run import RunOptions

PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: try again
_SERVER_STARTS = 5
_LEAVE_S = 5.0  # for roles that are told to leave, over a network; a scheduler's grace is 30 s or more
BUNDLE = ("graph.json", "options.json", "manifest.json")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the run; 75 if it was stopped and may go on."""
    parser = argparse.ArgumentParser(prog="arriero.launchers.conduct")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--bundle", type=Path, help="folder with the description of the run")
    parser.add_argument("--arrive-s", type=float, default=900.0)
    parser.add_argument("--hosts", action="append", default=[], metavar="ROLE=N")
    parser.add_argument("--log", default="{}", help="where the log of replica {} is found, for messages")
    args = parser.parse_args(argv)
    hosts = {role: int(count) for role, _, count in (text.partition("=") for text in args.hosts)}
    run = RunDir(args.run_dir)
    try:
        spec, options = _settle(run, args.bundle)
        can_write(options.sinks, prometheus=options.metrics_port is not None)
        # The messages stay on this host: a file system of many hosts is slow, and doesn't map files.
        with TemporaryDirectory(prefix="arriero-broker-") as store:
            server = LastingServer(
                run.path / BROKER, Path(store), cluster_access(spec, options),
                _met(run.path / BROKER, options.hubs, args.arrive_s),
            )  # fmt: skip
            try:
                code = asyncio.run(_conduct(spec, options, run, server, hosts, args.log, args.arrive_s))
            finally:
                server.stop()
                clean(run.path, options.run_id)
    except (UserError, BrokerError, OSError) as error:
        print(f"arriero: error: {error}", file=sys.stderr)
        return 2
    return PREEMPTED if code == INTERRUPTED and not run.cancelled.exists() else code


def _settle(run: RunDir, bundle: Path | None) -> tuple[GraphSpec, RunOptions]:
    """The run as its directory describes it; from what an earlier attempt left it goes on, if it can.

    Raises UserError.
    """
    run.path.mkdir(parents=True, exist_ok=True)
    for name in BUNDLE if bundle else ():
        assert bundle is not None
        if not (run.path / name).exists():
            shutil.copyfile(bundle / name, run.path / name)
    (run.path / HUB_FILE).unlink(missing_ok=True)
    spec, options = run.read_graph(), run.read_options()
    if (ready := prepared(run)) is not None:  # by `arriero run --resume`
        print(f"arriero: the run goes on{_versions(ready)}", flush=True)
    elif run.ledger.exists():
        try:
            resumed = go_on(spec, options, run, why="the job was started again")
            print(f"arriero: the job was started again; the run goes on{_versions(resumed)}", flush=True)
        except UserError as error:
            print(f"arriero: {error}; it starts anew, and {_put_aside(run)} keeps what it had", flush=True)
    for folder in (run.logs, run.tensorboard):
        folder.mkdir(exist_ok=True)
    return spec, options


def _versions(resumed: Resumed) -> str:
    return "".join(f", {node} from version {v}" for node, v in resumed.versions.items())


def _put_aside(run: RunDir) -> Path:
    """What an attempt that can't go on has written lies there."""
    earlier = run.path / ATTEMPTS / str(1 + sum(1 for _ in (run.path / ATTEMPTS).glob("*")))
    earlier.mkdir(parents=True)
    for name in OUTPUTS:
        with suppress(FileNotFoundError):
            (run.path / name).rename(earlier / name)
    return earlier


def _met(broker: Path, hubs: int, bound_s: float) -> Site | None:
    """The site of the first of several hubs. Raises BrokerError that names who is missing."""
    if hubs == 1:
        return None
    token = secrets.token_urlsafe(32)
    return meet(broker, 0, hubs, token=token, public=own_address(), attempt=attempt(), bound_s=bound_s)


class LastingServer:
    """A broker that starts again when it ends: Slurm sends SIGTERM to every process of a job.

    `site`: that of the first of several, whose `url` names all of them.
    """

    def __init__(self, folder: Path, store: Path, access: Access, site: Site | None = None) -> None:
        self._folder, self._store, self._access, self._site = folder, store, access, site
        self._server = self._start(0, "")
        self.url, self.token = site.url if site else self._server.url, self._server.token

    async def last(self, came_back: Callable[[int, str], Awaitable[None]]) -> None:
        """Without end; `came_back` is told how often it has started again, and why.

        Raises BrokerError when it doesn't come up again, or ends time after time.
        """
        loop = asyncio.get_running_loop()
        for number in range(1, 1 + _SERVER_STARTS):
            ended = asyncio.Event()
            handle = os.pidfd_open(self._server.process.pid)
            loop.add_reader(handle, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(handle)
                os.close(handle)
            why = f"nats-server ended by itself with code {self._server.process.wait()}"
            self._server = self._start(self._server.port, self.token)
            await came_back(number, why)
        raise BrokerError(f"nats-server ended {_SERVER_STARTS} times; see {self._server.log}")

    def stop(self) -> None:
        self._server.stop(timeout_s=2.0)

    def _start(self, port: int, token: str) -> NatsServer:
        if self._site is not None:
            return self._site.start(self._access, store=self._store, timeout_s=60)
        return start_server(
            self._folder, store=self._store, port=port, token=token, public=own_address(),
            access=self._access, timeout_s=60,
        )  # fmt: skip


def cluster_access(spec: GraphSpec, options: RunOptions) -> Access:
    """That of the roles, and that of the agents that start them."""
    own = access(spec, options)
    agent = Account(name=AGENT, writes=(CREW_LOG, ORDERS_LOG), beats=False)
    return Access(run=own.run, accounts=(*own.accounts, agent))


async def _conduct(
    spec: GraphSpec,
    options: RunOptions,
    run: RunDir,
    server: LastingServer,
    hosts: dict[str, int],
    log: str,
    arrive_s: float,
) -> int:
    async with interrupts() as interrupted:
        link = await connect(server.url, server.token, options)

        async def declare() -> None:
            await link.declare(edges(spec, options), [*logs(spec), CREW_LOG, ORDERS_LOG])

        async def came_back(count: int, why: str) -> None:
            print(f"arriero: {why}; it has started again", file=sys.stderr, flush=True)
            if options.hubs == 1:
                await declare()  # what stood in memory only
            await record(link, Restarted(name="nats-server", number=count, why=why))

        try:
            await declare()
            await fill_ledger(link, run)
            crew = RemoteCrew(spec, link, hosts, log)
            conductor = Conductor(spec, options, run, LaunchOptions(), crew)
            Guests(crew, conductor.scaling, conductor.supervisor)
            conductor.supervisor.watch(crew.follow())
            conductor.supervisor.watch(server.last(came_back))

            async def work() -> None:
                here = HubAddress(url=server.url, token=server.token, attempt=attempt())
                look = pass_for(server.url, server.token, options.run_id)
                publish(run.path / WATCHER_FILE, look)
                publish(run.path / HUB_FILE, here)
                await crew.all_arrived(arrive_s)
                conductor.follow(ClaimChecked(link, claim_store(options)))
                await conductor.supervisor.all_ended()

            outcome = await conductor.outcome(work(), interrupted)
            await end_roles(crew.processes, conductor.brokers, outcome, _LEAVE_S)
            with suppress(BrokerError, TimeoutError):
                await asyncio.wait_for(crew.dismiss(), _LEAVE_S)
            await conductor.close(outcome, interrupted)
        finally:
            with suppress(BrokerError, TimeoutError):
                await asyncio.wait_for(link.close(), _LEAVE_S)
    code = conductor.conclude(outcome)
    if outcome.failure is None or not outcome.failure.again:
        return code
    print("arriero: all of the run may start again, as often as `requeues` of the profile says", flush=True)
    return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
