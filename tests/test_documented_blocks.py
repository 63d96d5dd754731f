"""Every block of code in README.md and docs/: run, or checked as far as it can be without what it is for.

| block      | what is done with it                                                                        |
|------------|---------------------------------------------------------------------------------------------|
| `console`  | `arriero run|check|eval|plan`: checked with its own words; other commands of `arriero`: run, |
|            | on a recorded run; `make`, `pip`, `python`: what they name is there                          |
| `python`   | parsed, its imports made; run, if it stands by itself                                        |
| `toml`     | read as the profile or configuration that it is                                              |
| `json`, `yaml` | read                                                                                     |
| none       | it shows what a command says, or a picture                                                   |

A block for which there is no way fails, unless it is listed below with a reason.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

from arriero.launchers.cli import main
from arriero.launchers.profile import read_profile
from tests.inline_runs import recorded_grpo
from tests.test_documented_commands import qwen

torch.set_num_threads(1)

ROOT = Path(__file__).parents[1]
# Pages that another test goes through from top to bottom.
ELSEWHERE = {"how-to.md": "test_documented_how_tos.py", "tutorial.md": "test_tutorial.py"}

# Why a block, or a command, is neither run nor checked here: page, the beginning of it, and the reason.
LISTED = {
    (
        "docs/algorithms.md",
        "return -tokens",
    ): "a line of the function above it; the laws' output is test_laws_command.py's",
    (
        "docs/environments.md",
        "played = g.add",
    ): "two lines of a pipeline; test_environments.py runs such graphs",
    ("docs/graph.md", "g.add(reward, replicas=4"): "one line of a pipeline; test_fused.py runs such graphs",
    ("docs/rewards.md", "async def judged"): "a signature",
    (
        "docs/weights.md",
        "from arriero.engine.weights import GroupRanks",
    ): "one line on each side of two processes",
    ("docs/weights.md", "from arriero.engine.weights import ShardReceiver"): "needs both ends of a plane",
    (
        "docs/lineage.md",
        "from arriero.engine.lineage.index",
    ): "on runs/demo; test_lineage_index.py asks the same",
    ("docs/lineage.md", "# sums_reward.py"): "test_documented_lineage.py, with all of its section",
    ("README.md", "def aipo"): "the function of pipelines/aipo.py, compared with it below",
    ("docs/graph.md", "from arriero.components.advantage import GroupAdvantage"): "the same",
}
# Commands on clusters that need one, and those that go on until they are stopped.
COMMANDS = {
    "torchx": "test_appdef.py and test_cluster.py take TorchX through it, tests/slurm a real Slurm",
    "ssh": "needs another machine",
    "bash": "CI itself",
    "arriero status": "of a job: test_jobs.py",
    "arriero logs": "of a job: test_jobs.py",
    "arriero cancel": "of a job: test_jobs.py",
    "arriero ui": "goes on until it is stopped: test_ui_server.py",
    "arriero scale": "of a run that goes on: test_scale.py",
    "arriero top --credentials": "of a run that goes on: test_watcher.py",
    "arriero top nats": "the same",
    "arriero demo": "test_demo.py",
    "arriero fork": "test_lineage_audit.py and test_replay.py",
    "arriero run --resume": "test_resume.py; what it can be told is checked there",
    "arriero run --from": "test_branching.py, and test_documented_lineage.py",
    "arriero plan --from": "of a run of many steps: test_planner_command.py",
    "arriero lineage redact": "test_redaction.py",
    "arriero run pretrain_rl": "three runs in a row: test_pretrain_rl.py",
}
LINEAGE_SECTION = ("runs/sums", "runs/mended")  # test_documented_lineage.py runs these commands


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> Iterator[Block]:
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text(encoding="utf-8")
        for found in re.finditer(r"^( *)```([^\n]*)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL):
            indent, language, body = found[1], found[2], found[3]
            body = "\n".join(line.removeprefix(indent) for line in body.splitlines())
            line = text.count("\n", 0, found.start()) + 1
            if path.name not in ELSEWHERE:
                yield Block(str(path.relative_to(ROOT)), line, language, body)


ALL = [*blocks()]


def of(*languages: str) -> list[Block]:
    found = [b for b in ALL if b.language in languages]
    return [b for b in found if not any(b.page == p and b.text.strip().startswith(t) for p, t in LISTED)]


def ids(block: Block) -> str:
    return str(block)


def test_every_block_has_a_kind_that_is_looked_at_and_every_exception_a_block() -> None:
    unknown = [b for b in ALL if b.language not in ("console", "python", "toml", "json", "yaml", "")]
    assert unknown == []
    for page, start in LISTED:
        assert any(b.page == page and b.text.strip().startswith(start) for b in ALL), (page, start)
    for page, test in ELSEWHERE.items():
        assert page in (ROOT / "tests" / test).read_text()
    named = re.findall(r"test_\w+\.py", " ".join((*LISTED.values(), *COMMANDS.values())))
    assert [name for name in named if not (ROOT / "tests" / name).is_file()] == []
    said = [" ".join(line) for b in ALL if b.language == "console" for line in typed(b)]
    for start in COMMANDS:
        assert any(line.startswith(start) for line in said), start


def test_the_pipeline_that_is_shown_is_the_one_that_is_run() -> None:
    source = (ROOT / "arriero" / "pipelines" / "aipo.py").read_text()
    own = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "aipo")
    for block in ALL:
        for node in ast.walk(ast.parse(block.text.strip())) if block.language == "python" else ():
            if isinstance(node, ast.FunctionDef) and node.name == "aipo":
                shown = [ast.unparse(n) for n in node.body]
                assert shown == [ast.unparse(n) for n in own.body[1:]], block  # without its docstring


@pytest.mark.parametrize("block", of("python"), ids=ids)
def test_a_block_of_python_runs_by_itself(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("shown")
    monkeypatch.setitem(sys.modules, "shown", module)  # where dataclasses look for what annotations name
    exec(compile(block.text, str(block), "exec"), module.__dict__)
    assert module.__dict__.get("violations", []) == []


@pytest.mark.parametrize("block", [b for b in ALL if b.language == "python"], ids=ids)
def test_a_block_of_python_imports_what_there_is(block: Block) -> None:
    tree = ast.parse(block.text.strip())
    imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(body=[*imports], type_ignores=[]), str(block), "exec"), {})


@pytest.mark.parametrize("block", of("json", "yaml"), ids=ids)
def test_a_block_of_data_is_read(block: Block) -> None:
    assert json.loads(block.text) if block.language == "json" else [*yaml.safe_load_all(block.text)]


@pytest.mark.slow
@pytest.mark.parametrize("block", of("toml"), ids=ids)
def test_a_block_of_toml_is_the_profile_or_the_configuration_that_it_says(
    block: Block, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "given.toml").write_text(block.text)
    if "profile" in (tables := tomllib.loads(block.text)):
        (name,) = tables["profile"]
        assert read_profile(name, name, tmp_path / "given.toml").on == name
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command puts the current folder on it
    files(block.page, place)
    assert main(["check", "aipo", "--config", "base.toml", "--json"]) == 0


# --- commands ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """What stands for the models, data and runs that commands name; `run` is recorded."""

    model: Path
    data: Path
    run: Path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("documented")
    data = folder / "prompts.jsonl"
    rows = [{"prompt": f"{k}+1=", "question": f"{k}+1=", "answer": str(k + 1)} for k in range(64)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Place(model=qwen(folder / "qwen"), data=data, run=recorded_grpo(folder / "recorded").path)


def typed(block: Block) -> Iterator[list[str]]:
    """The words of each command of a console; what isn't behind a prompt is what it said."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            yield shlex.split(line[2:], comments=True)


