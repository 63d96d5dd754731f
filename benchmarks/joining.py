"""How long a generator takes from `arriero scale` to its first rollout, and what the run does meanwhile.

    python -m benchmarks.joining [--times 5]

A toy graph whose generator takes 50 ms for a prompt (everything else is real: processes, NATS, heartbeats
every 0.3 s) runs while a second generator joins and leaves again. Beside it stands what a launch takes: the
time to the first step, and with it to the first rollout of its first generator.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from arriero.launchers.rundir import RunDir
from arriero.launchers.scale import ask
from arriero.schemas.scaling import ScaleRequest
from tests.test_launch import Launch


class Watched:
    """A run, and the times between what is asked of it and what comes of that."""

    def __init__(self, folder: Path) -> None:
        self._began = time.monotonic()
        self.run = Launch(
            folder, prompts={"count": 10**6}, generator={"seconds": 0.05}, trainer={"steps": 10**6},
            options={"elastic": True},
        )  # fmt: skip
        self.start_s = self._until(lambda: self.run.steps() >= 1 and self._given(0) > 0, self._began)

    def join(self, number: int) -> tuple[float, float]:
        """Seconds until generator `number` has been told of, and until it has given a rollout."""
        began = time.monotonic()
        self._ask(2)
        return time.monotonic() - began, self._until(lambda: self._given(number) > 0, began)

    def leave(self, number: int) -> float:
        """Seconds until its process has ended."""
        began = time.monotonic()
        self._ask(1)
        gone = f"--role generator --replica {number}"
        return self._until(lambda: not self.run.processes(gone), began)

    def _ask(self, generators: int) -> None:
        request = ScaleRequest(id=uuid.uuid4().hex, replicas={"generator": generators}, within_s=60.0)
        ask(RunDir(self.run.path), request, going=lambda: self.run.process.poll() is None)

    def _given(self, number: int) -> int:
        run = RunDir(self.run.path)
        pulse = run.read_vitals().pulses.get(f"generator-{number}-0") if run.vitals.exists() else None
        return pulse.status.nodes[0].given if pulse else 0

    def _until(self, condition: Callable[[], object], began: float) -> float:
        self.run.until(condition)
        return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5)
    times = int(parser.parse_args().times)
    with tempfile.TemporaryDirectory() as folder:
        watched = Watched(Path(folder))
        try:
            joins, leaves = list[tuple[float, float]](), list[float]()
            for number in range(1, times + 1):
                joins.append(watched.join(number))
                leaves.append(watched.leave(number))
        finally:
            watched.run.process.terminate()
            watched.run.wait()
    answer_s, rollout_s = (statistics.median(column) for column in zip(*joins, strict=True))
    print(f"launch to first step {watched.start_s:.2f} s")
    print(f"scale to answer {answer_s:.2f} s, to first rollout seen {rollout_s:.2f} s (median of {times})")
    print(f"scale down to the end of the process {statistics.median(leaves):.2f} s")
    print(f"first rollout: {rollout_s / watched.start_s:.2f} of a launch")


if __name__ == "__main__":
    main()
