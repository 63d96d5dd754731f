"""What the terminal shows while a run goes on: a live table on a terminal, a line per step elsewhere."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Protocol

from arriero.launchers.vitals import Vitals
from arriero.schemas.graph import GraphSpec
from arriero.schemas.ledger import Trained

_LINE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class View:
    """The run at one moment. `newest` is the last version, `tokens_per_s` by role."""

    step: int
    newest: Trained | None
    elapsed_s: float
    tokens_per_s: dict[str, float]
    vitals: Vitals


class Display(Protocol):
    """`step` is called for every version, `update` about twice a second."""

    def step(self, view: View) -> None: ...
    def update(self, view: View) -> None: ...
    def close(self) -> None: ...


class Quiet:
    """Shows nothing."""

    def step(self, view: View) -> None: ...
    def update(self, view: View) -> None: ...
    def close(self) -> None: ...


class Lines:
    """One plain line per version, at most one a second; what everybody waits for when there is no step."""

    def __init__(self, spec: GraphSpec, steps: int | None) -> None:
        self._spec, self._steps = spec, steps
        self._shown = -_LINE_S
        self._held: View | None = None

    def step(self, view: View) -> None:
        if time.monotonic() - self._shown < _LINE_S and view.step != self._steps:
            self._held = view
            return
        self._print(view, step_text(view, self._steps))

    def update(self, view: View) -> None:
        silent_s = time.monotonic() - self._shown
        if self._held is not None and silent_s >= _LINE_S:
            self._print(self._held, step_text(self._held, self._steps))
        elif view.step == 0 and view.vitals.pulses and silent_s >= 5 * _LINE_S:
            self._print(view, "; ".join(f"{n.name} {doing(view.vitals, n.name)}" for n in self._spec.nodes))

    def _print(self, view: View, text: str) -> None:
        self._shown, self._held = time.monotonic(), None
        print(f"[{view.elapsed_s:6.1f} s] {text}", flush=True)

    def close(self) -> None: ...


class Live:
    """A table that is redrawn in place: one row per node."""

    def __init__(self, spec: GraphSpec, steps: int | None) -> None:
        from rich.live import Live as RichLive

        self._spec, self._steps = spec, steps
        self._live = RichLive(refresh_per_second=4, transient=True)
        self._live.start()

    def step(self, view: View) -> None:
        self.update(view)

    def update(self, view: View) -> None:
        from rich.table import Table

        table = Table(title=f"{view.elapsed_s:.0f} s  {step_text(view, self._steps)}", title_justify="left")
        for column in ("node", "does", "taken", "given", "tokens/s", "queue"):
            table.add_column(column, justify="left" if column in ("node", "does") else "right")
        for n in self._spec.nodes:
            known = [s for _, s, _ in view.vitals.nodes(n.name)]
            depth = view.vitals.depths.get(n.name)
            table.add_row(
                n.name,
                doing(view.vitals, n.name),
                str(sum(s.taken for s in known)),
                str(sum(s.given for s in known)),
                f"{view.tokens_per_s[n.role]:.0f}" if n.role in view.tokens_per_s else "",
                str(depth.messages) if depth else "",
            )
        self._live.update(table)

    def close(self) -> None:
        self._live.stop()


def display_for(spec: GraphSpec, steps: int | None, *, quiet: bool) -> Display:
    """The display that fits where standard output goes. `steps`: how many there will be, if known."""
    if quiet:
        return Quiet()
    return Live(spec, steps) if sys.stdout.isatty() else Lines(spec, steps)


def step_text(view: View, steps: int | None) -> str:
    """`step 3/10  reward 0.500  loss 0.3333  staleness 1  trainer 120 tokens/s  queues generator 4`."""
    newest = view.newest
    parts = [f"step {view.step}" + (f"/{steps}" if steps is not None else "")]
    if newest is not None:
        loss = newest.metrics.get("loss")
        parts += [f"reward {newest.reward_mean:.3f}", *([f"loss {loss:.4g}"] if loss is not None else [])]
        parts.append(f"staleness {newest.staleness_max}")
    if view.tokens_per_s:
        parts.append(
            "tokens/s " + ", ".join(f"{role} {rate:.0f}" for role, rate in view.tokens_per_s.items())
        )
    if queued := {k: v for k, v in view.vitals.queues().items() if v}:
        parts.append("queues " + ", ".join(f"{k} {v}" for k, v in queued.items()))
    return "  ".join(parts)


def doing(vitals: Vitals, node: str) -> str:
    """What the replicas of a node do, longest wait first: `waits 3 s for a record of prompts (1 of 2)`."""
    known = [s for _, s, _ in vitals.nodes(node)]
    waiting = sorted((s for s in known if s.waits_for and not s.ended), key=lambda s: -s.waits_s)
    if not known:
        return "starts"
    if all(s.ended for s in known):
        return "has ended"
    if not waiting:
        return "works"
    share = f" ({len(waiting)} of {len(known)})" if len(known) > 1 else ""
    return f"waits {waiting[0].waits_s:.0f} s for {waiting[0].waits_for}{share}"
