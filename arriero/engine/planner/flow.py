"""Generation and training in time, sequence by sequence, for one generator replica that stands for all.

The replica decodes its share of every version with continuous batching; how long a decoding step takes
depends on how many sequences it holds. Admission is the runtime's: share number k may begin while
`k < (version + staleness + 1) * share`. Weights are taken in flight; `recompute` rebuilds the cache then.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from arriero.engine.planner.decoding import Decoder
from arriero.engine.planner.lengths import Lengths


@dataclass(frozen=True, kw_only=True)
class Flow:
    """What one replica is given: `share` sequences of each version, trained on in `train_s`.

    They come in groups of `samples` that are trained on when whole; with `drop`, a group begun more than
    `staleness` versions before is dropped and another let in, as the runtime's guard does.
    The sync takes `sync_s` and runs beside training of the next version. `streamed` is the share of the
    training time that can begin before the batch is whole: 0 trains whole batches, as the runtime does.
    """

    decoder: Decoder
    prompt: float
    responses: Lengths
    share: int
    train_s: float
    staleness: int
    samples: int = 1
    drop: bool = False
    sync_s: float = 0.0
    recompute: bool = False
    streamed: float = 0.0


@dataclass(frozen=True, kw_only=True)
class FlowResult:
    """Seconds a version in the steady state, and shares of time in which nothing is decoded or trained."""

    step_s: float
    generator_idle: float
    trainer_idle: float


class _Replica:
    """The decoding side: what is under way, and how far."""

    def __init__(self, flow: Flow, lengths: Iterator[float]) -> None:
        self.flow, self._lengths = flow, lengths
        self.now = self.position = self.context = self.idle = 0.0
        self.active: list[tuple[float, float, int]] = []  # position at which it ends, length, group
        self.begun = self.ended = self.dropped = self.batches = 0
        self.open: dict[
            int, tuple[int, int]
        ] = {}  # group -> sequences still missing, version it was begun with

    def fill(self, version: int) -> None:
        """Begin sequences while admission and memory allow it."""
        limit = (version + self.flow.staleness + 1) * self.flow.share + self.dropped
        while self.begun < limit and len(self.active) < self.flow.decoder.slots:
            length, group = next(self._lengths), self.begun // self.flow.samples
            self.open.setdefault(group, (self.flow.samples, version))
            heapq.heappush(self.active, (self.position + length, length, group))
            self.context += self.flow.prompt
            self.now += self.flow.decoder.prefill(self.flow.prompt)
            self.begun += 1

    def until(self, moment: float) -> None:
        """Decode up to the next end of a sequence or to `moment`."""
        if not self.active:
            self.idle += max(0.0, moment - self.now)
            self.now = max(self.now, moment)
            return
        batch, steps = len(self.active), self.active[0][0] - self.position
        each = self.flow.decoder.step(batch, self.context + batch * steps / 2)
        if self.now + steps * each > moment:
            steps = max(0.0, (moment - self.now) / each)
            self.now = max(self.now, moment)
            self._advance(steps)
            return
        self.now += steps * each
        self._advance(steps)
        while self.active and self.active[0][0] <= self.position + 1e-9:
            _, length, group = heapq.heappop(self.active)
            self.context -= self.flow.prompt + length
            self._end(group)

    def _end(self, group: int) -> None:
        missing, version = self.open.pop(group)
        if missing > 1:
            self.open[group] = missing - 1, version
        elif self.flow.drop and self.batches - version > self.flow.staleness:
            self.dropped += self.flow.samples
        else:
            self.ended += self.flow.samples

    def rebuild(self) -> None:
        """Compute the cache again with new weights."""
        self.now += self.flow.decoder.read(self.context / max(1, len(self.active))) * len(self.active)

    def _advance(self, steps: float) -> None:
        self.position += steps
        self.context += steps * len(self.active)


def steady(flow: Flow, *, versions: int = 24, warm_up: int = 8, total: int = 0, seed: int = 0) -> FlowResult:
    """Run `versions` versions and look at those after `warm_up`.

    `total` is the number of sequences of a version over all replicas: a synchronous step waits for the
    longest of them all, wherever it is.
    """
    replica = _Replica(flow, _lengths(flow, total, seed))
    made: list[float] = []
    idle: list[float] = []
    trainer_free = 0.0
    pending: list[float] = []  # when versions under way will be there
    while len(made) < versions:
        replica.fill(len(made))
        replica.until(pending[0] if pending else float("inf"))
        while replica.ended >= (replica.batches + 1) * flow.share:
            start = max(replica.now - flow.streamed * flow.train_s, trainer_free)
            trainer_free = max(start + flow.train_s, replica.now)
            replica.batches += 1
            pending.append(trainer_free)
        while pending and pending[0] <= replica.now:
            made.append(pending.pop(0))
            idle.append(replica.idle)
            if flow.staleness == 0:
                replica.now = made[-1] + flow.sync_s
            elif flow.recompute:
                replica.rebuild()
    first, count = warm_up, len(made) - 1 - warm_up
    span = made[-1] - made[first]
    return FlowResult(
        step_s=span / count, generator_idle=(idle[-1] - idle[first]) / span,
        trainer_idle=max(0.0, 1 - flow.train_s * count / span),
    )  # fmt: skip


def _lengths(flow: Flow, total: int, seed: int) -> Iterator[float]:
    rng = np.random.default_rng(seed)
    while True:
        if flow.staleness:
            yield from flow.responses.sample(rng, 4096).tolist()
        else:
            batch = flow.responses.spread(flow.share)
            batch[-1] = max(batch[-1], flow.responses.expected_longest(max(total, flow.share)))
            yield from rng.permutation(batch).tolist()
