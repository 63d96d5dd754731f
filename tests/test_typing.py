"""mypy and pyright refuse every wrong graph of `wrong_graphs.py`, line by line, and nothing else there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
WRONG = "tests/wrong_graphs.py"


def marked_lines() -> set[int]:
    """Numbers of the lines that end in a mark, from 1."""
    lines = (ROOT / WRONG).read_text(encoding="utf-8").splitlines()
    return {number for number, line in enumerate(lines, 1) if re.search(r"\)  # E\d+ ", line)}


def report_of(*command: str) -> str:
    """What a checker prints about the file, with the project's configuration."""
    env = {**os.environ, "MYPY_FORCE_COLOR": "0"}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr  # 1: it ran and found errors
    return done.stdout


def assert_exactly_the_marked_lines(found: Sequence[int], report: str) -> None:
    missed, beside = sorted(marked_lines() - set(found)), sorted(set(found) - marked_lines())
    assert (missed, beside) == ([], []), (
        f"not reported: {missed}; reported without a mark: {beside}\n{report}"
    )


def test_every_kind_of_mistake_is_marked() -> None:
    text = (ROOT / WRONG).read_text(encoding="utf-8")
    assert {int(n) for n in re.findall(r"# E(\d+) ", text)} == set(range(1, 11))


# Without the cache that linting leaves, mypy first reads torch: half a minute.
@pytest.mark.timeout(300)
def test_mypy_reports_every_wrong_graph() -> None:
    report = report_of("mypy", "--no-pretty", WRONG)
    found = [int(n) for n in re.findall(rf"^{re.escape(WRONG)}:(\d+): error:", report, re.MULTILINE)]
    assert_exactly_the_marked_lines(found, report)


@pytest.mark.timeout(300)
def test_pyright_reports_every_wrong_graph(tmp_path: Path) -> None:
    # pyright leaves out what its configuration excludes even if it is named: a copy is not excluded.
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pyright"]
    config |= {"include": ["."], "exclude": [], "venvPath": str(ROOT), "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config), encoding="utf-8")
    shutil.copy(ROOT / WRONG, tmp_path)
    report = report_of("pyright", "--outputjson", "--project", str(tmp_path))
    errors: list[dict[str, Any]] = json.loads(report)["generalDiagnostics"]
    found = [e["range"]["start"]["line"] + 1 for e in errors if e["file"].endswith("/wrong_graphs.py")]
    assert_exactly_the_marked_lines(found, report)
