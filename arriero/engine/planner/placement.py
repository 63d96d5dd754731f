"""ReaL's plan search: every call of an iteration gets a mesh of devices and a layout; calls that share
devices take turns, others overlap; weights that move between the calls of one model cost their transfer.

Source: ReaL, arXiv:2406.14088: execution plans as (mesh, layout) per model function call, searched by
Metropolis-Hastings over an estimator. Small spaces are tried exhaustively here.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from arriero.engine.planner.costs import Layout


@dataclass(frozen=True, order=True)
class Mesh:
    """Devices `first` to `first + size - 1`."""

    first: int
    size: int

    def overlaps(self, other: Mesh) -> bool:
        return self.first < other.first + other.size and other.first < self.first + self.size


@dataclass(frozen=True)
class Place:
    mesh: Mesh
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class Call:
    """One computation of the iteration: its seconds at each place where it fits; after the named calls.

    Calls of the same `model` use the same weights of `weight_bytes`, which move if their places differ.
    """

    name: str
    model: str
    seconds: Mapping[Place, float]
    after: tuple[str, ...] = ()
    weight_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Seconds of an iteration, the place of every call, and of those seconds what moving weights takes."""

    seconds: float
    places: Mapping[str, Place]
    moving_s: float


def evaluate(calls: Sequence[Call], places: Mapping[str, Place], *, bandwidth: float) -> Placement:
    """List scheduling in order: a call starts when its predecessors are done and its devices are free.

    `bandwidth`: bytes a second and device at which weights move.
    """
    ends: dict[str, float] = {}
    where: dict[str, Place] = {}  # of each model: where its weights are
    busy: list[tuple[Mesh, float]] = []
    moving = 0.0
    for call in calls:
        place = places[call.name]
        move = 0.0
        if call.model in where and where[call.model] != place:
            move = call.weight_bytes / min(where[call.model].mesh.size, place.mesh.size) / bandwidth
        where[call.model] = place
        start = max([0.0, *(ends[a] for a in call.after)])
        start = max([start, *(end for mesh, end in busy if mesh.overlaps(place.mesh))])
        ends[call.name] = start + move + call.seconds[place]
        busy.append((place.mesh, ends[call.name]))
        moving += move
    return Placement(seconds=max(ends.values(), default=0.0), places=dict(places), moving_s=moving)


def meshes(devices: int, node: int) -> list[Mesh]:
    """All devices, halved again and again: aligned blocks, down to a node (within one: to a device)."""
    found: list[Mesh] = []
    size = devices
    while size >= 1:
        found += [Mesh(first, size) for first in range(0, devices - size + 1, size)]
        if size % 2 or (size <= node < devices):
            break
        size //= 2
    return found


def search(
    calls: Sequence[Call], *, bandwidth: float, tries: int = 20_000, exhaustive: int = 50_000, seed: int = 0
) -> Placement:
    """The best placement found: of all if there are at most `exhaustive`, else by simulated annealing.

    Raises ValueError naming a call that fits nowhere.
    """
    if nowhere := [c.name for c in calls if not c.seconds]:
        raise ValueError(f"{nowhere[0]} fits nowhere; more devices or smaller batches are needed")
    sizes = [len(c.seconds) for c in calls]
    if math.prod(sizes) <= exhaustive:
        options = (
            evaluate(calls, {c.name: p for c, p in zip(calls, chosen, strict=True)}, bandwidth=bandwidth)
            for chosen in itertools.product(*(c.seconds for c in calls))
        )
        return min(options, key=lambda p: p.seconds)
    return _anneal(calls, bandwidth, tries, random.Random(seed))


def _anneal(calls: Sequence[Call], bandwidth: float, tries: int, rng: random.Random) -> Placement:
    # From the greedy start: every call as fast as it can be alone.
    options = {c.name: list(c.seconds) for c in calls}
    places = {c.name: min(c.seconds, key=c.seconds.__getitem__) for c in calls}
    now = best = evaluate(calls, places, bandwidth=bandwidth)
    for k in range(tries):
        name = calls[rng.randrange(len(calls))].name
        changed = {**now.places, name: options[name][rng.randrange(len(options[name]))]}
        trial = evaluate(calls, changed, bandwidth=bandwidth)
        heat = 0.1 * (1 - k / tries) + 1e-4  # of the time now: a plan so much worse is taken one time in e
        worse = (trial.seconds - now.seconds) / (heat * now.seconds)
        if worse <= 0 or rng.random() < math.exp(-worse):
            now = trial
            best = min(best, now, key=lambda p: p.seconds)
    return best
