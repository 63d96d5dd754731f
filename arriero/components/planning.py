"""Which samples share a micro-batch, on which rank.

    samples -> units that aren't parted -> ranks, balanced by tokens -> micro-batches within the token budget

A unit is one sample, the samples that a loss needs together, or under `shared_prefix` those that begin alike.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Layout = Literal["padded", "packed", "shared_prefix"]
Tokens: TypeAlias = npt.NDArray[np.int32]
Plan: TypeAlias = tuple[tuple[tuple[int, ...], ...], ...]

# What a further run of rows costs, in padded tokens: measured on a 1 M-parameter Llama on one CPU core, where
# 0 (a run per length) and 256 were 10 to 30 % slower for mixed lengths.
RUN_COST = 64

# Moving all tokens to rows and back costs a twentieth of what they cost: measured in the same way.
MOVED = 20

# Attention sees a shared prefix once per sequence: at most this many times the tokens that are forwarded.
MOST_REPEATED = 4


# How far above the mean of its tokens a micro-batch may be filled, as shares of what is left of the budget.
_LIMITS = (0.0, *(2.0**-k for k in range(8, -1, -1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """Samples that aren't parted, and the tokens that they are as one."""

    samples: tuple[int, ...]
    cost: int


def plan(
    inputs: Sequence[Tokens],
    *,
    token_budget: int,
    ranks: int = 1,
    layout: Layout = "padded",
    together: int = 1,
) -> Plan:
    """[rank][micro-batch] -> sample indices; each sample once, equally many micro-batches on every rank.

    `inputs` are the tokens to forward, as `packing.read` gives them. Ranks are balanced by tokens, longest
    first. A micro-batch holds at most `token_budget` tokens (padding included, shared ones once) unless it is
    a single longer unit; without padding there are as few as fit, all about equally full. An empty one is a
    dummy: its forward and backward run, so that collectives match, and it contributes exactly 0. `together`
    samples in a row are never parted; ValueError if they don't divide the samples.
    """
    if token_budget < 1 or ranks < 1:
        raise ValueError(f"token_budget {token_budget} and ranks {ranks} must be >= 1")
    if len(inputs) % together:
        raise ValueError(f"{len(inputs)} samples don't divide into terms of {together}")
    shares = _shares(inputs, token_budget, ranks, layout, together)
    group = _runs if layout == "padded" else _best_fit
    per_rank = [group(share, token_budget) for share in shares]
    most = max(len(micros) for micros in per_rank)
    if layout != "padded":
        per_rank = [_evened(share, token_budget, most) for share in shares]
    return tuple(tuple(micros) + ((),) * (most - len(micros)) for micros in per_rank)


