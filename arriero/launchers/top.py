"""`arriero top RUN`: a run as it goes on, from what its launcher writes into the run directory.

Nothing is asked of the run itself: who can read the directory can look, and nothing more.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arriero.engine.errors import UserError
from arriero.launchers.progress import doing
from arriero.launchers.rundir import RunDir
from arriero.launchers.vitals import Vitals, rooms
from arriero.schemas.graph import GraphSpec
from arriero.schemas.run import VitalsFile

if TYPE_CHECKING:
    from rich.console import RenderableType

USAGE = """\
usage: arriero top RUN [--once]    edges, roles, waits, curves and rollouts of a run, live until it ends"""

_EVERY_S, _ROLLOUTS_EVERY_S = 1.0, 10.0
_MOST_RECORD = 32 << 20  # bytes of a chain that is read again and again
_BARS = "▁▂▃▄▅▆▇█"
_TAIL_BYTES = 1 << 20
CURVES = ("reward", "loss", "staleness_mean", "entropy", "grad_norm")


def top(args: Sequence[str], show: Callable[[str], int]) -> int:
    """Until the run is over or Ctrl-C. Raises UserError."""
    if not args or {"--help", "-h"} & {*args}:
        return show(USAGE)
    if unknown := [a for a in args[1:] if a != "--once"]:
        raise UserError(f"{' '.join(unknown)} isn't understood\n{USAGE}")
    from rich.console import Console
    from rich.live import Live

    look = Look(RunDir(Path(args[0]).absolute()))
    if "--once" in args or look.over():
        Console().print(look.screen())
        return 0
    with Live(look.screen(), auto_refresh=False) as live:
        while not look.over():
            time.sleep(_EVERY_S)
            live.update(look.screen(), refresh=True)
    return 0


class Look:
    """One who looks at a run again and again; rates are those since the look before."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._spec: GraphSpec = run.read_graph()
        self._before: VitalsFile | None = None
        self._rollouts: list[tuple[str, ...]] = []
        self._asked = 0.0

    def over(self) -> bool:
        return self._run.summary.exists()

    def screen(self) -> RenderableType:
        """The run now. Before any heartbeat it says so."""
        from rich.console import Group
        from rich.text import Text

        if not self._run.vitals.exists():
            return Text(f"{self._run.path}: no replica has been heard of yet")
        now = self._run.read_vitals()
        lines = _last_lines(self._run.metrics)
        parts: list[Any] = [Text(self._head(now, lines), style="bold"), self._nodes(now), self._edges(now)]
        parts += [Text(text) for text in _curves(lines)]
        if rollouts := self._last_rollouts():
            parts.append(rollouts)
        self._before = now
        return Group(*parts)

    def _head(self, now: VitalsFile, lines: Sequence[dict[str, Any]]) -> str:
        state = self._run.read_summary().state if self.over() else "goes on"
        since = time.time() - now.time
        warned = ", ".join(lines[-1].get("health") or {}) if lines else ""
        step = lines[-1]["step"] if lines else now.step
        told = f"{self._run.path.name}  {state}  step {step}  seen {since:.0f} s ago"
        return told + (f"  WARNED: {warned}" if warned else "")

    def _nodes(self, now: VitalsFile) -> RenderableType:
        vitals = Vitals.read(now, time.time())
        rows = _Rows("node", "does", "idle", "records/s", "tokens/s", "heartbeat")
        for node in self._spec.nodes:
            known = vitals.nodes(node.name)
            idle, rate, tokens = self._rates(node.name, now)
            age = max((age_s for *_, age_s in known), default=0.0)
            heard = f"{age:.0f} s ago" if known else ""
            rows.add(node.name, doing(vitals, node.name), idle, rate, tokens, heard)
        return rows.table

    def _rates(self, node: str, now: VitalsFile) -> tuple[str, str, str]:
        """Idle share, records and tokens per second since the look before; from the start at the first."""
        new, old = _sums(now, node), _sums(self._before, node) if self._before else (0.0, 0.0, 0, 0)
        busy_s, idle_s, given, tokens = (a - b for a, b in zip(new, old, strict=True))
        span = busy_s + idle_s
        replicas = self._spec.node(node).replicas
        if span <= 0:
            return ("", "", "")
        per_s = replicas / span
        return f"{idle_s / span:.0%}", f"{given * per_s:.1f}", f"{tokens * per_s:.0f}" if tokens else ""

    def _edges(self, now: VitalsFile) -> RenderableType:
        rows = _Rows("edge", "messages", "waiting", "leased", "fill")
        room = rooms(self._spec)
        for name, edge in now.edges.items():
            share = min(edge.messages / max(room.get(name, edge.capacity), 1), 1.0)
            bar = "█" * round(20 * share) + "·" * (20 - round(20 * share))
            waiting, leased = sum(edge.waiting.values()), sum(edge.leased.values())
            rows.add(name, f"{edge.messages} of {edge.capacity}", str(waiting), str(leased), bar)
        return rows.table

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


def sparkline(values: Sequence[float], width: int = 48) -> str:
    """The last values as bars, from their lowest to their highest."""
    shown = values[-width:]
    if not shown:
        return ""
    low, span = min(shown), (max(shown) - min(shown)) or 1.0
    return "".join(_BARS[min(int((v - low) / span * len(_BARS)), len(_BARS) - 1)] for v in shown)


def _curves(lines: Sequence[dict[str, Any]]) -> list[str]:
    found: list[str] = []
    for key in CURVES:
        values = [float(v) for line in lines if isinstance(v := line.get(key), int | float)]
        if values:
            found.append(f"{key:<15} {sparkline(values):<48} {values[-1]:.4g}")
    return found


def _sums(file: VitalsFile, node: str) -> tuple[float, float, int, int]:
    """Busy and idle seconds, records given and tokens of all replicas of a node."""
    found = [n for p in file.pulses.values() if not p.status.rank for n in p.status.nodes if n.node == node]
    return (
        sum(n.busy_s for n in found), sum(n.idle_s for n in found), sum(n.given for n in found),
        sum(n.tokens for n in found),
    )  # fmt: skip


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


def _last_lines(path: Path) -> list[dict[str, Any]]:
    """The last steps of metrics.jsonl; of a long file only its end is read."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL_BYTES))
        texts = file.read().split(b"\n")
    whole = texts[1:-1] if size > _TAIL_BYTES else texts[:-1]  # a torn first one, an unfinished last one
    return [json.loads(text) for text in whole if text]


class _Rows:
    """A table of plain text: what a model has written isn't markup."""

    def __init__(self, *columns: str) -> None:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        self.table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False)

    def add(self, *cells: str) -> None:
        from rich.text import Text

        self.table.add_row(*(Text(cell) for cell in cells))
