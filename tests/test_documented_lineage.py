"""The worked example of the lineage guide, with its commands: a reward bug found afterwards."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.inline_runs import tiny_model

ROOT = Path(__file__).parents[1]
# Several commands in one process, as typed; what each shows and its exit code, as JSON.
SHELL = """
import contextlib, io, json, sys
from arriero.launchers.cli import main
for words in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(words)
    print(json.dumps([code, out.getvalue()]), flush=True)
"""


def section() -> str:
    text = (ROOT / "docs" / "lineage.md").read_text(encoding="utf-8")
    found = re.search(r"### A reward bug, found afterwards\n(.*?)\n## ", text, re.DOTALL)
    assert found is not None
    return found[1]


def commands(model: str) -> list[list[str]]:
    """The words after `arriero` of every command of the section."""
    lines = re.findall(r"^\$ arriero (.*)$", section().replace("\\\n", " "), re.MULTILINE)
    return [[model if w == "MODEL" else w for w in shlex.split(line)] for line in lines]


def typed(folder: Path, words: list[list[str]]) -> list[tuple[int, str]]:
    here = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SHELL, json.dumps(words)], cwd=folder, env=here, capture_output=True,
        text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(found) == len(words), done.stderr
    print(done.stderr)  # shown where the test fails
    return [(code, text) for code, text in found]


@pytest.mark.timeout(300)
def test_a_reward_bug_is_found_afterwards_by_the_documented_commands(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", section(), re.DOTALL)
    (tmp_path / "sums_reward.py").write_text(code)
    (tmp_path / "sums.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{k}+1=", "answer": str(k + 1)}) + "\n" for k in range(8))
    )
    run, audit, *rest = commands(tiny_model(tmp_path / "tiny"))
    looks, (rescore, branch, *after) = rest[:2], rest[2:]
    for command in (run, branch):
        command += ["--inline", "--quiet"]
    before = typed(tmp_path, [run, audit, *looks])
    assert [code for code, _ in before] == [0, 0, 0, 0]
    assert "nothing found" in before[1][1]
    assert "response '" in before[2][1]

    (mended,) = re.findall(r"mended \(`(.*?)`\)", section())
    (tmp_path / "sums_reward.py").write_text(re.sub(r"return .*", mended, code))
    told = typed(tmp_path, [audit, rescore, branch, *after])
    assert [code for code, _ in told] == [0, 1, 0, 0, 0]
    assert "32 groups scored by version" in told[0][1]
    assert "see --rescore" in told[0][1]
    assert "reward 1.0 (ok), computed again 0.0 (wrong)" in told[1][1]
    assert "steps with such rewards: 1, 2, 3, 4; the last version without: 0" in told[1][1]
    assert "at step 0" in told[3][1]
    assert "the first step at which they differ is 1" in told[4][1]
