"""Small components with any rates, and graphs of them: prompts all the way, so that everything fits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from itertools import count

from pydantic import NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.engine.graph import Graph, Rates
from arriero.engine.stream import Stream
from arriero.schemas.messages import Prompt, Weights


@dataclass(frozen=True, kw_only=True)
class Source:
    """`limit` prompts (0: without end), `produces` per firing."""

    produces: PositiveInt = 1
    limit: NonNegativeInt = 0

    def rates(self) -> Rates:
        return Rates(produces=self.produces)

    async def run(self) -> AsyncIterator[Prompt]:
        for k in range(self.limit) if self.limit else count():
            yield Prompt(id=f"p{k}", text=str(k))


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Takes `consumes` prompts and gives `produces`."""

    consumes: PositiveInt = 1
    produces: PositiveInt = 1

    def rates(self) -> Rates:
        return Rates(consumes={"records": self.consumes}, produces=self.produces)

    async def run(self, records: Stream[Prompt]) -> AsyncIterator[Prompt]:
        held: list[Prompt] = []
        async for record in records:
            held.append(record)
            if len(held) == self.consumes:
                for _ in range(self.produces):
                    yield Prompt(parents=tuple(r.id for r in held), text=f"{len(held)} prompts")
                held = []


@dataclass(frozen=True, kw_only=True)
class Join:
    """Takes `left` and `right` prompts from its two ports and gives one."""

    left: PositiveInt = 1
    right: PositiveInt = 1

    def rates(self) -> Rates:
        return Rates(consumes={"first": self.left, "second": self.right})

    async def run(self, first: Stream[Prompt], second: Stream[Prompt]) -> AsyncIterator[Prompt]:
        while True:
            held = [await first.next() for _ in range(self.left)]
            held += [await second.next() for _ in range(self.right)]
            if None in held:
                return
            yield Prompt(parents=tuple(r.id for r in held if r is not None), text="joined")


@dataclass(frozen=True, kw_only=True)
class Follower:
    """Passes prompts on; follows versions."""

    async def run(self, prompts: Stream[Prompt], weights: Stream[Weights]) -> AsyncIterator[Prompt]:
        newest = await weights.next()
        async for prompt in prompts:
            while newest is not None and newest.version < prompt.min_version:
                newest = await weights.next()
            yield Prompt(parents=(prompt.id,), text=prompt.text)


@dataclass(frozen=True, kw_only=True)
class Versions:
    """One version per `consumes` prompts, `steps` of them."""

    consumes: PositiveInt = 1
    steps: PositiveInt = 3

    def rates(self) -> Rates:
        return Rates(consumes={"records": self.consumes})

    def limit(self) -> int | None:
        return self.steps

    async def run(self, records: Stream[Prompt]) -> AsyncIterator[Weights]:
        yield Weights(version=0)
        held: list[Prompt] = []
        version = 0
        async for record in records:
            held.append(record)
            if len(held) == self.consumes:
                version += 1
                yield Weights(version=version, parents=tuple(r.id for r in held))
                held = []
            if version == self.steps:
                return


def chain(*rates: tuple[int, int]) -> Graph:
    """`source -> s0 -> s1 -> ...`; each pair is what an edge's producer gives and its consumer takes."""
    g = Graph("chain")
    gives = [produced for produced, _ in rates]
    stream = g.add(Source(produces=gives[0]), name="source")()
    for k, (_, taken) in enumerate(rates):
        after = gives[k + 1] if k + 1 < len(gives) else 1
        stream = g.add(Stage(consumes=taken, produces=after), name=f"s{k}")(stream)
    return g


def looped(*stages: tuple[int, int], steps: int = 3, staleness: int = 1, closes: int = 1) -> Graph:
    """`source -> follower -> s0 -> ... -> versions -> (back to the follower)`; pairs are (takes, gives)."""
    g = Graph("looped")
    weights = g.loop(Weights, staleness=staleness)
    stream = g.add(Follower(), name="follower")(g.add(Source(), name="source")(), weights)
    for k, (taken, given) in enumerate(stages):
        stream = g.add(Stage(consumes=taken, produces=given), name=f"s{k}")(stream)
    weights.close(g.add(Versions(consumes=closes, steps=steps), name="versions")(stream))
    return g


def fork(*, batch: int, left: int = 1, right: int = 1, names: Sequence[str] = ("one", "many")) -> Graph:
    """A source read by a 1:1 branch and by one that takes `batch` prompts and gives as many; they rejoin."""
    g = Graph("fork")
    prompts = g.add(Source(), name="source")()
    one = g.add(Stage(), name=names[0])(prompts)
    many = g.add(Stage(consumes=batch, produces=batch), name=names[1])(prompts)
    g.add(Join(left=left, right=right), name="join")(one, many)
    return g
