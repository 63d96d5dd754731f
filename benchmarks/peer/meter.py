"""Processor seconds and memory of a tree of processes, sampled from outside while it runs.

What a step costs is read off between two moments, so that imports and loading don't count, and nobody has to
measure themselves. Threads: the main thread of a role runs its event loop, the others compute.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress

import numpy as np
import psutil

_EVERY_S, _MEMORY_EVERY_S, _YOUNG_S = 0.1, 0.5, 5.0


class Meter:
    """Samples the tree below process `pid` until `stop`."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._known: dict[int, tuple[str, psutil.Process]] = {}
        self._at: list[float] = []
        self._spent: dict[int, list[tuple[float, float, float]]] = defaultdict(list)  # pid -> time, all, main
        self.peak_bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def spent(self, begin: float, end: float) -> dict[str, tuple[float, float]]:
        """By process name: processor seconds between two `time.time`s, and those of the main thread."""
        found: dict[str, tuple[float, float]] = {}
        for pid, samples in self._spent.items():
            at = [t for t, _, _ in samples]
            lines = [a for _, a, _ in samples], [m for _, _, m in samples]
            both = [float(np.interp(end, at, line) - np.interp(begin, at, line)) for line in lines]
            name = self._known[pid][0]
            before = found.get(name, (0.0, 0.0))
            found[name] = before[0] + both[0], before[1] + both[1]
        return found

    def _watch(self) -> None:
        memory_due = 0.0
        while not self._over.wait(_EVERY_S):
            with suppress(psutil.Error):
                for process in (self._root, *self._root.children(recursive=True)):
                    # Again for a while: a child is called like its parent until it begins its own program.
                    if time.time() - process.create_time() < _YOUNG_S or process.pid not in self._known:
                        self._known[process.pid] = (_name(process), process)
            now = time.time()
            for pid, (_, process) in self._known.items():
                with suppress(psutil.Error):
                    times = process.cpu_times()
                    main = next((t for t in process.threads() if t.id == pid), None)
                    of_main = main.user_time + main.system_time if main else 0.0
                    self._spent[pid].append((now, times.user + times.system, of_main))
            if now >= memory_due:
                memory_due = now + _MEMORY_EVERY_S
                self.peak_bytes = max(self.peak_bytes, sum(_bytes(p) for _, p in self._known.values()))


def _bytes(process: psutil.Process) -> int:
    """Proportional: pages that several processes share count once."""
    with suppress(psutil.Error):
        return int(process.memory_full_info().pss)
    return 0


def _name(process: psutil.Process) -> str:
    """`generator`, `hub`, `nats-server`, ... of arriero's processes; the module else."""
    words = process.cmdline()
    if "--role" in words:
        return words[words.index("--role") + 1]
    if words and words[0].endswith("nats-server"):
        return "nats-server"
    if "-m" in words:
        return words[words.index("-m") + 1].rpartition(".")[2]
    return process.name()


def per_step(spent: Mapping[str, tuple[float, float]], steps: int) -> dict[str, tuple[float, float]]:
    """The same for one of `steps` steps, without processes that did nothing."""
    return {n: (a / steps, m / steps) for n, (a, m) in spent.items() if a / steps > 1e-4}
