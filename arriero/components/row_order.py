"""The order in which rows come: a pure function of the seed, the epoch and how the data is cut into blocks.

One block: a permutation of its rows. Several: the blocks in a permuted order, `window` of them at a time, and
the rows of each such window in a permuted order of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from arriero.components.blocks import Blocks
from arriero.components.formats import Row


def permutation(seed: int, epoch: int, size: int, *key: int) -> npt.NDArray[np.int64]:
    """Order [size] of the rows in `epoch`, a pure function of its arguments.

    Sorted raw draws: numpy keeps the stream of a bit generator for ever, but not that of its distributions
    (NEP 19), so `Generator.permutation` could reorder a recorded run under a newer numpy.
    """
    draws = np.random.Philox(np.random.SeedSequence([seed, epoch, *key])).random_raw(size)
    return np.argsort(draws, kind="stable")


def windows_of(
    sizes: Mapping[int, int], *, seed: int, epoch: int, window: int, shuffle: bool
) -> Iterator[tuple[list[int], list[int]]]:
    """Blocks that are read together, and the order of their rows, counted over these blocks.

    `sizes` are rows by block.
    """
    blocks, several = list(sizes), len(sizes) > 1
    if several and shuffle:
        blocks = [blocks[k] for k in map(int, permutation(seed, epoch, len(blocks), 0))]
    for number, first in enumerate(range(0, len(blocks), window), start=1):
        together = blocks[first : first + window]
        count = sum(sizes[b] for b in together)
        key = (number,) if several else ()
        order = permutation(seed, epoch, count, *key) if shuffle else range(count)
        yield together, [int(k) for k in order]


async def in_order(
    blocks: Blocks, *, stop: int, seed: int, epoch: int, window: int, shuffle: bool
) -> AsyncGenerator[tuple[int, Row], None]:
    """Rows 0 to `stop` of one epoch with their numbers. The next window is read while this one is used."""
    starts = list(accumulate(blocks.sizes, initial=0))
    sizes = {b: n for b, s in enumerate(blocks.sizes) if (n := min(s, stop - starts[b])) > 0}
    plan = windows_of(sizes, seed=seed, epoch=epoch, window=window, shuffle=shuffle)
    if len(sizes) <= 1:
        for (block,), order in plan:
            rows = blocks.read(block)
            for k in order:
                yield starts[block] + k, rows[k]
        return

    def read(together: list[int], order: list[int]) -> list[tuple[int, Row]]:
        found = [(starts[b] + k, row) for b in together for k, row in enumerate(blocks.read(b)[: sizes[b]])]
        return [found[k] for k in order]

    def reading() -> asyncio.Task[list[tuple[int, Row]]] | None:
        window = next(plan, None)
        return window and asyncio.create_task(asyncio.to_thread(read, *window))

    ahead = reading()
    try:
        while ahead is not None:
            items = await ahead
            ahead = reading()
            for item in items:
                yield item
    finally:
        if ahead is not None:
            ahead.cancel()
