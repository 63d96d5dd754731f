"""`arriero top`: a run as it goes on, on a terminal; from its directory, or from afar over its broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from arriero.engine.errors import UserError
from arriero.launchers.look import Look, Now, last_lines
from arriero.launchers.rundir import RunDir
from arriero.launchers.seen import POINTS, ROLLOUTS, RolloutSeen, Seen, curves, rollouts
from arriero.launchers.watcher import read_pass, watching
from arriero.schemas.messages import ScoredGroup

if TYPE_CHECKING:
    from rich.console import RenderableType

USAGE = """\
usage: arriero top RUN [--once]                         edges, roles, waits, curves and rollouts, live
       arriero top [URL] --credentials FILE [--once]    the same over the broker, without the directory

FILE is a copy of the run's watcher.json; URL (nats://HOST:PORT) is where its broker is reached, if not as
FILE says: at the end of a tunnel, say."""

_EVERY_S, _ROLLOUTS_EVERY_S = 1.0, 10.0
_SILENT_S = 20.0  # a launcher speaks once a second
_MOST_RECORD = 32 << 20  # bytes of a chain that is read again and again
_BARS = "▁▂▃▄▅▆▇█"


def top(args: Sequence[str], show: Callable[[str], int]) -> int:
    """Until the run is over or Ctrl-C. Raises UserError."""
    if not args or {"--help", "-h"} & {*args}:
        return show(USAGE)
    once = "--once" in args
    words = [a for a in args if a != "--once"]
    if "--credentials" in words:
        at = words.index("--credentials")
        file, words = words[at + 1 : at + 2], words[:at] + words[at + 2 :]
        if len(file) == 1 and len(words) <= 1 and not any(w.startswith("-") for w in words):
            return asyncio.run(_from_afar(Path(file[0]), "".join(words), once=once))
    elif len(words) == 1 and not words[0].startswith("-"):
        if "://" in words[0]:
            raise UserError(f"{words[0]} is looked at with --credentials FILE, a copy of its watcher.json")
        return _from_files(RunDir(Path(words[0]).absolute()), once=once)
    raise UserError(f"{' '.join(args)} isn't understood\n{USAGE}")


def _from_files(run: RunDir, *, once: bool) -> int:
    from rich.console import Console
    from rich.live import Live

    screen = Screen(run)
    if once or screen.over():
        Console().print(screen.draw())
        return 0
    with Live(screen.draw(), auto_refresh=False) as live:
        while not screen.over():
            time.sleep(_EVERY_S)
            live.update(screen.draw(), refresh=True)
    return 0


async def _from_afar(file: Path, url: str, *, once: bool) -> int:
    from contextlib import nullcontext

    from rich.console import Console
    from rich.live import Live

    given = read_pass(file)
    async with watching(given, url) as (watcher, listening):
        with nullcontext() if once else Live(drawn(None, given.run), auto_refresh=False) as live:
            while True:
                await asyncio.wait({listening}, timeout=_EVERY_S)
                if listening.done() and isinstance(error := listening.exception(), ValidationError):
                    raise UserError(f"run {given.run} is conducted by another version of arriero") from error
                seen = watcher.seen()
                over = seen is not None and seen.now is not None and seen.now.state != "goes on"
                if live is not None:
                    live.update(drawn(seen, given.run), refresh=True)
                elif seen is not None:
                    Console().print(drawn(seen, given.run))
                if over or (once and seen is not None):
                    return 0
                if watcher.silent_s > _SILENT_S:
                    raise UserError(
                        f"nothing has been heard of run {given.run} for {_SILENT_S:.0f} s: it is over, what "
                        "conducts it stands still, or the network is cut"
                    )


class Screen:
    """The run in a directory, drawn again and again."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._look = Look(run)
        self._rollouts: tuple[RolloutSeen, ...] = ()
        self._asked = 0.0

    def over(self) -> bool:
        return self._look.over()

    def draw(self) -> RenderableType:
        """The run now. Before any heartbeat it says so."""
        lines = last_lines(self._run.metrics)
        now = self._look.now(lines)
        seen = Seen(now=now, curves=curves(lines), rollouts=self._last_rollouts() if now else ())
        return drawn(seen, str(self._run.path))

    def _last_rollouts(self) -> tuple[RolloutSeen, ...]:
        """From the record, now and then, as long as it is short; none without one."""
        if time.monotonic() - self._asked > _ROLLOUTS_EVERY_S or not self._asked:
            self._asked = time.monotonic()
            self._rollouts = _newest_rollouts(self._run)
        return self._rollouts


def drawn(seen: Seen | None, where: str) -> RenderableType:
    """What was seen of the run `where`, as text, tables and sparklines."""
    from rich.console import Group
    from rich.text import Text

    if seen is None or seen.now is None:
        return Text(f"{where}: no replica has been heard of yet")
    parts: list[Any] = [Text(_printable(_head(seen.now)), style="bold"), _nodes(seen.now), _edges(seen.now)]
    parts += [Text(_printable(seen.now.hubs))] if seen.now.hubs else []
    parts += [
        Text(f"{_printable(key):<15} {sparkline(values):<{POINTS}} {values[-1]:.4g}")
        for key, values in seen.curves.items()
        if values
    ]
    if seen.rollouts:
        rows = _Rows("reward", "outcome", "tokens", "last rollouts")
        for r in seen.rollouts:
            rows.add(f"{r.reward:.3g}", r.outcome, str(r.tokens), r.text)
        parts.append(rows.table)
    return Group(*parts)


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
        name = f"{e.name} → {', '.join(e.to)}" if e.to else e.name
        rows.add(name, f"{e.messages} of {e.capacity}", str(e.waiting), str(e.leased), bar)
    return rows.table


def sparkline(values: Sequence[float], width: int = POINTS) -> str:
    """The last values as bars, from their lowest to their highest."""
    shown = values[-width:]
    if not shown:
        return ""
    low, span = min(shown), (max(shown) - min(shown)) or 1.0
    return "".join(_BARS[min(int((v - low) / span * len(_BARS)), len(_BARS) - 1)] for v in shown)


def _newest_rollouts(run: RunDir) -> tuple[RolloutSeen, ...]:
    from arriero.engine.lineage.chain import ChainError
    from arriero.engine.lineage.reader import Lineage

    chain = run.lineage / "chain"
    if not chain.is_dir() or sum(f.stat().st_size for f in chain.iterdir()) > _MOST_RECORD:
        return ()
    found: list[ScoredGroup] = []
    try:
        record = Lineage(str(run.path))
        names = [name for name in record.groups if name not in record.redacted]
        for name in names[-ROLLOUTS:]:
            group = record.group(name)
            if isinstance(group, ScoredGroup):
                found.append(group)
    except (ChainError, OSError):
        pass  # it is being written
    return rollouts(found)


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

        self.table.add_row(*(Text(_printable(cell)) for cell in cells))
