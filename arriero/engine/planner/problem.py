"""LlamaRL's optimisation problem: the shortest step with one shared memory constraint, and with two.

    synchronous   min  B (e_t + e_g) / G                        s.t.  M_t / m_t + M_g / m_g <= M
    asynchronous  min  max(B e_t / G_t, B e_g / G_g) + w        s.t.  M_t / m_t <= M,  M_g / m_g <= M,
                                                                      G_t + G_g <= G

`B` sequences a step, `G` devices of `M` bytes; stage x (t: train, g: generate) works on `b_x` sequences at
once over `m_x` devices, holds `M_x = static + b_x * each` bytes and spends `e_x(b_x, m_x)` device-seconds a
sequence.
Derivation, assumptions and counter-examples: docs/theory.md.
Source: the problem and the theorem's claim are LlamaRL's (arXiv:2505.24034); notation and proof are ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One of the two stages. `e(b, m) = (fixed / b + marginal) * (1 + spread * (m - 1))` device-seconds.

    `fixed` is what a pass costs whatever its batch (weights read, kernels launched); with `fixed > 0`
    efficiency rises with the batch, the theorem's assumption. `spread` is the price of every further device
    in a replica. `widths` are the allowed `m`, `largest` the largest batch.
    """

    static: float
    each: float
    fixed: float
    marginal: float
    spread: float = 0.0
    widths: tuple[int, ...] = (1, 2, 4, 8)
    largest: int = 1 << 20

    def cost(self, batch: int, width: int) -> float:
        """Device-seconds a sequence."""
        return (self.fixed / batch + self.marginal) * (1 + self.spread * (width - 1))

    def bytes(self, batch: int, width: int) -> float:
        """Bytes a device."""
        return (self.static + batch * self.each) / width

    def fitting(self, width: int, memory: float) -> int:
        """The largest batch within `memory` bytes a device; 0 if none."""
        free = memory * width - self.static
        if free < self.each:
            return 0
        batch = min(self.largest, int(free / self.each) if self.each else self.largest)
        while batch and self.bytes(batch, width) > memory:  # a rounding error
            batch -= 1
        return batch


@dataclass(frozen=True, kw_only=True)
class Problem:
    """`sync_s` is what an asynchronous step waits for weights; `bubble` the share by which unequal stages
    make it longer; `staleness_cost` the share of more steps to the same reward. The theorem has none of them.

    With `whole` the split is in whole replicas; without, in any shares (the theorem's case).
    """

    devices: int
    memory: float
    sequences: int
    train: Stage
    generate: Stage
    sync_s: float = 0.0
    bubble: float = 0.0
    staleness_cost: float = 0.0
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An optimum: seconds a step (times steps needed, relative to the synchronous run), batches and widths.

    `train_devices` and `generate_devices` are equal to all devices in the synchronous form.
    """

    seconds: float
    train_batch: int
    generate_batch: int
    train_width: int
    generate_width: int
    train_devices: float
    generate_devices: float


def synchronous(p: Problem) -> Choice | None:
    """The shortest step when both stages share every device's memory and take turns; None if nothing fits."""
    return min(_synchronous(p), key=lambda c: c.seconds, default=None)


def asynchronous(p: Problem) -> Choice | None:
    """The shortest step when each stage has devices of its own; None if nothing fits."""
    return min(_asynchronous(p), key=lambda c: c.seconds, default=None)


def _synchronous(p: Problem) -> Iterator[Choice]:
    for m_t in _widths(p.train, p):
        for m_g in _widths(p.generate, p):
            for b_t in _batches(p, m_t, m_g):
                left = p.memory - p.train.bytes(b_t, m_t)
                if b_g := p.generate.fitting(m_g, left):
                    each = p.train.cost(b_t, m_t) + p.generate.cost(b_g, m_g)
                    yield Choice(
                        seconds=p.sequences * each / p.devices, train_batch=b_t, generate_batch=b_g,
                        train_width=m_t, generate_width=m_g, train_devices=p.devices,
                        generate_devices=p.devices,
                    )  # fmt: skip


def _batches(p: Problem, m_t: int, m_g: int) -> Iterable[int]:
    """Train batches to try, given that the generator then takes the largest batch that fits: all of them, or
    4,096 evenly spaced ones and the largest."""
    most = p.train.fitting(m_t, p.memory - p.generate.bytes(1, m_g))
    return sorted({*range(1, most + 1, max(1, most // 4096)), most}) if most else ()


def _asynchronous(p: Problem) -> Iterator[Choice]:
    for m_t in _widths(p.train, p):
        for m_g in _widths(p.generate, p):
            b_t, b_g = p.train.fitting(m_t, p.memory), p.generate.fitting(m_g, p.memory)
            if not (b_t and b_g):
                continue
            train, generate = p.train.cost(b_t, m_t), p.generate.cost(b_g, m_g)
            for of_train in _splits(p, train, generate, m_t, m_g):
                of_generate = p.devices - of_train
                if p.whole:
                    of_generate = of_generate // m_g * m_g
                slower = p.sequences * max(train / of_train, generate / of_generate)
                seconds = (slower * (1 + p.bubble) + p.sync_s) * (1 + p.staleness_cost)
                yield Choice(
                    seconds=seconds, train_batch=b_t, generate_batch=b_g, train_width=m_t, generate_width=m_g,
                    train_devices=of_train, generate_devices=of_generate,
                )  # fmt: skip


def _splits(p: Problem, train: float, generate: float, m_t: int, m_g: int) -> list[float]:
    """Devices for training: the balance `e_t / G_t = e_g / G_g`, or the whole numbers around it."""
    balance = p.devices * train / (train + generate)
    if not p.whole:
        return [balance]
    around = (math.floor(balance / m_t) * m_t, math.ceil(balance / m_t) * m_t)
    return [n for n in sorted({*around, m_t}) if m_t <= n <= p.devices - m_g]


def _widths(stage: Stage, p: Problem) -> list[int]:
    return [m for m in stage.widths if m <= p.devices]


def strict(p: Problem, sync: Choice) -> bool:
    """Whether the theorem promises `asynchronous(p).seconds < sync.seconds`: its assumptions, at `sync`.

    One stage's efficiency still rises with its batch, its batch isn't at its limit, and the memory that the
    other stage leaves takes at least one more sequence.
    """
    if p.whole or p.sync_s or p.bubble or p.staleness_cost:
        return False
    t, g = p.train, p.generate
    more_t = sync.train_batch < t.largest and t.bytes(sync.train_batch + 1, sync.train_width) <= p.memory
    more_g = (
        sync.generate_batch < g.largest and g.bytes(sync.generate_batch + 1, sync.generate_width) <= p.memory
    )
    return (more_t and t.fixed > 0) or (more_g and g.fixed > 0)
