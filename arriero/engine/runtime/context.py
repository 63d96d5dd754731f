"""What a component may know about its place while it runs: `current()`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from arriero.schemas.checkpoints import Frontier
from arriero.schemas.ledger import Step


@dataclass(frozen=True, kw_only=True)
class Context:
    """The place of one replica (and rank) of one node in a run.

    `staleness` is the largest bound of the graph's loops, `loop` the one this node closes or follows.
    """

    run_id: str
    run_dir: Path
    node: str
    replica: int
    rank: int
    ranks: int
    seed: int
    deterministic: bool
    staleness: int
    loop: str
    replicas: int = 1
    parts: tuple[int, ...] = ()
    """Of who closes a loop of weights: over how many ranks its followers split them, each number once."""
    evaluates_every: int = 0
    """Versions between evaluations during training; 0: there are none. These versions are kept."""
    wait_bound_s: float = 1800.0
    """Longest wait for a record, a place or a version."""
    secret: bytes = field(default=b"", repr=False)
    """Of the run; both ends of a connection of the weight plane prove that they know it."""
    count: Callable[[str, int], None] = lambda name, number: None
    """Add to a named counter of this node, shown in its status and in the summary."""
    measured: Callable[[str], float | None] = lambda record: None
    """Of a source: the share of right rollouts of a record of its own, once versions show it."""
    made: tuple[Step, ...] = ()
    """Of what learns: the steps that it had made when it started, if this isn't its first life."""
    announced: int = -1
    """Of a loop's producer: the newest version that its loop carries already."""
    record_url: str = ""
    """Where the lineage of the run is; empty without a record."""
    frontier: Callable[[], Frontier] = Frontier
    """Of a loop's producer: what the ledger says by now."""
    next_version: Callable[[], Awaitable[int]] | None = None
    """Of a node that fires once per version, before who makes it: the version that its next output will
    replace, as soon as all that it gave before has been trained or dropped."""

    @property
    def weights_url(self) -> str:
        """Where the weight plane carries the versions of the node's loop."""
        return weights_url(self.run_id, self.loop)


def weights_url(run_id: str, loop: str) -> str:
    """The weight plane of one loop of one run."""
    return f"shm://arriero-{run_id}-{loop}"


_CURRENT: ContextVar[Context] = ContextVar("arriero_context")


def current() -> Context:
    """The context of the component that is running. Raises LookupError outside `run`."""
    try:
        return _CURRENT.get()
    except LookupError:
        raise LookupError("there is a context only while a component runs") from None


def enter(context: Context) -> None:
    """Make `context` current in this task and in those it starts."""
    _CURRENT.set(context)


@contextmanager
def entered(context: Context) -> Generator[None, None, None]:
    """`context` is current inside."""
    token = _CURRENT.set(context)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def admission_order() -> int | None:
    """The staleness bound, if batches have to be in admission order (`--deterministic`); else None."""
    context = _CURRENT.get(None)
    return context.staleness if context is not None and context.deterministic else None


def run_dir() -> Path | None:
    """The directory of the run; None outside one."""
    context = _CURRENT.get(None)
    return context.run_dir if context is not None else None


def measured(record: str) -> float | None:
    """What `Context.measured` says; None outside a run."""
    context = _CURRENT.get(None)
    return context.measured(record) if context is not None else None


def count(name: str, number: int = 1) -> None:
    """Add to a named counter of the node that is running; outside a run nobody counts."""
    if number and (context := _CURRENT.get(None)) is not None:
        context.count(name, number)
