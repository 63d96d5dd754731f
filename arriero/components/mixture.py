"""Supervised data from several files, in fixed shares: the mixture of a pretraining run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Annotated

from pydantic import ConfigDict, Field, PositiveFloat
from pydantic.dataclasses import dataclass

from arriero.components.supervised import ExampleSource
from arriero.engine.graph import GraphView
from arriero.schemas.messages import Example


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Part(ExampleSource):
    """One file of a mixture; `weight` is its share of the examples, relative to the others'."""

    weight: PositiveFloat = 1.0


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class ExampleMixture:
    """Examples of all `parts`, each as often as its weight says, in an order without chance.

    The next example comes from the part that is furthest behind its share. A part that ends (`epochs`) leaves
    its share to the others.
    """

    parts: Annotated[tuple[Part, ...], Field(min_length=1)]

    async def run(self) -> AsyncIterator[Example]:
        streams = [part.run() for part in self.parts]
        given = [0] * len(streams)
        live = list(range(len(streams)))
        while live:
            number = min(live, key=lambda k: ((given[k] + 0.5) / self.parts[k].weight, k))
            example = await anext(streams[number], None)
            if example is None:
                live.remove(number)
                continue
            given[number] += 1
            yield example.model_copy(update={"id": f"s{number}-{example.id}"})

    def problems(self, view: GraphView) -> Iterable[str]:
        for part in self.parts:
            yield from part.problems(view)
