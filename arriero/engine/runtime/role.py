"""The main loop of a role: its nodes side by side, a heartbeat from its own thread, an end that is said."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import traceback
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any

from arriero.engine.broker import Broker
from arriero.engine.errors import StepRefused, UserError
from arriero.engine.fused import fused
from arriero.engine.graph import EvaluatesDuring, Graph, StoresParts
from arriero.engine.runtime.context import Context
from arriero.engine.runtime.journal import Progress, announce, record
from arriero.engine.runtime.node import LEAVE_S, NodeRunner
from arriero.engine.runtime.source import SourceRunner
from arriero.engine.runtime.spmd import RankRunner, World
from arriero.schemas.graph import GraphSpec
from arriero.schemas.ledger import Ended
from arriero.schemas.run import RoleStatus, RunOptions

_log = logging.getLogger(__name__)
_PEER_S = 5.0
_LAG_S = 0.5  # between two looks at the event loop; a heartbeat a second says what they saw
LINEAGE = "lineage"  # the folder of the run directory that holds the record
_SAY_S = 5.0  # for the last words of a node that failed


class Stopped(Exception):
    """Somebody stopped the run; nothing is wrong with this role."""


async def run_role(
    spec: GraphSpec,
    options: RunOptions,
    *,
    role: str,
    replica: int,
    rank: int = 0,
    ranks: int = 1,
    run_dir: Path,
    broker: Broker,
    secret: bytes = b"",
) -> None:
    """Run the nodes of `role` to their end.

    Raises the first error of a node, after saying it on the control log, and Stopped when the run is stopped.
    However it ends, it does so within seconds, and what has no answer is given back. Rank 0 of an SPMD role
    talks to the broker; the other ranks take their records from it. `secret` is that of the run's weights.
    """
    graph = Graph.from_spec(spec)
    broker = await fused(broker, spec, options, role)
    progress = Progress(spec, broker, role, replica)
    world = World(rank, ranks, options.wait_bound_s)
    names = [n.name for n in spec.roles[role] if n.inputs or rank == 0]
    contexts = {
        name: _context(spec, graph, name, options, replica, rank, ranks, run_dir, secret) for name in names
    }
    runners = [_runner(graph, spec, name, broker, options, contexts[name], progress, world) for name in names]
    lag = _LoopLag()
    broker.start_pulse(
        f"{role}-{replica}-{rank}",
        lambda: _status(role, replica, rank, lag, runners),
        interval_s=options.heartbeat_s,
    )
    await _until_all_end(
        [_run_node(runner, replica, rank, broker) for runner in runners],
        [
            progress.follow(),
            lag.measure(),
            _raise_when(progress.stopped),
            _leave_when(progress.leave, runners),
        ],
    )
    world.close()


async def _until_all_end(
    nodes: Iterable[Coroutine[Any, Any, None]], watchers: Iterable[Coroutine[Any, Any, None]]
) -> None:
    """Run all; returns when the nodes have ended. The first error of a node or watcher cancels the others."""
    tasks = [asyncio.create_task(node) for node in nodes]  # strong references: a task without may vanish
    watching = [asyncio.create_task(watcher) for watcher in watchers]
    try:
        while not all(task.done() for task in tasks):
            running = [task for task in (*tasks, *watching) if not task.done()]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in (*tasks, *watching):  # a node's own error before the news that the run is stopped
                if task.done():
                    task.result()
        for task in tasks:
            task.result()
    finally:
        for task in (*tasks, *watching):
            task.cancel()
        _, late = await asyncio.wait((*tasks, *watching), timeout=LEAVE_S + 1)
        if late:
            _log.warning("%d tasks of this role don't come to an end", len(late))
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()  # seen


async def _raise_when(stopped: asyncio.Event) -> None:
    await stopped.wait()
    raise Stopped


async def _leave_when(told: asyncio.Event, runners: Iterable[NodeRunner]) -> None:
    await told.wait()
    for runner in runners:
        await runner.leave()


async def _run_node(runner: NodeRunner, replica: int, rank: int, broker: Broker) -> None:
    """Run one node and say how it ended. Only rank 0 says that all went well; any rank says what didn't."""
    name = runner.node.name
    try:
        await runner.run()
    except Exception as error:
        if runner.world.ranks > 1 and _lost_peer(error):
            await asyncio.sleep(
                _PEER_S
            )  # whoever watches the ranks ends us first and names the one that failed
        user = isinstance(error, UserError)
        refused = error.findings if isinstance(error, StepRefused) else ()
        ended = Ended(
            node=name,
            replica=replica,
            error=str(error) if user else f"{type(error).__name__}: {error}",
            traceback=traceback.format_exc(),
            user=user,
        )
        try:
            async with asyncio.timeout(_SAY_S):
                for finding in refused:
                    await record(broker, finding)
                await announce(broker, ended)
        except Exception:  # noqa: BLE001  # the node's own error counts, not that nobody hears of it
            _log.exception("%s failed and couldn't say so", name)
        raise
    if rank == 0:
        counts = runner.clock.status().counts
        await announce(broker, Ended(node=name, replica=replica, counts=counts))


