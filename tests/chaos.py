"""Random faults in running processes, and the account that has to be right all the same.

    python -m tests.chaos [--faults 100] [--seed 0] [--per-run 12]

A toy graph (its components sleep, everything else is real: processes, NATS, the record) runs while one
process after the other is killed, stopped or cut off, at random times. After each run its ledger and record
are audited. `cut` breaks all connections of a process to the broker with `ss -K`, which needs root; elsewhere
it is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from arriero.engine.runtime.ledger import Ledger, effective
from arriero.launchers.audit import audited
from arriero.schemas.ledger import EVENT, Trained
from tests.test_launch import Launch

ROLES = ("prompts", "generator", "reward", "collect", "trainer", "hub", "broker")
_ELSE = {"hub": ("arriero.launchers.hub",), "broker": ("nats-server",)}  # found by other words than a role
GROUPS, STALENESS, LIVENESS_S = 4, 1, 3.0
_RECOVERED_STEPS = 3  # more than what was under way when the fault came
_START_S = 300.0  # for a run to begin: a dozen processes on a machine that may be busy with others
_END_S = 600.0  # for the steps that are left after the last fault
_LONGEST_S = 90.0  # for a run to go on after a fault: the liveness bound, and the start of everything


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What was done to whom, and how long it took until steps were made again."""

    role: str
    kind: str
    seconds: float


def kinds() -> list[str]:
    """What can be done here."""
    can_cut = os.geteuid() == 0 and shutil.which("ss") is not None
    return ["kill", "stop", *(["cut"] if can_cut else [])]


class Storm:
    """One run with faults; `setting` is that of the toy graph."""

    def __init__(self, folder: Path, draw: random.Random, *, steps: int, **setting: Any) -> None:
        self._draw, self._steps = draw, steps
        options = {
            "liveness_s": LIVENESS_S, "restarts": 1000, "max_deliveries": 100, "record": True, "lease_s": 5.0,
            "wait_bound_s": 60.0,
        }  # fmt: skip
        self.run = Launch(
            folder,
            graph={"generators": 3, "staleness": STALENESS, "groups": GROUPS},
            prompts={"count": 10**6},
            trainer={"steps": steps, "seconds": 0.05},
            options=options | setting,
        )
        self.faults: list[Fault] = []

    def strike(self, number: int) -> None:
        """`number` faults at random times, as long as the run goes on."""
        for _ in range(number):
            self.run.until(lambda: self.run.steps() >= 2 or self._over, _START_S)
            time.sleep(self._draw.uniform(0.0, 1.0))
            if self._over or self.run.steps() > self._steps - 20:
                return
            role, kind = self._draw.choice(ROLES), self._draw.choice(kinds())
            self.commit(role, kind)

    def commit(self, role: str, kind: str) -> None:
        """One fault, and wait until the run has got over it."""
        if (victim := self._victim(role)) is None:
            return
        before, began = self.run.steps(), time.monotonic()
        if kind == "cut":
            _cut(victim)
        else:
            with_children = [victim, *victim.children(recursive=True)]
            for process in with_children:
                process.send_signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        goal = min(before + _RECOVERED_STEPS, self._steps)
        # The file is cut back when the run starts again from an earlier step.
        self.run.until(lambda: self.run.steps() >= goal or self._over, timeout_s=_LONGEST_S)
        self.faults.append(Fault(role=role, kind=kind, seconds=time.monotonic() - began))

    def findings(self) -> list[str]:
        """What is wrong when the run has ended; empty if nothing is."""
        code = self.run.wait(_END_S)
        found = [] if code == 0 else [f"exit code {code}: {self.run.errors[-2000:]}"]
        found += [f"{f.check}: {f.where}: {f.what}" for f in audited(str(self.run.path)).findings]
        found += list(_account(self.run.path / "ledger.jsonl", self._steps))
        found += [f"left behind: {what}" for what in self.run.left()]
        return found

    @property
    def _over(self) -> bool:
        return (self.run.path / "summary.json").exists() and self.run.process.poll() is not None

    def _victim(self, role: str) -> psutil.Process | None:
        words = _ELSE.get(role, (f"--role {role} ",))
        found = self.run.processes(*words)
        return self._draw.choice(found) if found else None


def _account(path: Path, steps: int) -> Iterator[str]:
    """Every prompt trained once or dropped with a reason; no token beyond the bound; all steps, in order."""
    ledger = Ledger()
    events = effective(EVENT.validate_json(line) for line in path.read_bytes().splitlines())
    for event in events:
        ledger.apply(event)  # raises for a prompt that is trained twice
    made = [e.version for e in events if isinstance(e, Trained)]
    if made != [*range(1, steps + 1)]:
        yield f"the steps are {made}"
    if ledger.in_flight:
        yield f"{ledger.in_flight} prompts came to no end"
    if ledger.admitted != ledger.trained + ledger.dropped.total():
        yield "the ledger doesn't balance"
    if ledger.staleness_max > STALENESS:
        yield f"a token was {ledger.staleness_max} versions old"


def _cut(victim: psutil.Process) -> None:
    """Break its TCP connections."""
    for connection in victim.net_connections("tcp"):
        if connection.status == psutil.CONN_ESTABLISHED and connection.raddr:
            ports = ["sport", "=", str(connection.laddr.port), "dport", "=", str(connection.raddr.port)]
            subprocess.run(["ss", "-K", *ports], capture_output=True, check=False)


def table(faults: list[Fault]) -> str:
    """Seconds from a fault to the third step after it, by role and kind."""
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for fault in faults:
        found[fault.role, fault.kind].append(fault.seconds)
    lines = ["| role | fault | number | median s | longest s |", "|---|---|---|---|---|"]
    for (role, kind), times in sorted(found.items()):
        lines.append(
            f"| {role} | {kind} | {len(times)} | {statistics.median(times):.1f} | {max(times):.1f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-run", type=int, default=12)
    args = parser.parse_args()
    faults: list[Fault] = []
    number = 0
    while len(faults) < args.faults:
        number += 1
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            storm = Storm(Path(folder), random.Random(f"{args.seed}/{number}"), steps=30 * args.per_run)
            storm.strike(min(args.per_run, args.faults - len(faults)))
            found = storm.findings()
        faults += storm.faults
        told = json.dumps(found) if found else "nothing found"
        print(f"run {number}: {len(storm.faults)} faults; {told}", flush=True)
        if found:
            return 1
    print(table(faults))
    return 0


if __name__ == "__main__":
    sys.exit(main())
