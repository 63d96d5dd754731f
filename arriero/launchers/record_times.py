"""How long a node works on a record, batch by batch: folded from heartbeats and from what was trained.

Records of a batch are worked on side by side, so that its longest one says how long the batch takes, and not
the node's busy time. Only records that were trained count: the guard drops some that took too long.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from statistics import fmean

from arriero.engine.rates import by_record
from arriero.schemas.graph import GraphSpec
from arriero.schemas.run import NodeStatus, RecordTime

_PENDING = 16  # batches whose last heartbeats may still come
_REMEMBERED = 1 << 16  # prompts


class RecordTimes:
    """Of the nodes that work record by record. A batch of which a node's part isn't known doesn't count."""

    def __init__(self, spec: GraphSpec) -> None:
        self._took: dict[str, OrderedDict[int, dict[int, float]]] = {
            n.name: OrderedDict() for n in spec.nodes if by_record(spec, n.name)
        }
        self._at_once = dict.fromkeys(self._took, 0)
        self._pending: list[tuple[int, ...]] = []
        self._batches: dict[str, list[tuple[float, float, float]]] = {name: [] for name in self._took}

    def heartbeat(self, node: NodeStatus, replica: int) -> None:
        """Heartbeats overlap: what they say of a prompt again is the same, or more."""
        if (known := self._took.get(node.node)) is None:
            return
        self._at_once[node.node] = max(self._at_once[node.node], node.at_once)
        for origin, seconds in node.took:
            known.setdefault(origin, {})[replica] = seconds
        while len(known) > _REMEMBERED:
            known.popitem(last=False)

    def trained(self, origins: tuple[int, ...]) -> None:
        """The prompts of one version, in order of the versions."""
        self._pending.append(origins)
        if len(self._pending) > _PENDING:
            self._settle(self._pending.pop(0))

    def found(self, *, leave_out: int) -> dict[str, RecordTime]:
        """By node, without the first `leave_out` batches if there are more; without nodes of none."""
        for origins in self._pending:
            self._settle(origins)
        self._pending.clear()
        return {
            name: _mean(batches[leave_out:] or batches, self._at_once[name])
            for name, batches in self._batches.items()
            if batches
        }

    def _settle(self, origins: Iterable[int]) -> None:
        for name, known in self._took.items():
            parts = [known.pop(origin, None) for origin in origins]
            if parts and all(parts):
                seconds = [sum(part.values()) for part in parts if part]
                self._batches[name].append((min(seconds), fmean(seconds), max(seconds)))


def _mean(batches: list[tuple[float, float, float]], at_once: int) -> RecordTime:
    least, mean, longest = (fmean(each) for each in zip(*batches, strict=True))
    return RecordTime(least_s=least, mean_s=mean, longest_s=longest, at_once=at_once)
