"""`RowSource`: what sources of files have in common: where, how often, in which order."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from itertools import count as numbers
from typing import Any, TypeVar

from pydantic import ConfigDict, NonNegativeInt, PositiveInt, model_validator
from pydantic.dataclasses import dataclass

from arriero.components.blocks import Blocks, Whole
from arriero.components.datasets import open_blocks, path_problem
from arriero.components.formats import Row
from arriero.components.gym_rows import GYM
from arriero.components.row_order import in_order
from arriero.engine.errors import UserError
from arriero.engine.graph import GraphView
from arriero.engine.runtime.context import count

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class RowSource:
    """Rows of `path`, a file at any fsspec URL or several by a pattern, epoch after epoch.

    Every row comes once per epoch, in an order that depends on `seed`, the epoch and the blocks of the file
    alone (`row_order`).
    """

    path: str
    epochs: PositiveInt | None = None  # None: for ever
    shuffle: bool = True
    seed: NonNegativeInt = 0
    limit: PositiveInt | None = None  # rows used, from the first
    stream: NonNegativeInt = 0  # blocks of the file in memory at once; 0: all of it

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    def problems(self, view: GraphView) -> Iterable[str]:
        """A reasoning-gym set, which has no such rows; a missing local file."""
        if self.path.startswith(GYM):
            yield f"{self.path} has questions only; give a file"
        elif problem := path_problem(self.path):
            yield problem

    async def rows(
        self, read: Callable[[Row], T | None], blocks: Blocks | None = None
    ) -> AsyncGenerator[tuple[int, int, T], None]:
        """Epoch, number and what `read` makes of each row of the file, or of `blocks`.

        It raises UserError for a faulty row: in memory all are read before the first is given. A row of which
        it makes None is left out and counted.
        """
        blocks = blocks or open_blocks(self.path, in_memory=not self.stream)
        stop = min(sum(blocks.sizes), self.limit or sum(blocks.sizes))
        made = [read(row) for row in blocks.read(0)[:stop]] if isinstance(blocks, Whole) else []
        for epoch in numbers() if self.epochs is None else range(self.epochs):
            rows = in_order(
                blocks, stop=stop, seed=self.seed, epoch=epoch, window=self.stream or 1, shuffle=self.shuffle
            )
            given = False
            async for number, row in rows:
                if (one := made[number] if made else read(row)) is not None:
                    given = True
                    yield epoch, number, one
                else:
                    count("rows_left_out")
            if not given:
                raise UserError(f"{self.path}: none of {stop} rows is of use to {type(self).__name__}")