def _lost_peer(error: Exception) -> bool:
    """Whether a collective broke because another rank is gone: a consequence, not the cause."""
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text)


def _runner(
    graph: Graph,
    spec: GraphSpec,
    name: str,
    broker: Broker,
    options: RunOptions,
    context: Context,
    progress: Progress,
    world: World,
) -> NodeRunner:
    kind = SourceRunner if not spec.node(name).inputs else RankRunner if world.ranks > 1 else NodeRunner
    return kind(graph, spec, name, broker, options, context, progress, world)


def _context(
    spec: GraphSpec,
    graph: Graph,
    name: str,
    options: RunOptions,
    replica: int,
    rank: int,
    ranks: int,
    run_dir: Path,
    secret: bytes,
) -> Context:
    own = [loop.name for loop in spec.loops if loop.producer == name]
    followed = [i.source for i in spec.node(name).inputs if i.loop]
    followers = [n.name for n in spec.nodes if any(i.loop and i.source in own for i in n.inputs)]
    parts = [c.weight_ranks() for n in followers if isinstance(c := graph.nodes[n].component, StoresParts)]
    sources = [n.component for n in graph.nodes.values() if not n.inputs]
    during = [source.evaluates_every() for source in sources if isinstance(source, EvaluatesDuring)]
    return Context(
        run_id=options.run_id,
        run_dir=run_dir,
        node=name,
        replica=replica,
        replicas=spec.node(name).replicas,
        parts=tuple(sorted({number for number in parts if number > 1})),
        evaluates_every=next((every for every in during if every), 0),
        rank=rank,
        ranks=ranks,
        seed=options.seed,
        wait_bound_s=options.wait_bound_s,
        secret=secret,
        deterministic=options.deterministic,
        staleness=max((loop.staleness for loop in spec.loops), default=0),
        loop=next(iter((*own, *followed)), ""),
        record_url=(options.record_url or str(run_dir / LINEAGE)) if options.record else "",
    )


def _status(role: str, replica: int, rank: int, lag: _LoopLag, runners: Iterable[NodeRunner]) -> bytes:
    status = RoleStatus(
        role=role,
        replica=replica,
        rank=rank,
        pid=os.getpid(),
        host=socket.gethostname(),
        lag_s=lag.now(),
        nodes=tuple(r.clock.status() for r in runners),
    )
    return status.model_dump_json().encode()


class _LoopLag:
    """How long the event loop has not come round, in seconds: a component that blocks it shows here."""

    def __init__(self) -> None:
        self._seen = time.monotonic()

    async def measure(self) -> None:
        while True:
            self._seen = time.monotonic()
            await asyncio.sleep(_LAG_S)

    def now(self) -> float:
        return max(time.monotonic() - self._seen - _LAG_S, 0.0)