def cut_into_runs(lengths: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """[begin, end) of runs of `lengths`, which fall, so that padded length plus `RUN_COST` is least.

    A run holds at most `budget`, padding included, unless it is a single longer one.
    """
    length_n = np.asarray(lengths, dtype=np.int64)
    best = np.zeros(len(length_n) + 1, dtype=np.int64)  # cost of the first n
    start = np.zeros(len(length_n) + 1, dtype=np.int64)  # where the run that ends at n begins
    for end in range(1, len(length_n) + 1):
        low = max(0, min(end - 1, end - budget // int(length_n[end - 1])))
        begin = np.arange(low, end)
        padded = (end - begin) * length_n[low:end]
        cost = best[low:end] + padded + RUN_COST
        cost[(padded > budget) & (begin < end - 1)] = np.iinfo(np.int64).max
        choice = int(cost.argmin())
        best[end], start[end] = cost[choice], low + choice
    runs: list[tuple[int, int]] = []
    end = len(length_n)
    while end > 0:
        runs.append((int(start[end]), end))
        end = int(start[end])
    return runs[::-1]


def in_prefix_order(inputs: Sequence[Tokens], chosen: Sequence[int]) -> tuple[list[int], list[int]]:
    """`chosen` sorted by their tokens, and how many tokens each begins with as the one before it does."""
    order = sorted(
        chosen, key=lambda i: (inputs[i].astype(">i4").tobytes(), i)
    )  # big-endian sorts as numbers
    shared = [0] * len(order)
    for k in range(1, len(order)):
        one, two = inputs[order[k - 1]], inputs[order[k]]
        n = min(len(one), len(two))
        differ = np.flatnonzero(one[:n] != two[:n])
        shared[k] = int(differ[0]) if len(differ) else n
    return order, shared


def _shares(
    inputs: Sequence[Tokens], budget: int, ranks: int, layout: Layout, together: int
) -> list[list[_Unit]]:
    """The units of each rank, largest first."""
    if layout == "shared_prefix" and together == 1:
        # Smaller units balance the ranks better and share less: the least load of the fullest rank decides.
        pieces = (1, 2, 4, 8) if ranks > 1 else (1,)
        found = [_balanced(_alike(inputs, budget, ranks * k), ranks) for k in pieces]
        return min(found, key=lambda shares: max(sum(u.cost for u in share) for share in shares))
    terms = [tuple(range(i, i + together)) for i in range(0, len(inputs), together)]
    if layout == "shared_prefix":
        costs = [_cost(inputs, term) for term in terms]
    elif layout == "padded":
        costs = [together * max(len(inputs[i]) for i in term) for term in terms]
    else:
        costs = [sum(len(inputs[i]) for i in term) for term in terms]
    return _balanced([_Unit(samples=t, cost=c) for t, c in zip(terms, costs, strict=True)], ranks)


def _cost(inputs: Sequence[Tokens], chosen: Sequence[int]) -> int:
    order, shared = in_prefix_order(inputs, chosen)
    return _price(sum(len(inputs[i]) for i in order), sum(shared))


def _price(read: int, shared: int) -> int:
    """Tokens that count for `read` ones of which `shared` aren't forwarded again."""
    return max(read - shared, -(-read // MOST_REPEATED))


def _alike(inputs: Sequence[Tokens], budget: int, pieces: int) -> list[_Unit]:
    """Runs of samples that share what they begin with, small enough for the budget and for so many pieces."""
    order, shared = in_prefix_order(inputs, range(len(inputs)))
    most = min(budget, max(1, -(-_price(sum(map(len, inputs)), sum(shared)) // pieces)))
    units: list[_Unit] = []
    run: list[int] = []
    read = repeated = 0
    for i, alike in zip(order, shared, strict=True):
        length = len(inputs[i])
        if run and not (alike and _price(read + length, repeated + alike) <= most):
            units.append(_Unit(samples=tuple(sorted(run)), cost=_price(read, repeated)))
            run, read, repeated = [], 0, 0
        read, repeated = read + length, repeated + (alike if run else 0)
        run.append(i)
    units.append(_Unit(samples=tuple(sorted(run)), cost=_price(read, repeated)))
    return sorted(units, key=lambda u: u.samples)


def _balanced(units: Sequence[_Unit], ranks: int) -> list[list[_Unit]]:
    """Units per rank, largest first, each to the rank that has the fewest tokens so far."""
    shares: list[list[_Unit]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for unit in sorted(units, key=lambda u: -u.cost):
        load, rank = heapq.heappop(loads)
        shares[rank].append(unit)
        heapq.heappush(loads, (load + unit.cost, rank))
    return shares


def _runs(share: list[_Unit], budget: int) -> list[tuple[int, ...]]:
    """Neighbours in length share a micro-batch: `share` comes longest first, all of equally many samples."""
    return [
        tuple(i for unit in share[begin:end] for i in unit.samples)
        for begin, end in cut_into_runs([unit.cost for unit in share], budget)
    ]


def _best_fit(share: Sequence[_Unit], budget: int) -> list[tuple[int, ...]]:
    """Best-fit decreasing: each unit, largest first, goes where the least room is left that takes it."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # what is left of a bin, and the bin; sorted
    for unit in share:
        at = bisect_left(rooms, (unit.cost, 0))
        room, into = rooms.pop(at) if at < len(rooms) else (budget, len(bins))
        if into == len(bins):
            bins.append([])
        bins[into].extend(unit.samples)
        insort(rooms, (room - unit.cost, into))
    return [tuple(b) for b in bins]


def _evened(share: Sequence[_Unit], budget: int, number: int) -> list[tuple[int, ...]]:
    """Best fit into at most `number` micro-batches, under the lowest limit on their tokens that does.

    So the last one isn't nearly empty: the largest decides how much memory a step needs, and how long ranks
    wait for each other. `number` must be enough under `budget`.
    """
    fitting = [u.cost for u in share if u.cost <= budget]
    alone = len(share) - len(fitting)
    low = max(max(fitting, default=budget), -(-sum(fitting) // max(1, number - alone)))
    for part in _LIMITS:
        found = _best_fit(share, low + int(part * (budget - low)))
        if len(found) <= number:
            return found
    raise AssertionError(f"best fit under {budget} tokens needs more than {number} micro-batches")
