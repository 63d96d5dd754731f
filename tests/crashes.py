"""Runs of the real pipeline in real processes, to be killed in part, and what they leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from arriero.engine.lineage.chain import lines
from arriero.launchers.audit import audited
from arriero.launchers.rundir import RunDir
from arriero.schemas.lineage import WeightsEntry
from arriero.schemas.run import RunSummary
from tests.inline_runs import saved
from tests.tiny_models import tiny_llama


class Crashing:
    """`arriero run` on a tiny model, of aipo or another pipeline, in a process of its own."""

    def __init__(
        self, folder: Path, *words: str, name: str = "run", steps: int = 8, pipeline: str = "aipo"
    ) -> None:
        self.path = folder / name
        model = folder / "model"
        if not model.exists():
            saved(tiny_llama(seed=5, scale=12.0), model)
            rows = [json.dumps({"prompt": f"{a}+{a * 7}="}) for a in range(10)]
            (folder / "sums.jsonl").write_text("\n".join(rows))
        self._command = [
            sys.executable, "-m", "arriero", "run", pipeline, "--run-dir", str(self.path),
            "--model", str(model), "--data", str(folder / "sums.jsonl"),
            "--sampling.max-new-tokens", "5", "--steps", str(steps),
            "--groups-per-step", "4", "--samples", "4", "--slots", "16", "--optimizer.lr", "1e-3",
            "--optimizer.warmup-steps", "1", "--checkpoints.every", "3", "--liveness-s", "10", *words,
        ]  # fmt: skip
        if pipeline == "aipo":
            self._command += ["--reward", "contains", "--reward.text", "3"]
        self.start(self._command)

    def start(self, command: Sequence[str]) -> None:
        """Run `command`, which goes on in the same directory."""
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._errors = self.path.parent / f"{self.path.name}.err"
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=errors, env=environment
            )

    def resume(self, *words: str) -> None:
        self.start([sys.executable, "-m", "arriero", "run", "--resume", str(self.path), *words])

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    @property
    def summary(self) -> RunSummary:
        return RunDir(self.path).read_summary()

    def steps(self) -> int:
        metrics = RunDir(self.path).metrics
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def until(self, condition: Callable[[], object], timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"it ended: {self.errors}"
            assert time.monotonic() < deadline, f"nothing happened for so long: {self.errors}"
            time.sleep(0.01)

    def wait(self, timeout_s: float = 180.0) -> int:
        try:
            return self.process.wait(timeout_s)
        finally:
            self.process.kill()

    def of(self, *words: str) -> psutil.Process:
        """The process of the run whose command line holds all `words`."""
        for p in psutil.process_iter():
            try:
                command = " ".join(p.cmdline())
            except psutil.Error:
                continue
            if str(self.path) in command and all(word in command for word in words):
                return p
        raise AssertionError(f"no process with {words}")

    def kill(self, role: str, number: signal.Signals = signal.SIGKILL) -> None:
        self.of(f"--role {role}").send_signal(number)

    def fingerprints(self) -> dict[int, list[str]]:
        """Of each version, in the order in which it was announced."""
        found: dict[int, list[str]] = {}
        for line in lines(str(self.path / "lineage")):
            if isinstance(entry := line.entry, WeightsEntry):
                found.setdefault(entry.version, []).append(entry.fingerprint)
        return found

    def findings(self) -> list[str]:
        return [f"{f.check}: {f.where}: {f.what}" for f in audited(str(self.path)).findings]
