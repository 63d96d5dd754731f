"""A component's place in a run, for components that are driven without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from arriero.engine.runtime.context import Context


def place(
    *,
    run_dir: Path = Path(),
    count: Callable[[str, int], None] = lambda name, number: None,
    measured: Callable[[str], float | None] = lambda record: None,
) -> Context:
    """The only replica of a node."""
    return Context(
        run_id="test", run_dir=run_dir, node="node", replica=0, rank=0, ranks=1, seed=0, deterministic=False,
        staleness=0, loop="", count=count, measured=measured,
    )  # fmt: skip
