"""The shortest step that any schedule of a graph reaches: its maximum cycle mean.

Every iteration k of the graph (one version) gives each node two moments: its first and its last output. Edges
say which moment waits for which, how long, and of how many iterations before (its tokens):

    last of n    waits for  first of n, the turns of its replicas    0 tokens   (a burst takes its time)
    last of n    waits for  last of n, its work / replicas           1 token    (replicas do no more)
    n            waits for  what feeds it, its shortest firing       0 tokens
    last of n    waits for  the first that feeds it, its longest     0 tokens   (a batch takes its slowest)
    source       waits for  the loop's producer, the weight sync     staleness + 1 tokens
    n            waits for  its readers, if its edge is bounded      capacity in iterations, rounded up

An iteration's firings are those that its version came from, so that these times may be means over versions:
the largest of several sums is, in the mean, no smaller than the largest sum of means. What was dropped isn't
among them.

The step is at least the largest (sum of times) / (sum of tokens) over all cycles. Source: Baccelli et al.,
"Synchronization and Linearity", 1992, theorem 3.28; algorithm: Howard's policy iteration as in
Cochet-Terrasson et al., "Numerical computation of spectral elements in max-plus algebra", 1998.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from arriero.engine.rates import capacities, repetitions, windows
from arriero.schemas.graph import GraphSpec


@dataclass(frozen=True)
class Arc:
    """`target` of iteration k comes no sooner than `seconds` after `source` of iteration k - `tokens`."""

    source: str
    target: str
    seconds: float
    tokens: int


@dataclass(frozen=True)
class Cycle:
    """The cycle that holds the graph up; `seconds` is its mean: time over tokens."""

    seconds: float
    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class NodeTime:
    """Seconds of one firing of a node: its share of the node's work, and from its beginning to its end.

    `mean` is the work: a replica with up to `at_once` firings under way takes less for each than it lasts.
    `least` and `longest` are those of an iteration's firings; without knowing, the least that can occur.
    """

    mean: float
    least: float
    longest: float = 0.0
    at_once: int = 1


def arcs(spec: GraphSpec, times: Mapping[str, NodeTime], *, sync_s: float = 0.0) -> list[Arc]:
    """The constraints of the module, for one iteration that makes one version (or one firing of all)."""
    counts, found = repetitions(spec), list[Arc]()
    for n in spec.nodes:
        t, firings = times.get(n.name, NodeTime(mean=0.0, least=0.0)), counts[n.name]
        first, last = f"{n.name}:first", f"{n.name}:last"
        found.append(Arc(last, last, firings * t.mean / n.replicas, 1))
        turns = math.ceil(firings / (n.replicas * t.at_once))
        found.append(Arc(first, last, max(0, turns - 1) * t.least, 0))
        for i in n.inputs:
            if i.loop:
                continue
            whole = firings == 1 and counts[i.source] >= 1
            found.append(Arc(f"{i.source}:{'last' if whole else 'first'}", first, t.least, 0))
            found.append(Arc(f"{i.source}:last", last, t.least, 0))
            found.append(Arc(f"{i.source}:first", last, t.longest, 0))
    for w in windows(spec):
        per = counts[w.producer]
        if per != 1:
            continue  # a loop that turns several times an iteration isn't expressed at this grain
        found += [Arc(f"{w.producer}:last", f"{s}:first", sync_s, w.staleness + 1) for s in w.sources]
    return found + _bounded(spec, counts)


def _bounded(spec: GraphSpec, counts: Mapping[str, int]) -> list[Arc]:
    """A full edge holds its producer until its readers have answered."""
    found: list[Arc] = []
    for name, capacity in capacities(spec).items():
        tokens = math.ceil((capacity.messages + 17) / (counts[name] * spec.node(name).produces))
        found += [
            Arc(f"{reader.name}:last", f"{name}:last", 0.0, tokens) for reader, _ in spec.consumers(name)
        ]
    return found


def bound(spec: GraphSpec, times: Mapping[str, NodeTime], *, sync_s: float = 0.0) -> Cycle:
    """The step below which no run of `spec` with these times gets, in seconds, and the cycle that says so."""
    return maximum_cycle_mean(arcs(spec, times, sync_s=sync_s))


def maximum_cycle_mean(graph: Sequence[Arc]) -> Cycle:
    """The cycle with the largest seconds per token. Raises ValueError for a cycle without tokens or no cycle.

    Howard's policy iteration: every vertex keeps one incoming arc (who it waits for), which leads to a cycle;
    keep changing arcs that would make a vertex wait longer until none does.
    """
    graph = _on_cycles(graph)
    if not graph:
        raise ValueError("the graph has no cycle")
    incoming: dict[str, list[Arc]] = {}
    for arc in graph:
        incoming.setdefault(arc.target, []).append(arc)
    policy = {v: max(options, key=lambda a: a.seconds) for v, options in incoming.items()}
    while True:
        mean, potential, cycle = _evaluate(policy)
        changed = False
        for v, options in incoming.items():
            best = max(options, key=lambda a: (mean[a.source], _reach(a, mean, potential)))
            now = policy[v]
            better = mean[best.source] > mean[now.source] + 1e-12 * (1 + abs(mean[now.source]))
            longer = _reach(best, mean, potential) > _reach(now, mean, potential) + 1e-9 * (
                1 + abs(mean[now.source])
            )
            if better or (mean[best.source] >= mean[now.source] - 1e-12 and longer):
                policy[v] = best
                changed = True
        if not changed:
            return max(cycle, key=lambda c: c.seconds)


def _reach(arc: Arc, mean: Mapping[str, float], potential: Mapping[str, float]) -> float:
    return potential[arc.source] + arc.seconds - mean[arc.source] * arc.tokens


def _evaluate(policy: Mapping[str, Arc]) -> tuple[dict[str, float], dict[str, float], list[Cycle]]:
    """Of each vertex the mean of the cycle it waits for and its place relative to it; and the cycles."""
    mean: dict[str, float] = {}
    potential: dict[str, float] = {}
    cycles: list[Cycle] = []
    for start in policy:
        path: list[str] = []
        v = start
        while v not in mean and v not in path:
            path.append(v)
            v = policy[v].source
        if v not in mean:
            ring = path[path.index(v) :]
            seconds, tokens = sum(policy[u].seconds for u in ring), sum(policy[u].tokens for u in ring)
            if tokens == 0:
                raise ValueError(f"cycle without tokens: {' <- '.join(ring)}; nothing on it can ever start")
            cycles.append(Cycle(seconds / tokens, tuple(reversed(ring))))
            mean[v], potential[v] = seconds / tokens, 0.0
        for u in reversed(path):
            if u not in mean:
                arc = policy[u]
                mean[u] = mean[arc.source]
                potential[u] = _reach(arc, mean, potential)
    return mean, potential, cycles


def _on_cycles(graph: Sequence[Arc]) -> list[Arc]:
    """The arcs between vertices that wait for something and are waited for, over and over."""
    kept = list(graph)
    while True:
        alive = {a.source for a in kept} & {a.target for a in kept}
        left = [a for a in kept if a.source in alive and a.target in alive]
        if len(left) == len(kept):
            return kept
        kept = left
