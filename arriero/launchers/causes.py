"""Why a run doesn't get on, as far as heartbeats and waits tell: pure, from what the launcher saw last."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from arriero.launchers.vitals import LAG_S, Vitals
from arriero.schemas.graph import GraphSpec
from arriero.schemas.run import NodeStatus, RoleStatus

SILENT_S = 10.0  # heartbeats come every second


@dataclass(frozen=True, kw_only=True)
class Cause:
    """What probably holds the run up, and the replicas ("<role>-<replica>-<rank>") whose stacks tell more."""

    text: str
    stuck: tuple[str, ...] = ()


def causes(spec: GraphSpec, vitals: Vitals) -> list[Cause]:
    """The likely ones, the surest first; empty if every node has ended."""
    found = [*_silent(vitals), *_blocked(vitals), *_unheard(spec, vitals)]
    return found or _waits(spec, vitals)


def _silent(vitals: Vitals) -> Iterable[Cause]:
    for key, p in sorted(vitals.pulses.items()):
        if p.age_s > SILENT_S and not _over(p.status):
            yield Cause(
                text=f"{key} has given no sign of life for {p.age_s:.0f} s: its process {p.status.pid} on "
                f"{p.status.host} was killed or stopped, or its machine is gone",
                stuck=(key,),
            )


def _blocked(vitals: Vitals) -> Iterable[Cause]:
    for key, p in sorted(vitals.pulses.items()):
        if p.status.lag_s > LAG_S and p.age_s <= SILENT_S:
            names = ", ".join(n.node for n in p.status.nodes)
            yield Cause(
                text=f"{key} hasn't let its event loop run for {p.status.lag_s:.0f} s: {names} computes or "
                "waits in its coroutine; what blocks belongs in a thread",
                stuck=(key,),
            )


def _unheard(spec: GraphSpec, vitals: Vitals) -> Iterable[Cause]:
    for role, nodes in spec.roles.items():
        for k in range(nodes[0].replicas):
            if not any(p.status.role == role and p.status.replica == k for p in vitals.pulses.values()):
                yield Cause(text=f"{role}-{k} has never been heard of: it still starts, or its log says why")


def _waits(spec: GraphSpec, vitals: Vitals) -> list[Cause]:
    """Follow who waits for whom, from where the run ends, to who doesn't wait."""
    waiting = {n.name: s for n in spec.nodes if (s := _longest_wait(vitals, n.name)) is not None}
    ends = [n.name for n in spec.nodes if not spec.consumers(n.name)]
    found: list[Cause] = []
    for start in ends:
        path = [start]
        while (status := waiting.get(path[-1])) is not None:
            following = _waited_for(spec, path[-1], status.waits_for)
            if following in path or not following:
                path.append(following)
                break
            path.append(following)
        found += _told(vitals, path)
    return list(dict.fromkeys(found))


def _told(vitals: Vitals, path: list[str]) -> list[Cause]:
    *before, last = path
    chain = " <- ".join(dict.fromkeys(before))
    if last in before:
        circle = before[before.index(last) :]
        stuck = tuple(key for name in circle for key in _replicas(vitals, name))
        if len(circle) == 1:
            return [Cause(text=f"{last} waits for itself: look at its stack", stuck=stuck)]
        return [
            Cause(
                text=f"{', '.join(circle)} wait for each other in a circle: a record was taken and not "
                "answered, or fewer records come than a firing takes",
                stuck=stuck,
            )
        ]
    if not last:
        return [Cause(text=f"{before[-1]} waits for the broker: its disk or the network is slow")]
    states = [s for _, s, _ in vitals.nodes(last)]
    if states and all(s.ended for s in states):
        return [] if not before else [Cause(text=f"{chain} waits for {last}, which has ended")]
    waits = f"; {chain} waits for it" if chain else ""
    at_work = tuple(k for k in _replicas(vitals, last) if _works(vitals, k, last))
    text = f"{last} is at work{waits}: it is slow, or hangs in what it calls"
    return [Cause(text=text, stuck=at_work)]


def _waited_for(spec: GraphSpec, node: str, text: str) -> str:
    """The node that could end a wait; empty if it is the broker."""
    for loop in spec.loops:
        if f"loop {loop.name}" in text or text.startswith(("admission", "version")):
            return loop.producer
    if text.startswith("room on"):
        readers = [c.name for c, _ in spec.consumers(node)]
        return readers[0] if readers else ""
    words = text.replace(",", " ").split()
    return next((n.name for n in spec.nodes if n.name in words), "")


def _longest_wait(vitals: Vitals, node: str) -> NodeStatus | None:
    """Of the replicas of a node; None if one of them doesn't wait, or none is known."""
    known = [s for _, s, _ in vitals.nodes(node) if not s.ended]
    if not known or not all(s.waits_for for s in known):
        return None
    return max(known, key=lambda s: s.waits_s)


def _replicas(vitals: Vitals, node: str) -> list[str]:
    return [k for k, p in sorted(vitals.pulses.items()) if any(n.node == node for n in p.status.nodes)]


def _works(vitals: Vitals, key: str, node: str) -> bool:
    nodes = vitals.pulses[key].status.nodes
    return any(n.node == node and not n.waits_for and not n.ended for n in nodes)


def _over(status: RoleStatus) -> bool:
    return all(n.ended for n in status.nodes)
