"""The hub of a run on a cluster, first role of its job: the message broker, and what conducts the run.

    start nats-server -> declare -> publish hub.json -> all replicas arrive -> supervise, record -> all leave

Its exit code is that of the run. A run that SIGTERM told to stop (preemption, the time limit) ends with code
75, for which the job is started again; one that `arriero cancel` stopped has a file `cancelled`.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from arriero.engine.broker import BrokerError
from arriero.engine.claims import ClaimChecked
from arriero.engine.errors import UserError
from arriero.engine.nats import NatsBroker
from arriero.engine.nats_server import NatsServer, start_server
from arriero.launchers.conductor import INTERRUPTED, Conductor, end_roles, interrupts
from arriero.launchers.crew import RemoteCrew
from arriero.launchers.hub import BROKER, HUB_FILE, HubAddress, claim_store, clean, edges, logs, publish
from arriero.launchers.options import LaunchOptions
from arriero.launchers.place import attempt, own_address
from arriero.launchers.rundir import ATTEMPTS, OUTPUTS, RunDir
from arriero.schemas.crew import CREW_LOG, ORDERS_LOG
from arriero.schemas.graph import GraphSpec
from arriero.schemas.run import RunOptions

PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: try again
CANCELLED = "cancelled"
_LEAVE_S = 5.0  # for roles that are told to leave, over a network; a scheduler's grace is 30 s or more
_BUNDLE = ("graph.json", "options.json", "manifest.json")


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
        _settle(run, args.bundle)
        spec, options = run.read_graph(), run.read_options()
        server = start_server(run.path / BROKER, public=own_address(), timeout_s=60)
        try:
            code = asyncio.run(_conduct(spec, options, run, server, hosts, args.log, args.arrive_s))
        finally:
            server.stop(timeout_s=2.0)
            clean(run.path, options.run_id)
    except (UserError, BrokerError, OSError) as error:
        print(f"arriero: error: {error}", file=sys.stderr)
        return 2
    return PREEMPTED if code == INTERRUPTED and not (run.path / CANCELLED).exists() else code


def _settle(run: RunDir, bundle: Path | None) -> None:
    """The description of the run is in its directory, and what an earlier attempt left is out of the way."""
    run.path.mkdir(parents=True, exist_ok=True)
    for name in _BUNDLE if bundle else ():
        assert bundle is not None
        if not (run.path / name).exists():
            shutil.copyfile(bundle / name, run.path / name)
    (run.path / HUB_FILE).unlink(missing_ok=True)
    if run.ledger.exists():
        number = 1 + sum(1 for _ in (run.path / ATTEMPTS).glob("*"))
        earlier = run.path / ATTEMPTS / str(number)
        earlier.mkdir(parents=True)
        for name in OUTPUTS:
            with suppress(FileNotFoundError):
                (run.path / name).rename(earlier / name)
        print(
            f"arriero: the job was started again; what attempt {number} recorded is in {earlier}", flush=True
        )
    for folder in (run.logs, run.tensorboard):
        folder.mkdir(exist_ok=True)


async def _conduct(
    spec: GraphSpec,
    options: RunOptions,
    run: RunDir,
    server: NatsServer,
    hosts: dict[str, int],
    log: str,
    arrive_s: float,
) -> int:
    async with interrupts() as interrupted:
        link = await NatsBroker.connect(server.url, server.token, run=options.run_id)
        try:
            await link.declare(edges(spec, options), [*logs(spec), CREW_LOG, ORDERS_LOG])
            crew = RemoteCrew(spec, link, hosts, log)
            conductor = Conductor(spec, options, run, LaunchOptions(), crew)
            conductor.supervisor.watch(crew.follow())

            async def work() -> None:
                here = HubAddress(url=server.url, token=server.token, attempt=attempt())
                publish(run.path / HUB_FILE, here)
                await crew.all_arrived(arrive_s)
                conductor.follow(ClaimChecked(link, claim_store(options)))
                await conductor.supervisor.all_ended()

            outcome = await conductor.outcome(work(), interrupted)
            await end_roles(crew.processes, conductor.brokers, outcome, _LEAVE_S)
            with suppress(BrokerError, TimeoutError):
                await asyncio.wait_for(crew.dismiss(), _LEAVE_S)
            await conductor.close(outcome)
        finally:
            with suppress(BrokerError, TimeoutError):
                await asyncio.wait_for(link.close(), _LEAVE_S)
    return conductor.conclude(outcome)


if __name__ == "__main__":
    sys.exit(main())
