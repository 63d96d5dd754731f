"""Run a checked graph: as processes of this machine through TorchX, or inline in this process.

start the app -> hub.json -> connect, follow, supervise -> stop everybody, hub last -> summary, exit code
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Sequence
from contextlib import suppress

from arriero.engine.claims import ClaimChecked
from arriero.engine.errors import UserError
from arriero.engine.memory import MemoryBroker
from arriero.engine.nats import NatsBroker
from arriero.engine.runtime.role import Stopped, run_role
from arriero.launchers.appdef import HUB, app_def, visible_devices
from arriero.launchers.conductor import Conductor, Outcome, end_roles, gone, interrupts
from arriero.launchers.hub import (
    BROKER,
    HUB_FILE,
    TOKEN,
    claim_store,
    clean,
    declare,
    private,
    wait_for_hub,
)  # fmt: skip
from arriero.launchers.hubs import forget
from arriero.launchers.local import LocalApp, Process
from arriero.launchers.options import LaunchOptions
from arriero.launchers.parent import LAUNCHER
from arriero.launchers.place import attempt
from arriero.launchers.provenance import own_gpus
from arriero.launchers.requests import Requests
from arriero.launchers.resuming import fill_ledger, go_on, read_history
from arriero.launchers.rundir import RunDir
from arriero.schemas.graph import GraphSpec
from arriero.schemas.run import RunOptions

_HUB_S = 60.0  # for the hub to come up on a busy machine
# With the bounds of the conductor, a stopped run is over in less than 5 s.
_LEAVE_S, _HUB_LEAVE_S = 1.2, 1.2


def launch(spec: GraphSpec, options: RunOptions, run: RunDir, launch: LaunchOptions) -> int:
    """Run `spec` in processes of this machine until it ends; the exit code. Call it from the main thread.

    When a process is lost that can't come back by itself, everything starts again, up to `options.restarts`
    times, from the newest version that is certain.

    `run` holds graph.json and options.json already. Raises UserError for a graph that can't be launched.
    """
    number = 0
    while True:
        number += 1
        try:
            conductor, outcome = asyncio.run(_launched(spec, options, run, launch))
        finally:
            clean(run.path, options.run_id)
        failure = outcome.failure
        if failure is None or not failure.again or number > options.restarts:
            return conductor.conclude(outcome)
        conductor.conclude(outcome, told=False)
        first = failure.message.partition("\n")[0]
        resumed = go_on(spec, options, run, why=first)
        versions = ", ".join(f"version {v} of {name}" for name, v in resumed.versions.items())
        told = f"{first}; all of the run starts again, from {versions} ({number} of {options.restarts})"
        print(f"arriero: {told}", file=sys.stderr, flush=True)


def inline(spec: GraphSpec, options: RunOptions, run: RunDir, launch: LaunchOptions) -> int:
    """As `launch`, with every node in this process and no server: for tests, breakpoints and notebooks."""
    check_inline(spec, hubs=options.hubs)
    try:
        return asyncio.run(_inlined(spec, options, run, launch))
    finally:
        clean(run.path, options.run_id)


def check_inline(spec: GraphSpec, *, hubs: int) -> None:
    """UserError for what one process can't be."""
    if hubs > 1:
        raise UserError(f"hub.replicas = {hubs}: one process has no hub; leave it or --inline out")
    if ranked := next((n for n in spec.nodes if n.ranks > 1), None):
        raise UserError(
            f"{ranked.name} has {ranked.ranks} ranks, and ranks are processes; run without --inline"
        )


async def _launched(
    spec: GraphSpec, options: RunOptions, run: RunDir, launch: LaunchOptions
) -> tuple[Conductor, Outcome]:
    (run.path / HUB_FILE).unlink(missing_ok=True)
    forget(run.path / BROKER)
    token = secrets.token_urlsafe(32)
    python_path = os.pathsep.join(p for p in (*launch.python_path, os.environ.get("PYTHONPATH", "")) if p)
    common = {LAUNCHER: str(os.getpid()), "PYTHONPATH": python_path}

    def secrets_of(role: str) -> dict[str, str]:
        return common | ({TOKEN: token} if role == HUB else private(token, role))

    definition = app_def(spec, options, run.path, port=launch.port)
    async with interrupts() as interrupted:
        gpus = own_gpus()
        app = LocalApp(definition, run.logs, secrets_of, visible_devices(spec, gpus), gpus)
        try:
            conductor = Conductor(spec, options, run, launch, app)

            async def work() -> None:
                address = await wait_for_hub(run.path, bound_s=_HUB_S, attempt=attempt())
                link = await NatsBroker.connect(address.url, token, run=options.run_id, replicas=options.hubs)
                conductor.follow(ClaimChecked(link, claim_store(options)))
                if conductor.scaling is not None:
                    resumed, _ = read_history(run)
                    requests = Requests(conductor.scaling, app, run)
                    conductor.supervisor.watch(requests.follow(resumed.scaled if resumed else {}))
                await conductor.supervisor.all_ended()

            outcome = await conductor.outcome(work(), interrupted)
            await end_roles(app.processes, conductor.brokers, outcome, _LEAVE_S)
            await conductor.close(outcome, interrupted)
            await _end_hub(app.processes)
        finally:
            app.close()
    return conductor, outcome


async def _inlined(spec: GraphSpec, options: RunOptions, run: RunDir, launch: LaunchOptions) -> int:
    conductor = Conductor(spec, options, run, launch, None)
    hub = MemoryBroker()
    await declare(hub, spec, options)
    await fill_ledger(hub, run)

    async def replica(role: str, number: int) -> None:
        broker = hub.connect()
        try:
            with suppress(Stopped):
                await run_role(spec, options, role=role, replica=number, run_dir=run.path, broker=broker)
        finally:
            await broker.close()

    async def work() -> None:
        conductor.follow(hub)
        async with asyncio.TaskGroup() as replicas:
            for role, nodes in spec.roles.items():
                for k in range(nodes[0].replicas):
                    replicas.create_task(replica(role, k))
        await conductor.supervisor.all_ended()

    async with interrupts() as interrupted:
        outcome = await conductor.outcome(work(), interrupted)
        await conductor.close(outcome, interrupted)
    return conductor.conclude(outcome)


async def _end_hub(processes: Sequence[Process]) -> None:
    hubs = [p for p in processes if p.hub]
    for p in hubs:
        if p.alive:
            p.process.terminate()  # it alone: it stops its server itself
    await gone(hubs, _HUB_LEAVE_S)
