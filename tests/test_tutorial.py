"""`arriero new`, and the tutorial as it stands there: every block of it is run, outside of the repository."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from arriero.launchers.cli import main

ROOT = Path(__file__).parents[1]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TUTORIAL, re.DOTALL)
PROGRAMS = {
    "arriero": [sys.executable, "-m", "arriero"],
    "python": [sys.executable],
    "pytest": [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"],
}


def run(words: list[str], folder: Path) -> str:
    command = [*PROGRAMS[words[0]], *words[1:]]
    surroundings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False, env=surroundings
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def followed(block: str, folder: Path) -> None:
    """Do what a block says: a file, a part of `my_algo.py` as it is, or another `advantage`."""
    path = folder / "my_algo.py"
    if named := re.match(r"# (\w+\.\w+)\n", block):
        (folder / named[1]).write_text(block)
    elif block not in path.read_text():
        old = re.search(r"def advantage\(.*?\n\n\n", path.read_text(), re.DOTALL)
        assert old is not None
        assert block.startswith("def advantage(")
        path.write_text(path.read_text().replace(old[0], f"{block}\n\n"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_block_of_the_tutorial_is_run(tmp_path: Path) -> None:
    said: list[str] = []
    for language, block in BLOCKS:
        if language in ("python", "toml"):
            followed(block, tmp_path)
        else:
            assert language == "console"
            said += [run(shlex.split(line[2:]), tmp_path) for line in block.splitlines()]
    assert "np.median" in (tmp_path / "my_algo.py").read_text()
    assert any("holds to all laws" in text for text in said)
    assert (tmp_path / "runs" / "mine" / "report.html").exists()


def test_what_new_writes_is_formatted_and_linted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "squashed", "--dir", "own"]) == 0
    assert sorted(p.name for p in (tmp_path / "own").iterdir()) == ["squashed.py", "test_squashed.py"]
    ruff, config = [sys.executable, "-m", "ruff"], ["--config", str(ROOT / "pyproject.toml")]
    subprocess.run([*ruff, "check", *config, "own/squashed.py"], check=True, timeout=60)
    subprocess.run([*ruff, "format", "--check", *config, "own"], check=True, timeout=60)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["My"], "can't be the name of a function and a file"),
        (["class"], "can't be the name"),
        (["_mine"], "can't be the name"),
        (["json"], "there is a module json already"),
        (["mine", "--to", "x"], "--to x isn't understood"),
    ],
)
def test_a_name_that_cannot_work_is_refused(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["new", *words]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_mine.py").write_text("precious")
    assert main(["new", "mine"]) == 2
    assert "test_mine.py: there already" in capsys.readouterr().err
    assert [p.read_text() for p in tmp_path.iterdir()] == ["precious"]
