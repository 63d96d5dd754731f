"""What a simulation is told beside the graph: times, and what goes wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from arriero.engine.planner.times import Duration

TIMELINE = 4000  # intervals that are kept


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A replica dies and loses its work; its records come again after `detect_s`, it after `repair_s`."""

    node: str
    replica: int
    at_s: float
    detect_s: float = 0.0
    repair_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Change:
    """From `at_s` on the node has `replicas` replicas; those that go finish what they do."""

    node: str
    at_s: float
    replicas: int


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A replica that takes `factor` times as long as the others."""

    node: str
    replica: int
    factor: float


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is simulated beside the graph: seconds of a firing per node (0 if not named), and what goes wrong.

    `sync_s` passes between a version's making and its use; `want`: records leased ahead, where a component
    asks for more than a firing.
    """

    times: Mapping[str, Duration]
    steps: int
    sync_s: float = 0.0
    seed: int = 0
    want: Mapping[str, int] = field(default_factory=dict[str, int])
    stragglers: tuple[Straggler, ...] = ()
    failures: tuple[Failure, ...] = ()
    changes: tuple[Change, ...] = ()