def excused(words: list[str]) -> bool:
    line = " ".join(words)
    return any(run in line for run in LINEAGE_SECTION) or any(line.startswith(start) for start in COMMANDS)


CASES = [(str(b), words) for b in ALL if b.language == "console" for words in typed(b) if not excused(words)]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "words"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_a_command_is_accepted_or_run(
    where: str, words: list[str], place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command puts the current folder on it
    match words:
        case ["arriero", "run" | "check", *rest]:
            trained(rest, place, where)
        case ["arriero", "eval", *rest]:
            evaluated(rest, place)
        case ["arriero", "plan", *rest]:
            assert main(["plan", *rest]) == 0
        case ["arriero", "list"]:
            assert main(["list"]) == 0
        case ["arriero", name, *rest]:
            asked(name, rest, place)
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case ["pip", "install", what]:
            extra = re.fullmatch(r"arriero\[(\w+)\]", what)
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            assert extra is not None
            assert extra[1] in project["optional-dependencies"]
        case ["python", script, *_]:
            assert (ROOT / script).is_file()
        case _:
            pytest.fail(f"{where}: nobody knows what to do with {words}; add a way, or list it with a reason")


def trained(words: list[str], place: Place, where: str) -> None:
    """`arriero check` with the words of a `run`; models, data and runs are what stands for them."""
    pipeline, *rest = (w for w in words if w not in ("--laws", "--inline"))
    wrong = [line for line in said(where) if line.startswith("arriero: error: unknown key")]
    if "..." in rest:
        rest.remove("...")
        for key in ("--model", "--data"):
            rest += [] if key in rest else [key, "given below"]
        rest += [] if "--reward" in rest else ["--reward", "contains", "--reward.text", "4"]
        rest += [] if "--on" not in rest or "--weights.transport" in rest else ["--weights.transport", "nixl"]
    if any(w.startswith("--data.eval-") for w in rest) and "--data.eval-path" not in rest:
        rest += ["--data.eval-path", "given below", "--data.overlap", "allow"]
    for at, word in enumerate(rest[:-1]):
        value = rest[at + 1]
        if word in ("--model", "--teacher"):
            rest[at + 1] = str(place.model)
        elif word in ("--data", "--data.eval-path"):
            rest[at + 1] = str(place.run if value.startswith("runs/") else place.data)
        elif word == "--data.mix":
            other = shutil.copy(place.data, "other.jsonl")
            rest[at + 1] = re.sub(r'"path": "\w+"', f'"path": "{other}"', value)
    files(where.partition(":")[0], place)
    sys.modules.pop(Path(pipeline).stem, None)  # of another folder
    assert main(["check", Path(pipeline).name, *rest]) == (2 if wrong else 0)


def said(where: str) -> list[str]:
    """What the console shows."""
    return next(b.text for b in ALL if str(b) == where).splitlines()


def files(page: str, place: Place) -> None:
    """The files that a page has its reader write, in the current folder."""
    for block in (b for b in ALL if b.page == page):
        if named := re.match(r'(?:# |""")(\w+\.py)', block.text):
            Path(named[1]).write_text(block.text)
        elif block.language == "toml" and "[profile." in block.text:
            Path("arriero.toml").write_text(block.text)
        elif block.language == "toml":
            given = tomllib.loads(block.text)
            text = block.text.replace(given["model"], str(place.model))
            Path("base.toml").write_text(text.replace(given["data"]["path"], str(place.data)))


def evaluated(words: list[str], place: Place) -> None:
    """What an evaluation is told is checked where it is begun; here, that each option is one."""
    said = subprocess.run(
        [sys.executable, "-m", "arriero", "eval", "--help"], capture_output=True, text=True, timeout=60,
        check=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    ).stdout  # fmt: skip
    for word in words:
        if word.startswith("--"):
            assert word.removeprefix("--").replace("-", "_") in said.replace("-", "_"), word


def asked(name: str, words: list[str], place: Place) -> None:
    """A question to a recorded run, with ids of it."""
    from arriero.launchers.lineage import indexed

    index = indexed(str(place.run))
    (rollout,) = index.rows("select id, prompt from rollouts limit 1")
    (weights,) = index.rows("select fingerprint from weights where version = 1")
    known = {"RUN": str(place.run), "runs/demo": str(place.run), "FINGERPRINT": weights["fingerprint"][:6]}
    known["ID"] = rollout["prompt" if "--prompt" in words else "id"]
    words = [known.get(w, w) for w in words]
    if "--step" in words:
        words[words.index("--step") + 1] = "2"
    assert main([name, *words]) == 0
