"""What a run holds in memory doesn't grow with its steps, and held rollouts cost little but their bytes."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Protocol

import psutil
import pytest

from arriero.engine.codec import decode, encode
from arriero.schemas.messages import Prompt, RolloutGroup
from tests.crashes import Crashing
from tests.test_launch import Launch
from tests.toys import rollout

STEPS, WARM = 500, 150
# A step of four prompts, of which the ledger keeps that they were there: a trainer gains 1.7 kB a step over
# 1,500 of them. Over the 250 that are looked at here the allocator's heaps add up to 5.
GROWTH_BYTES = 10 << 10
MORE_BYTES = {
    "broker": 100 << 10,  # it knows ids for an hour and entries of logs for ever
    "command": 16 << 10,  # the record knows each group by its id
}


class Run(Protocol):
    """A run in processes of its own."""

    @property
    def path(self) -> Path: ...
    @property
    def process(self) -> object: ...
    @property
    def errors(self) -> str: ...
    def steps(self) -> int: ...
    def wait(self, timeout_s: float = ...) -> int: ...


def name_of(process: psutil.Process, path: Path) -> str:
    """`<role>-<replica>`, `hub`, `broker` or `command`; empty for what isn't of the run in `path`."""
    try:
        words = " ".join(process.cmdline())
    except psutil.Error:
        return ""
    if str(path) not in words:
        return ""
    if role := re.search(r"--role (\w+) --replica (\d+)", words):
        return f"{role[1]}-{role[2]}"
    return "hub" if "launchers.hub" in words else "broker" if "nats-server" in words else "command"


def slopes(run: Run, steps: int) -> dict[str, float]:
    """Bytes of resident memory that each process gains a step, once it is warm; by least squares.

    Not of the last steps: when a record is closed, or has filled its first shard, the command writes tables,
    for which it imports pyarrow.
    """
    seen: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    names: dict[int, str] = {}
    while (step := run.steps()) < steps * 8 // 10:
        for process in psutil.process_iter():
            name = names.setdefault(process.pid, name_of(process, run.path))
            if name and step >= WARM:
                try:
                    seen[name].append((step, process.memory_info().rss))
                except psutil.Error:
                    names.pop(process.pid)
        time.sleep(0.3)
        assert not (run.path / "summary.json").exists() or run.steps() == steps, run.errors
    found: dict[str, float] = {}
    for name, points in seen.items():
        steps_seen, rss = zip(*points, strict=True)
        found[name] = statistics.linear_regression(steps_seen, rss).slope
    return found


def assert_flat(found: dict[str, float]) -> None:
    assert {"prompts-0", "generator-0", "reward-0", "trainer-0", "hub", "broker", "command"} <= found.keys()
    limits = dict.fromkeys(found, GROWTH_BYTES) | MORE_BYTES
    assert {n: round(b) for n, b in found.items() if b > limits[n]} == {}, found


@pytest.fixture(autouse=True)
def collected_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the heap of nats-server takes the first 500 steps to grow to five times of what it holds."""
    monkeypatch.setenv("GOGC", "100")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_process_of_a_run_grows_over_500_steps(tmp_path: Path) -> None:
    run = Launch(
        tmp_path,
        graph={"generators": 2},
        prompts={"count": 10**6},
        generator={"text_bytes": 20_000},
        trainer={"steps": STEPS, "seconds": 0.02},
        options={"record": True},
    )
    found = slopes(run, STEPS)
    assert run.wait(120) == 0, run.errors
    assert_flat(found)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_role_with_a_model_grows_over_500_steps(tmp_path: Path) -> None:
    run = Crashing(tmp_path, "--staleness", "1", "--checkpoints.every", "50", steps=STEPS)
    found = slopes(run, STEPS)
    assert run.wait(600) == 0, run.errors
    assert_flat(found)


def test_a_thousand_held_rollouts_of_ten_thousand_tokens_cost_at_most_twice_their_packed_size() -> None:
    """As they lie in a component that gathers them: received, decoded, and held with their leases."""
    length, count = 10_000, 1000
    one = rollout(0, 3, tokens=range(length))
    process = psutil.Process()
    received: list[bytes] = []
    packed = 0
    held: list[RolloutGroup] = []
    gc.collect()
    before = process.memory_info().rss
    for k in range(count):
        group = RolloutGroup(prompt=Prompt(id=f"p-{k}", text="?", row=k), rollouts=(one,))
        received.append(encode(group))
        held.append(decode(received[-1], RolloutGroup))
        packed += len(received[-1])
    gc.collect()
    cost = process.memory_info().rss - before
    assert packed > count * length * (4 + 4 + 4 + 1)
    assert len(held[-1].rollouts[0].tokens) == length
    assert cost < 2 * packed, (cost, packed)
