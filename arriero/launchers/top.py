"""`arriero top RUN`: a run as it goes on, on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arriero.engine.errors import UserError
from arriero.launchers.look import Lines, Look, Now, last_lines
from arriero.launchers.rundir import RunDir

if TYPE_CHECKING:
    from rich.console import RenderableType

USAGE = """\
usage: arriero top RUN [--once]    edges, roles, waits, curves and rollouts of a run, live until it ends"""

_EVERY_S, _ROLLOUTS_EVERY_S = 1.0, 10.0
_MOST_RECORD = 32 << 20  # bytes of a chain that is read again and again
_BARS = "▁▂▃▄▅▆▇█"
CURVES = ("reward", "loss", "staleness_mean", "entropy", "grad_norm")


def top(args: Sequence[str], show: Callable[[str], int]) -> int:
    """Until the run is over or Ctrl-C. Raises UserError."""
    if not args or {"--help", "-h"} & {*args}:
        return show(USAGE)
    if unknown := [a for a in args[1:] if a != "--once"]:
        raise UserError(f"{' '.join(unknown)} isn't understood\n{USAGE}")
    from rich.console import Console
    from rich.live import Live

    screen = Screen(RunDir(Path(args[0]).absolute()))
    if "--once" in args or screen.over():
        Console().print(screen.draw())
        return 0
    with Live(screen.draw(), auto_refresh=False) as live:
        while not screen.over():
            time.sleep(_EVERY_S)
            live.update(screen.draw(), refresh=True)
    return 0


class Screen:
    """The run on a terminal, drawn again and again."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._look = Look(run)
        self._rollouts: list[tuple[str, ...]] = []
        self._asked = 0.0

    def over(self) -> bool:
        return self._look.over()

    def draw(self) -> RenderableType:
        """The run now. Before any heartbeat it says so."""
        from rich.console import Group
        from rich.text import Text

        lines = last_lines(self._run.metrics)
        if (now := self._look.now(lines)) is None:
            return Text(f"{self._run.path}: no replica has been heard of yet")
        parts: list[Any] = [Text(_head(now), style="bold"), _nodes(now), _edges(now)]
        parts += [Text(text) for text in _curves(lines)]
        if rollouts := self._last_rollouts():
            parts.append(rollouts)
        return Group(*parts)

    def _last_rollouts(self) -> RenderableType | None:
        """From the record, now and then, as long as it is short; None without one."""
        if time.monotonic() - self._asked > _ROLLOUTS_EVERY_S or not self._asked:
            self._asked = time.monotonic()
            self._rollouts = _newest_rollouts(self._run)
        if not self._rollouts:
            return None
        rows = _Rows("reward", "outcome", "tokens", "last rollouts")
        for row in self._rollouts:
            rows.add(*row)
        return rows.table


def _head(now: Now) -> str:
    told = f"{now.run}  {now.state}  step {now.step}  seen {now.seen_s:.0f} s ago"
    return told + (f"  WARNED: {', '.join(now.warned)}" if now.warned else "")


def _nodes(now: Now) -> RenderableType:
    rows = _Rows("node", "does", "idle", "records/s", "tokens/s", "heartbeat")
    for n in now.nodes:
        numbers = ((n.idle, "{:.0%}"), (n.records_per_s, "{:.1f}"), (n.tokens_per_s, "{:.0f}"))
        told = ["" if value is None else form.format(value) for value, form in numbers]
        rows.add(n.name, n.does, *told, "" if n.heard_s is None else f"{n.heard_s:.0f} s ago")
    return rows.table


def _edges(now: Now) -> RenderableType:
    rows = _Rows("edge", "messages", "waiting", "leased", "fill")
    for e in now.edges:
        bar = "█" * round(20 * e.fill) + "·" * (20 - round(20 * e.fill))
        rows.add(e.name, f"{e.messages} of {e.capacity}", str(e.waiting), str(e.leased), bar)
    return rows.table


def sparkline(values: Sequence[float], width: int = 48) -> str:
    """The last values as bars, from their lowest to their highest."""
    shown = values[-width:]
    if not shown:
        return ""
    low, span = min(shown), (max(shown) - min(shown)) or 1.0
    return "".join(_BARS[min(int((v - low) / span * len(_BARS)), len(_BARS) - 1)] for v in shown)


def _curves(lines: Lines) -> list[str]:
    found: list[str] = []
    for key in CURVES:
        values = [float(v) for line in lines if isinstance(v := line.get(key), int | float)]
        if values:
            found.append(f"{key:<15} {sparkline(values):<48} {values[-1]:.4g}")
    return found


def _newest_rollouts(run: RunDir, count: int = 5) -> list[tuple[str, ...]]:
    from arriero.engine.lineage.chain import ChainError
    from arriero.engine.lineage.reader import Lineage
    from arriero.schemas.messages import ScoredGroup

    chain = run.lineage / "chain"
    if not chain.is_dir() or sum(f.stat().st_size for f in chain.iterdir()) > _MOST_RECORD:
        return []
    found: list[tuple[str, ...]] = []
    try:
        record = Lineage(str(run.path))
        names = [name for name in record.groups if name not in record.redacted]
        for name in names[-count:]:
            group = record.group(name)
            if isinstance(group, ScoredGroup):
                rollout, score = group.group.rollouts[0], group.scores[0]
                text = " ".join(f"{group.group.prompt.text} -> {rollout.text}".split())
                told = (f"{score.value:.3g}", str(score.outcome), str(int(rollout.mask.sum())))
                found.append((*told, _printable(text)[:100]))
    except (ChainError, OSError):
        pass  # it is being written
    return found


def _printable(text: str) -> str:
    """Without what would steer a terminal."""
    return "".join(c if c.isprintable() else "·" for c in text)


class _Rows:
    """A table of plain text: what a model has written isn't markup."""

    def __init__(self, *columns: str) -> None:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        self.table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False)

    def add(self, *cells: str) -> None:
        from rich.text import Text

        self.table.add_row(*(Text(cell) for cell in cells))
