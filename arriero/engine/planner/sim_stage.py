"""A node with many replicas as one vectorised queue: whole arrays of records, the same moments as one by one.

Replicas call for their next record when they begin one, and calls are served in order (see `sim_edges`). So a
record's replica depends on earlier records only, and any run of records in order of arrival can be placed at
once, as long as no call made on the way comes before one that is used.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from arriero.engine.planner.times import Draws

Array = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
_FEW = 48  # replicas up to which a heap is faster than arrays


@dataclass(frozen=True)
class Placed:
    """Records of one push, in order of arrival: when taken, begun and ended, and by which replica."""

    begin: Array
    end: Array
    replica: Numbers
    seconds: Array


class Stage:
    """Replicas of one node. `call`, `free` and `factor` are in the order in which their calls are served."""

    def __init__(self, draws: Draws, replicas: int, factors: Array) -> None:
        self.draws = draws
        self.replica: Numbers = np.arange(replicas)
        self.call: Array = np.zeros(replicas)
        self.free: Array = np.zeros(replicas)
        self.factor = factors
        self.busy = 0.0
        self.count = 0

    def copy(self) -> Stage:
        other = Stage(self.draws, 0, self.factor)
        other.replica, other.call, other.free = self.replica, self.call, self.free
        other.busy, other.count = self.busy, self.count
        return other

    def push(self, arrival: Array, numbers: Numbers, not_before: Array | None = None) -> Placed:
        """Place records that arrive at `arrival` (rising, none before those of an earlier push).

        A record is begun at `not_before` at the earliest, with its replica held: it waits for a version.
        """
        seconds = self.draws.these(numbers)
        self.count += len(numbers)
        if self.draws.constant == 0.0 and not_before is None:
            return Placed(arrival, arrival, np.zeros(len(arrival), np.int64), seconds)
        if len(self.replica) <= _FEW:
            return self._one_by_one(arrival, seconds, not_before)
        parts: list[Placed] = []
        first = 0
        while first < len(arrival):
            part = self._pass(
                arrival[first:], seconds[first:], None if not_before is None else not_before[first:]
            )
            parts.append(part)
            first += len(part.end)
        if len(parts) == 1:
            return parts[0]
        return Placed(
            np.concatenate([p.begin for p in parts]) if parts else np.zeros(0),
            np.concatenate([p.end for p in parts]) if parts else np.zeros(0),
            np.concatenate([p.replica for p in parts]) if parts else np.zeros(0, np.int64),
            np.concatenate([p.seconds for p in parts]) if parts else np.zeros(0),
        )

    def _pass(self, arrival: Array, seconds: Array, not_before: Array | None) -> Placed:
        """Give the next records to the replicas whose calls are first, as many as is certain."""
        n = min(len(arrival), len(self.call))
        call, free = self.call[:n], self.free[:n]
        take = np.maximum(np.maximum(arrival[:n], call), free)
        # A call made in this pass must not come before one that the pass uses later.
        late = np.flatnonzero(call[1:] > np.minimum.accumulate(take)[:-1])
        n = int(late[0]) + 1 if len(late) else n
        take, worked = take[:n], seconds[:n] * self.factor[self.replica[:n]]
        begin = take if not_before is None else np.maximum(take, not_before[:n])
        end = begin + worked
        replica = self.replica[:n]
        self.busy += float(worked.sum())
        call = np.concatenate([self.call[n:], take])
        order = np.argsort(call, kind="stable")
        self.call = call[order]
        self.free = np.concatenate([self.free[n:], end])[order]
        self.replica = np.concatenate([self.replica[n:], replica])[order]
        return Placed(begin, end, replica, worked)

    def _one_by_one(self, arrival: Array, seconds: Array, not_before: Array | None) -> Placed:
        line = [
            (c, i, f, r)
            for i, (c, f, r) in enumerate(
                zip(self.call.tolist(), self.free.tolist(), self.replica.tolist(), strict=True)
            )
        ]
        begins, ends, replicas, worked = (
            [0.0] * len(arrival),
            [0.0] * len(arrival),
            [0] * len(arrival),
            [0.0] * len(arrival),
        )
        least = not_before.tolist() if not_before is not None else None
        factor = self.factor.tolist()
        serial = len(line)
        for i, (a, s) in enumerate(zip(arrival.tolist(), seconds.tolist(), strict=True)):
            called, _, free, replica = line[0]
            take = max(a, called, free)
            begin = take if least is None else max(take, least[i])
            begins[i], replicas[i], worked[i] = begin, replica, s * factor[replica]
            ends[i] = begin + worked[i]
            heapq.heapreplace(line, (take, serial, ends[i], replica))
            serial += 1
        line.sort()
        self.call = np.array([c for c, _, _, _ in line])
        self.free = np.array([f for _, _, f, _ in line])
        self.replica = np.array([r for _, _, _, r in line], np.int64)
        self.busy += sum(worked)
        return Placed(np.array(begins), np.array(ends), np.array(replicas, np.int64), np.array(worked))
