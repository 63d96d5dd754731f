"""The main loop of a role: its nodes side by side, a heartbeat from a thread of its own, an end that is said."""

from __future__ import annotations

import asyncio
import os
import socket
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

from arriero.engine.broker import Broker
from arriero.engine.errors import UserError
from arriero.engine.graph import Graph
from arriero.engine.runtime.context import Context
from arriero.engine.runtime.journal import Progress, announce
from arriero.engine.runtime.node import NodeRunner
from arriero.engine.runtime.source import SourceRunner
from arriero.engine.runtime.spmd import RankRunner, World
from arriero.schemas.graph import GraphSpec
from arriero.schemas.ledger import Ended
from arriero.schemas.run import RoleStatus, RunOptions


class Stopped(Exception):
    """Somebody stopped the run; nothing is wrong with this role."""


async def run_role(
    spec: GraphSpec, options: RunOptions, *, role: str, replica: int, rank: int = 0, ranks: int = 1,
    run_dir: Path, broker: Broker,
) -> None:
    """Run the nodes of `role` to their end. Raises the first error of a node, after saying it on the control log.

    Rank 0 of an SPMD role talks to the broker; the other ranks take their records from it.
    """  # fmt: skip
    graph = Graph.from_spec(spec)
    progress = Progress(spec, broker)
    world = World(rank, ranks, options.wait_bound_s)
    runners = [
        _runner(graph, spec, name, options, _context(spec, name, options, replica, rank, ranks, run_dir), progress, broker, world)
        for name in (n.name for n in spec.roles[role])
    ]
    lag = _LoopLag()
    broker.start_pulse(
        f"{role}-{replica}-{rank}", lambda: _status(role, replica, rank, lag, runners), interval_s=options.heartbeat_s
    )
    watchers = [asyncio.create_task(progress.follow()), asyncio.create_task(lag.measure())]
    work = asyncio.gather(*(_run_node(runner, replica, rank, broker) for runner in runners))
    stop = asyncio.create_task(progress.stopped.wait())
    try:
        await asyncio.wait({work, stop, watchers[0]}, return_when=asyncio.FIRST_COMPLETED)
        if watchers[0].done():
            await watchers[0]
        if not work.done():
            raise Stopped
        await work
    finally:
        for task in (*watchers, stop, work):
            task.cancel()
        await asyncio.gather(*watchers, stop, work, return_exceptions=True)
        world.close()


async def _run_node(runner: NodeRunner, replica: int, rank: int, broker: Broker) -> None:
    name = runner.node.name
    try:
        await runner.run()
    except Exception as error:
        ended = Ended(
            node=name, replica=replica, error=f"{type(error).__name__}: {error}" if not isinstance(error, UserError) else str(error),
            traceback=traceback.format_exc(), user=isinstance(error, UserError),
        )  # fmt: skip
        await announce(broker, ended)
        raise
    if rank == 0:
        await announce(broker, Ended(node=name, replica=replica))


def _runner(
    graph: Graph, spec: GraphSpec, name: str, options: RunOptions, context: Context, progress: Progress,
    broker: Broker, world: World,
) -> NodeRunner:  # fmt: skip
    kind = SourceRunner if not spec.node(name).inputs else RankRunner if world.ranks > 1 else NodeRunner
    return kind(graph, spec, name, broker, options, context, progress, world)


def _context(
    spec: GraphSpec, name: str, options: RunOptions, replica: int, rank: int, ranks: int, run_dir: Path
) -> Context:
    own = [loop.name for loop in spec.loops if loop.producer == name]
    followed = [i.source for i in spec.node(name).inputs if i.loop]
    return Context(
        run_id=options.run_id, run_dir=run_dir, node=name, replica=replica, rank=rank, ranks=ranks, seed=options.seed,
        deterministic=options.deterministic, staleness=max((loop.staleness for loop in spec.loops), default=0),
        loop=next(iter((*own, *followed)), ""),
    )  # fmt: skip


def _status(role: str, replica: int, rank: int, lag: _LoopLag, runners: Iterable[NodeRunner]) -> bytes:
    status = RoleStatus(
        role=role, replica=replica, rank=rank, pid=os.getpid(), host=socket.gethostname(), lag_s=lag.now(),
        nodes=tuple(r.clock.status() for r in runners),
    )  # fmt: skip
    return status.model_dump_json().encode()


class _LoopLag:
    """How long the event loop has not come round, in seconds: a component that blocks it shows here."""

    def __init__(self) -> None:
        self._seen = time.monotonic()

    async def measure(self) -> None:
        while True:
            self._seen = time.monotonic()
            await asyncio.sleep(0.1)

    def now(self) -> float:
        return max(time.monotonic() - self._seen - 0.1, 0.0)
