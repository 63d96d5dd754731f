"""A graph as data: what the launcher ships, the run record keeps and `arriero check` shows."""

from __future__ import annotations

import hashlib
import json
from typing import Literal

from pydantic import Field, JsonValue, NonNegativeInt, PositiveInt

from arriero.schemas.messages import Message


class Capacity(Message):
    """How much an edge holds before its producer waits: un-acknowledged records and their bytes."""

    messages: PositiveInt
    bytes: PositiveInt = 256 << 20


class InputSpec(Message):
    """One input port: the node whose output it reads, or the loop whose newest version it follows."""

    port: str
    source: str
    record: str
    loop: bool = False
    consumes: PositiveInt = 1


class Resources(Message):
    """What one replica (or rank) of a role needs. `memory_mb` 0: not stated."""

    cpus: NonNegativeInt = 1
    gpus: NonNegativeInt = 0
    memory_mb: NonNegativeInt = 0


class NodeSpec(Message):
    """A component in its place. `component` is `module:Class`, `config` its fields as JSON.

    `puts_back`: records at most on an edge of its own, where its replicas put what any of them may go on
    with; 0: it has none.
    """

    name: str
    component: str
    config: dict[str, JsonValue]
    inputs: tuple[InputSpec, ...] = ()
    output: str
    produces: PositiveInt = 1
    replicas: PositiveInt = 1
    ranks: PositiveInt = 1
    role: str
    resources: Resources = Resources()
    capacity: Capacity | None = None
    puts_back: NonNegativeInt = 0


class LoopSpec(Message):
    """A feedback edge: `producer` closes it; a token read through it is at most `staleness` versions old."""

    name: str
    record: str
    producer: str
    staleness: NonNegativeInt


class GraphSpec(Message):
    """The whole graph; `digest` names it by content."""

    format: Literal[1] = 1
    name: str
    nodes: tuple[NodeSpec, ...] = Field(min_length=1)
    loops: tuple[LoopSpec, ...] = ()

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON (sorted keys, no spaces)."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()

    def canonical(self) -> str:
        """JSON that is the same for equal graphs, in every process."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    def node(self, name: str) -> NodeSpec:
        """The node called `name`; StopIteration if there is none."""
        return next(n for n in self.nodes if n.name == name)

    def above(self, name: str) -> frozenset[str]:
        """All nodes that a node gets something from, directly or not, but for loops."""
        found: set[str] = set()
        left = [name]
        while left:
            for i in self.node(left.pop()).inputs:
                if not i.loop and i.source not in found:
                    found.add(i.source)
                    left.append(i.source)
        return frozenset(found)

    def consumers(self, name: str) -> tuple[tuple[NodeSpec, InputSpec], ...]:
        """The ports that read the output of node `name` over an edge (not through a loop), in graph order."""
        return tuple((n, i) for n in self.nodes for i in n.inputs if i.source == name and not i.loop)

    @property
    def roles(self) -> dict[str, tuple[NodeSpec, ...]]:
        """Nodes by role, in graph order: the processes that a launch starts."""
        names = dict.fromkeys(n.role for n in self.nodes)
        return {role: tuple(n for n in self.nodes if n.role == role) for role in names}
