"""The `arriero` command as a process: what it prints, its exit codes, and that it answers without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from arriero import __version__
from arriero.schemas.graph import GraphSpec

TOY = '''\
"""Prompts are answered; the answers make weights."""
from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Literal

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.engine.graph import Graph, Rates
from arriero.engine.stream import Stream
from arriero.schemas.messages import Batch, Prompt, RolloutGroup, ScoredGroup, Weights


@dataclass(frozen=True, kw_only=True)
class Source:
    """Lines of a file."""

    path: str
    limit: PositiveInt | None = None  # at most so many

    async def run(self) -> AsyncIterator[Prompt]:
        yield Prompt(text="x")


@dataclass(frozen=True, kw_only=True)
class Answers:
    async def run(self, prompts: Stream[Prompt], weights: Stream[Weights]) -> AsyncIterator[RolloutGroup]:
        raise NotImplementedError
        yield


@dataclass(frozen=True, kw_only=True)
class Exact:
    kind: Literal["exact"] = "exact"

    async def run(self, groups: Stream[RolloutGroup]) -> AsyncIterator[ScoredGroup]:
        raise NotImplementedError
        yield


@dataclass(frozen=True, kw_only=True)
class Close:
    """Near enough."""

    kind: Literal["close"] = "close"
    tolerance: float

    async def run(self, groups: Stream[RolloutGroup]) -> AsyncIterator[ScoredGroup]:
        raise NotImplementedError
        yield


@dataclass(frozen=True, kw_only=True)
class Collect:
    groups: PositiveInt = 4

    def rates(self) -> Rates:
        return Rates(consumes={"scored": self.groups})

    async def run(self, scored: Stream[ScoredGroup]) -> AsyncIterator[Batch]:
        raise NotImplementedError
        yield


@dataclass(frozen=True, kw_only=True)
class Learn:
    lr: float = 1e-3

    async def run(self, batches: Stream[Batch]) -> AsyncIterator[Weights]:
        raise NotImplementedError
        yield


@dataclass(frozen=True, kw_only=True)
class ToyConfig:
    data: Source
    reward: Annotated[Exact | Close, Field(discriminator="kind")] = Exact()
    trainer: Learn = Learn()
    staleness: int = 1
    generators: int = 1
    trainers: int = 1  # more than one is a mistake


def toy(cfg: ToyConfig) -> Graph:
    """One loop, five nodes."""
    g = Graph("toy")
    weights = g.loop(Weights, staleness=cfg.staleness)
    answers = g.add(Answers(), replicas=cfg.generators)(g.add(cfg.data)(), weights)
    batches = g.add(Collect())(g.add(cfg.reward, name="reward")(answers))
    weights.close(g.add(cfg.trainer, replicas=cfg.trainers)(batches))
    return g
'''


@pytest.fixture
def toy(tmp_path: Path) -> str:
    (tmp_path / "toy.py").write_text(TOY)
    return "toy.py"


def arriero(cwd: Path, *args: str, module: str = "arriero") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def mistakes(cwd: Path, *args: str) -> list[str]:
    done = arriero(cwd, *args)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()


def test_help_version_and_list_answer(tmp_path: Path) -> None:
    assert "run PIPELINE" in arriero(tmp_path).stdout
    assert arriero(tmp_path, "--version", module="arriero.launchers.cli").stdout == f"arriero {__version__}\n"
    assert any(line.startswith("aipo ") for line in arriero(tmp_path, "list").stdout.splitlines())


def test_a_toy_pipeline_is_checked_and_shown(tmp_path: Path, toy: str) -> None:
    (tmp_path / "c.toml").write_text("[trainer]\nlr = 0.5\n")
    done = arriero(tmp_path, "check", toy, "--data", "x.jsonl", "--config", "c.toml", "--generators", "3")

    assert (done.returncode, done.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for line in (
        "toy: One loop, five nodes.",
        "data.path x.jsonl command line",
        "trainer.lr 0.5 c.toml",
        "staleness 1 default",
        "answers answers 3 1 1 0 -",
        "node consumes produces waits for unblocked by",
        "n_learn -.->|Weights, staleness ≤ 1| n_answers",
    ):
        assert line in lines


def test_checking_and_asking_for_help_import_no_torch_and_start_nothing(tmp_path: Path, toy: str) -> None:
    code = (
        "import sys; from arriero.launchers.cli import main\n"
        f"assert main(['check', {toy!r}, '--data', 'x']) == 0 == main(['check', 'aipo', '--help'])\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'torchx', 'nats'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == "[]\n"
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "__pycache__") == ["toy.py"]


def test_the_graph_comes_as_json_and_as_a_picture(tmp_path: Path, toy: str) -> None:
    for suffix in ("svg", "mmd"):
        done = arriero(tmp_path, "check", toy, "--data=x", "--json", "--picture", f"g.{suffix}")
        spec = GraphSpec.model_validate_json(done.stdout)
        assert [n.name for n in spec.nodes] == ["source", "answers", "reward", "collect", "learn"]
    assert (tmp_path / "g.svg").read_text().startswith("<svg")
    assert (tmp_path / "g.mmd").read_text().startswith("flowchart LR\n")
    [line] = mistakes(tmp_path, "check", toy, "--data=x", "--picture", "g.png")
    assert line == "arriero: error: --picture g.png: the name must end in .svg or .mmd"


def test_help_lists_every_key_with_type_default_and_comment(tmp_path: Path, toy: str) -> None:
    done = arriero(tmp_path, "run", toy, "--help")
    lines = [line.strip() for line in done.stdout.splitlines()]

    assert (done.returncode, done.stderr) == (0, "")
    for line in (
        "One loop, five nodes.",
        "data: Lines of a file.",
        "--data.path str  [required]",
        "--data.limit int > 0 | none  [default none]",
        "at most so many",
        "--reward.kind exact | close  [default exact]",
        "reward (reward.kind close): Near enough.",
        "--reward.tolerance float  [required]",
        "--trainer.lr float  [default 0.001]",
        "--seed int >= 0  [default 0]",
    ):
        assert line in lines


def test_every_mistake_of_a_command_line_is_one_line(tmp_path: Path, toy: str) -> None:
    integer = "should be a valid integer, unable to parse string as an integer"
    missing = "missing: data.path, reward.tolerance; give --key value or put them into a --config file"
    args = ["--reward", "close", "--lrr", "1", "--staleness", "x", "--seed=-1"]
    assert mistakes(tmp_path, "run", toy, *args) == [
        "arriero: error: seed = -1 (command line) should be greater than or equal to 0; it takes int >= 0",
        "arriero: error: unknown key lrr (command line); did you mean trainer.lr?",
        f"arriero: error: staleness = x (command line) {integer}; it takes int",
        f"arriero: error: {missing}",
    ]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["rum"], "unknown command rum; did you mean run?"),
        (["run"], "run needs a pipeline first: arriero run PIPELINE --key value ..."),
        (["run", "aippo"], "no pipeline aippo; did you mean aipo?"),
        (["run", "no.py"], "no.py is not a file"),
        (["list", "all"], "list takes no arguments, got all"),
        (
            ["run", "toy.py", "--data", "x", "--trainers", "2"],
            "learn: it closes a loop, so it has one replica",
        ),
        (["run", "toy.py", "--data", "x", "--staleness=-1"], "loop weights: staleness -1 is negative"),
        (["run", "toy.py", "--data", "x", "--json"], "--json and --laws belong to arriero check"),
        (["run", "toy.py", "--data", "x", "--hub.replicas", "2"], "hub.replicas = 2 (command line)"),
        (["run", "toy.py", "--data", "x", "--hub.replicas", "3", "--inline"], "one process has no hub"),
        (["run", "toy.py", "--data", "x", "--run-dir", "toy.py"], "toy.py is not a directory"),
    ],
)
@pytest.mark.usefixtures("toy")
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path, args: list[str], told: str) -> None:
    [line] = mistakes(tmp_path, *args)
    assert line.startswith("arriero: error: ")
    assert told in line


def test_a_reader_that_stops_reading_is_no_error(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "arriero", "list"],
            cwd=tmp_path,
            stdout=closed,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    "stop", ["raise KeyboardInterrupt", "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)"]
)
def test_an_interrupt_ends_with_130_and_no_traceback(tmp_path: Path, stop: str) -> None:
    (tmp_path / "stopped.py").write_text(f"{stop}\n")
    done = arriero(tmp_path, "check", "stopped.py")

    assert (done.returncode, done.stderr) == (130, "arriero: interrupted\n")


def test_a_run_leaves_what_it_is_made_of_and_its_directory_is_not_used_twice(
    tmp_path: Path, toy: str
) -> None:
    # Its components are not implemented, so the run fails; what it was made of is there all the same.
    args = ["run", toy, "--inline", "--data", "x", "--seed", "5", "--run-dir", "r", "--wait-bound-s", "5"]
    assert arriero(tmp_path, *args).returncode not in (0, 2)

    manifest = json.loads((tmp_path / "r" / "manifest.json").read_text())
    assert manifest["pipeline"]["function"] == "toy:toy"
    assert manifest["config"]["data"] == {"path": "x", "limit": None}
    assert (manifest["sources"]["data.path"], manifest["sources"]["trainer.lr"]) == (
        "command line",
        "default",
    )
    assert manifest["argv"] == ["arriero", *args]
    options = json.loads((tmp_path / "r" / "options.json").read_text())
    assert (options["seed"], options["wait_bound_s"], options["run_id"]) == (5, 5.0, manifest["run_id"])
    assert (
        GraphSpec.model_validate_json((tmp_path / "r" / "graph.json").read_text()).digest
        == manifest["graph_digest"]
    )
    [line] = mistakes(tmp_path, *args)
    assert line.endswith("r has been used by a run; choose another --run-dir, or empty it with --overwrite")


def test_a_missing_key_is_told_with_what_its_source_says_of_it(tmp_path: Path) -> None:
    [line] = mistakes(tmp_path, "check", "ppo")
    assert (
        "missing: model, data.path, reward_model (the model/ of a run of the pipeline `reward_model`);"
        in line
    )
