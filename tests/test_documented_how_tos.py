"""Every block of the how-tos, in its order and as it stands there: files are written, commands run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from arriero.launchers.rundir import RunDir
from tests.inline_runs import peaked_model

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "how-to.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
PROGRAMS = {"arriero": [sys.executable, "-m", "arriero"], "python": [sys.executable]}


def typed(line: str, folder: Path, model: str, code: Path) -> str:
    first, *words = shlex.split(line.replace("MODEL", model))
    done = subprocess.run(
        [*PROGRAMS[first], *words], cwd=folder, capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_block_of_the_how_tos_is_run(tmp_path: Path) -> None:
    model, code = peaked_model(tmp_path / "model"), tmp_path / "code"
    # As if installed: a commit to this repository meanwhile is no change of the run's code.
    shutil.copytree(ROOT / "arriero", code / "arriero")
    said: dict[str, str] = {}
    for language, block in BLOCKS:
        if language == "console":
            for line in block.splitlines():
                said[line] = typed(line.removeprefix("$ "), tmp_path, model, code)
        else:
            named = re.match(r"# (\w+\.\w+)\n", block)
            assert named is not None, block
            (tmp_path / named[1]).write_text(block.replace("MODEL", model))
    steps = {
        name: RunDir(tmp_path / "runs" / name).read_summary().steps for name in ("mine", "tasks", "guess")
    }
    assert steps == {"mine": 8, "tasks": 2, "guess": 2}  # the first one went on
    assert (tmp_path / "runs" / "mine" / "report.html").exists()
    assert "ranks" in said["$ arriero check grpo --config small.toml --generators 4 --rewards 2 --ranks 2"]
