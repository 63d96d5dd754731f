"""What every replica said last and how full every edge is: for the display, the record and the wait graph."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from arriero.engine.broker import Broker, Depth
from arriero.engine.errors import one_line
from arriero.engine.rates import backlogs, capacities
from arriero.schemas.graph import GraphSpec
from arriero.schemas.run import EdgeState, LastPulse, NodeStatus, RoleStatus, VitalsFile

_log = logging.getLogger(__name__)
LAG_S = 1.0  # an event loop that is held up for longer is worth a line


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """A replica's last heartbeat and its age when it was read."""

    status: RoleStatus
    age_s: float


class Vitals:
    """State of the run at the last `poll`; pulses by "<role>-<replica>-<rank>", depths by edge of `edges`."""

    def __init__(self, edges: Sequence[str]) -> None:
        self._edges = edges
        self.pulses: dict[str, Pulse] = {}
        self.depths: dict[str, Depth] = {}
        self.hubs: dict[str, str] = {}  # what each of several does
        self._left: set[tuple[str, int]] = set()

    def forget(self, role: str, replica: int) -> None:
        """It has left while the run goes on; what it said last is of no interest."""
        self._left.add((role, replica))

    async def poll(self, broker: Broker) -> None:
        """Raises BrokerError if the engine doesn't answer."""
        pulses: dict[str, Pulse] = {}
        for key, beat in (await broker.beats()).items():
            try:
                status = RoleStatus.model_validate_json(beat.payload)
            except ValidationError as error:  # its sender will be missed
                _log.warning("what %s says of itself can't be read: %s", key, one_line(error))
                continue
            if (status.role, status.replica) not in self._left:
                pulses[key] = Pulse(status=status, age_s=beat.age_s)
        self.pulses = pulses
        depths = await asyncio.gather(*(broker.depth(e) for e in self._edges))
        self.depths = dict(zip(self._edges, depths, strict=True))
        self.hubs = await broker.servers()

    def written(self, spec: GraphSpec, step: int) -> VitalsFile:
        """As it is kept in the run directory."""
        room = rooms(spec)
        edges = {
            k: EdgeState(
                messages=d.messages, capacity=room[k], bytes=d.bytes, waiting=d.waiting, leased=d.leased
            )
            for k, d in self.depths.items()
        }
        pulses = {k: LastPulse(status=p.status, age_s=p.age_s) for k, p in self.pulses.items()}
        return VitalsFile(time=time.time(), step=step, pulses=pulses, edges=edges, hubs=self.hubs)

    @classmethod
    def read(cls, file: VitalsFile, now: float) -> Vitals:
        """As they were kept; heartbeats are older by now (seconds since 1970)."""
        found = cls(tuple(file.edges))
        since = max(now - file.time, 0.0)
        found.pulses = {k: Pulse(status=p.status, age_s=p.age_s + since) for k, p in file.pulses.items()}
        found.depths = {
            k: Depth(messages=e.messages, bytes=e.bytes, waiting=e.waiting, leased=e.leased)
            for k, e in file.edges.items()
        }
        found.hubs = file.hubs
        return found

    def nodes(self, name: str) -> list[tuple[str, NodeStatus, float]]:
        """Per replica and rank of node `name`: its replica's name, what it does, the age of that news."""
        return [
            (
                f"{p.status.role}-{p.status.replica}" + (f" rank {p.status.rank}" if p.status.rank else ""),
                s,
                p.age_s,
            )
            for _, p in sorted(self.pulses.items())
            for s in p.status.nodes
            if s.node == name
        ]

    def queues(self) -> dict[str, int]:
        """Messages on each edge."""
        return {name: d.messages for name, d in self.depths.items()}


def rooms(spec: GraphSpec) -> dict[str, int]:
    """How many messages each edge holds, backlogs included."""
    return {name: c.messages for name, c in (capacities(spec) | backlogs(spec)).items()}


def wait_graph(spec: GraphSpec, vitals: Vitals) -> str:
    """Who waits for what and since when, the last sign of life of each, and what stands on the edges."""
    capacity = rooms(spec)
    lines = ["who waits for what:"]
    for n in spec.nodes:
        known = vitals.nodes(n.name)
        lines += [f"  {n.name:<14} no heartbeat yet"] if not known else []
        lines += [
            f"  {n.name:<14} {_doing(s)}; {replica}, last heartbeat {age_s:.1f} s ago"
            for replica, s, age_s in known
        ]
    lines += [
        f"  {key:<14} hasn't let its event loop run for {p.status.lag_s:.1f} s"
        for key, p in sorted(vitals.pulses.items())
        if p.status.lag_s > LAG_S
    ]
    lines.append("what stands on the edges:")
    for name, depth in vitals.depths.items():
        groups = ", ".join(
            f"{g}: {depth.waiting[g]} waiting, {depth.leased[g]} leased" for g in depth.waiting
        )
        lines.append(f"  {name:<17} {depth.messages} of {capacity[name]} messages ({groups})")
    if vitals.hubs:
        lines.append(f"the hubs: {hubs_told(vitals.hubs)}")
    return "\n".join(lines)


def hubs_told(hubs: Mapping[str, str]) -> str:
    """What each of several hubs does, in a line; "" where there is one."""
    return ", ".join(f"{name} {does}" for name, does in hubs.items())


def _doing(status: NodeStatus) -> str:
    if status.ended:
        return "has ended"
    if status.waits_for:
        return f"waits for {status.waits_for} since {status.waits_s:.1f} s"
    return "works"
