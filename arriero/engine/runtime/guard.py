"""The trainer's guard: the other half of the bound on staleness, and the point where held-out prompts leave.

A node that fires once per version (the batch component, the trainer) knows which version its next output will
replace. A record whose oldest token is more than `staleness` versions older goes no further, is counted, and
gives its place in the admission window back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

import numpy as np

from arriero.engine.rates import Window, ancestors, repetitions, windows
from arriero.schemas.graph import GraphSpec
from arriero.schemas.ledger import DroppedEvent, Evaluated, Event, Learned, Trained
from arriero.schemas.messages import Batch, Record, RolloutGroup, Sample, ScoredGroup, Weights, oldest


def guarded(spec: GraphSpec, node: str) -> Window | None:
    """The loop that bounds what `node` may take; None if it doesn't fire once per version of any loop."""
    counts = repetitions(spec)
    found = [w for w in windows(spec) if counts[w.producer] == counts[node] and spec.node(node).inputs]
    return min(found, key=lambda w: w.staleness, default=None)


def trainer_after(spec: GraphSpec, name: str, window: Window | None) -> str:
    """Whose steps say that what comes to `name` has been trained; empty if nobody's do."""
    return window.producer if window and name in ancestors(spec, window.producer) else ""


@dataclass(frozen=True, kw_only=True)
class Stale:
    """A group that is too old for the version about to be replaced."""

    group: str
    origins: tuple[int, ...]
    detail: str


def stale_groups(record: Record, version: int, bound: int) -> list[Stale]:
    """The groups in `record` with a token sampled more than `bound` versions before `version`.

    What a replay buffer gave out isn't judged: it was within the bound when it came, and is old on purpose.
    """
    found: dict[str, tuple[tuple[int, ...], int | None]] = {}
    match record:
        case RolloutGroup() | ScoredGroup():
            found[record.id] = (record.origins, record.oldest_version)
        case Batch():
            for s in (s for s in record.samples if not s.replayed):
                known = found.get(s.group, ((), None))[1]
                found[s.group] = ((s.origin,), oldest([known, s.oldest_version]))
        case _:
            pass
    return [
        Stale(
            group=group,
            origins=origins,
            detail=f"sampled by version {old}, version {version} is about to be replaced",
        )
        for group, (origins, old) in found.items()
        if old is not None and version - old > bound
    ]


