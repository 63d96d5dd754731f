"""A run of this machine, asked about and stopped from another process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from arriero.engine.errors import UserError
from arriero.launchers import jobs
from arriero.launchers.cluster import JOB_FILE, Job
from arriero.launchers.rundir import RunDir, write_json

ROOT = Path(__file__).parents[1]


def arriero(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "arriero", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_a_run_of_this_machine_is_asked_about_and_cancelled_from_another_process(tmp_path: Path) -> None:
    path = tmp_path / "run"
    words = ["run", "tests/cluster/toy_run.py", "--steps", "100000", "--run-dir", str(path)]
    command = [sys.executable, "-m", "arriero", *words]
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (path / "metrics.jsonl").exists() or not (path / "metrics.jsonl").read_text():
            assert running.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        told = arriero("status", str(path), "--json")
        assert (told.returncode, json.loads(told.stdout)["state"]) == (0, "running")
        assert arriero("logs", str(path), "generator-0").returncode == 0
        assert arriero("cancel", str(path)).returncode == 0
        assert running.wait(20) == 130
    finally:
        running.kill()
        running.wait()
    told = arriero("status", str(path), "--json")
    assert (told.returncode, json.loads(told.stdout)["state"]) == (1, "cancelled")
    assert "doesn't run any more" in arriero("cancel", str(path)).stderr
    missing = arriero("logs", str(path), "generator-7").stderr
    assert "has no log of generator-7; there are: " in missing
    assert "generator-0" in missing


def test_a_run_of_another_machine_is_asked_about_there(tmp_path: Path) -> None:
    job = Job(on="local", app_id="elsewhere:12", run_dir=str(tmp_path))
    write_json(tmp_path / JOB_FILE, job)
    assert jobs.find(str(tmp_path)) == job
    with pytest.raises(UserError, match="runs on elsewhere; ask there"):
        jobs.cancel(job)


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is this a run directory"):
        jobs.find(str(tmp_path))
    assert not RunDir(tmp_path).summary.exists()