class Ahead:
    """Which version the next output of a batch component will replace: the newest, and one for each under
    way.

    Counted from the ledger and from what this node gave, so that it stays right when a batch is dropped on
    the way, whole or group by group, or this node starts again; then it may be too small for a while, and the
    trainer's own guard decides.
    """

    def __init__(self, producer: str) -> None:
        self._producer = producer
        self._newest = 0
        self._under_way: dict[str, set[str]] = {}  # id -> the groups in it that weren't dropped
        self._origins: dict[str, frozenset[int]] = {}
        self._ended = asyncio.Event()

    @property
    def version(self) -> int:
        return self._newest + len(self._under_way)

    async def none_under_way(self, over: asyncio.Event) -> int:
        """The newest version, once all that this node gave has been trained or dropped, or all is `over`."""
        while self._under_way and not over.is_set():
            self._ended.clear()
            waits = [asyncio.create_task(event.wait()) for event in (self._ended, over)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        return self._newest

    def gave(self, output: Record) -> None:
        """A stamped output of this node; a held-out one makes no version."""
        if all(origin >= 0 for origin in output.origins):
            samples = output.samples if isinstance(output, Batch) else ()
            self._under_way[output.id] = {s.group for s in samples if not s.replayed}
            self._origins[output.id] = frozenset(output.origins)

    def apply(self, event: Event) -> None:
        """Take one event of the ledger into account."""
        if isinstance(event, Trained) and event.node == self._producer:
            self._newest = max(self._newest, event.version)
            # By its prompts too: what a node made of a batch and something else has an id of its own.
            self._came_to_an_end(event.batch, {k for k, v in self._origins.items() if v & {*event.origins}})
        elif isinstance(event, DroppedEvent):
            gone = {*event.origins}
            self._came_to_an_end(event.parent, {k for k, v in self._origins.items() if v and v <= gone})

    def _came_to_an_end(self, record: str, outputs: set[str]) -> None:
        # The batch itself, what a node between here and the trainer made of it (see `child_id`), or its last
        # group: the trainer's guard drops a stale batch group by group.
        for output, groups in tuple(self._under_way.items()):
            last = groups == {record}
            groups.discard(record)
            if last or record == output or record.startswith(f"{output}>") or output in outputs:
                del self._under_way[output], self._origins[output]
        self._ended.set()


def held_out(record: Record) -> Evaluated | None:
    """The ledger's event for a held-out prompt that came back; None for a training record."""
    if not isinstance(record, ScoredGroup) or record.group.prompt.split != "eval":
        return None
    prompt = record.group.prompt
    return Evaluated(
        id=prompt.id, origin=prompt.origins[0], version=prompt.min_version,
        values=tuple(s.value for s in record.scores), outcomes=tuple(s.outcome for s in record.scores),
        lengths=tuple(int(r.mask.sum()) for r in record.group.rollouts), source=prompt.source,
        truncated=sum(r.finish == "length" for r in record.group.rollouts),
    )  # fmt: skip


def sampled_otherwise(record: ScoredGroup) -> str:
    """Why a held-out prompt says nothing of the version that it was sent for: others sampled tokens of it.

    Empty if it was that version alone.
    """
    asked = record.group.prompt.min_version
    found = {int(v) for r in record.group.rollouts for v in np.unique(r.versions[r.mask])}
    if found <= {asked}:
        return ""
    return f"sampled by versions {', '.join(map(str, sorted(found)))}, to be evaluated was {asked}"


def dropped(node: str, stale: Stale) -> DroppedEvent:
    """The ledger's event for a group that the guard held back."""
    return DroppedEvent(
        node=node, parent=stale.group, origins=stale.origins, reason="stale", detail=stale.detail
    )


def trained(node: str, weights: Weights, batch: Record) -> Trained:
    """The ledger's event for one optimizer step. Staleness is that of sampled tokens, replayed ones aside."""
    samples = batch.samples if isinstance(batch, Batch) else ()
    fresh = [s for s in samples if not s.replayed]
    ages = [weights.version - 1 - s.versions[s.versions >= 0] for s in fresh if s.versions is not None]
    age = np.concatenate(ages) if ages else np.zeros(0, np.int32)
    return Trained(
        node=node, version=weights.version, batch=batch.id, origins=batch.origins,
        tokens=trained_tokens(batch),
        staleness_max=int(age.max(initial=0)), staleness_mean=float(age.mean()) if len(age) else 0.0,
        reward_mean=fsum(s.reward for s in samples) / len(samples) if samples else 0.0,
        right_shares=_right_shares(batch.origins, samples),
        metrics=weights.metrics,
    )  # fmt: skip


def learned(node: str, version: int, output: Record, inputs: tuple[str, ...]) -> Learned:
    """The ledger's event for one step of what learns before the trainer."""
    return Learned(node=node, version=version, batch=output.id, inputs=inputs, origins=output.origins)


def sampled_tokens(output: Record) -> int:
    return sum(int(r.mask.sum()) for r in output.rollouts) if isinstance(output, RolloutGroup) else 0


def trained_tokens(batch: Record) -> int:
    return batch.trained_tokens if isinstance(batch, Batch) else 0


def _right_shares(origins: Sequence[int], samples: Sequence[Sample]) -> tuple[float, ...]:
    right: dict[int, list[bool]] = {}
    for s in samples:
        right.setdefault(s.origin, []).append(s.right)
    shares = {origin: sum(found) / len(found) for origin, found in right.items()}
    return tuple(shares.get(origin, 0.0) for origin in origins) if samples else ()
