"""Finding pipelines by name, module and file, and what is said about files that hold none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from arriero.engine.errors import UserError
from arriero.launchers import catalog

PIPELINE = '''\
"""A source alone."""
from __future__ import annotations

from collections.abc import AsyncIterator

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from arriero.engine.graph import Graph
from arriero.schemas.messages import Prompt


@dataclass(frozen=True, kw_only=True)
class Source:
    count: PositiveInt = 1

    async def run(self) -> AsyncIterator[Prompt]:
        yield Prompt(text="x")


@dataclass(frozen=True, kw_only=True)
class Config:
    count: int = 1


def NAME(cfg: Config) -> Graph:
    """Prompts, and nobody reads them."""
    g = Graph("alone")
    g.add(Source(count=cfg.count))()
    return g
'''


@pytest.fixture(autouse=True)
def _same_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files imported by a test are forgotten after it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if not name.startswith(("arriero.", "numpy", "pydantic")):
            del sys.modules[name]


def write(path: Path, text: str | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PIPELINE.replace("NAME", path.stem) if text is None else text)
    return path


def refusal(name: Path | str) -> str:
    with pytest.raises(UserError) as caught:
        catalog.find(str(name))
    return str(caught.value)


def test_every_listed_pipeline_is_found_under_its_name() -> None:
    for name, doc in catalog.listed().items():
        assert catalog.find(name).name == name
        assert doc


def test_a_file_is_a_pipeline_whose_module_other_processes_find_on_the_search_path(tmp_path: Path) -> None:
    found = catalog.find(str(write(tmp_path / "toy_alone.py")))

    assert (found.name, found.search_path, found.doc) == (
        "toy_alone",
        str(tmp_path),
        "Prompts, and nobody reads them.",
    )
    [node] = catalog.build(found, found.config_type()).spec().nodes
    assert node.component == "toy_alone:Source"
    module = node.component.partition(":")[0]
    subprocess.run(
        [sys.executable, "-c", f"import {module}"],
        env={"PYTHONPATH": found.search_path},
        check=True,
        timeout=60,
    )


def test_a_file_inside_a_package_has_the_name_of_the_package(tmp_path: Path) -> None:
    write(tmp_path / "toy_package" / "__init__.py", "")
    found = catalog.find(str(write(tmp_path / "toy_package" / "inside.py")))

    assert (found.function.__module__, found.search_path) == ("toy_package.inside", str(tmp_path))
    assert catalog.find("toy_package.inside").function is found.function


def test_one_of_our_own_files_is_the_same_module_as_its_name() -> None:
    name = next(iter(catalog.listed()))
    by_name = catalog.find(name)

    assert catalog.find(str(by_name.file)).function is by_name.function


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    name = next(iter(catalog.listed()))
    assert f"did you mean {name}?" in refusal(name + "x")
    assert refusal("toy_package.none").startswith("no pipeline toy_package.none")


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("toy-dash.py", "", "name it like its function"),
        ("json.py", None, "the module name json belongs to"),
        (
            "toy_other.py",
            "x = 1\n",
            "toy_other.py has no function toy_other; a pipeline is a function named like",
        ),
        (
            "toy_shape.py",
            "def toy_shape(cfg: int) -> int: ...\n",
            "toy_shape(cfg: int) -> int is not a pipeline",
        ),
        ("toy_syntax.py", "x = 1\ndef f(:\n", "toy_syntax.py:2: "),
        (
            "toy_import.py",
            "import no_such_thing\n",
            "toy_import.py imports no_such_thing, which is not installed",
        ),
        (
            "toy_from.py",
            "from json import no_name\n",
            "toy_from.py can't be imported: cannot import name 'no_name'",
        ),
    ],
)
def test_a_file_without_a_pipeline_is_told_in_one_line(
    tmp_path: Path, file: str, text: str | None, told: str
) -> None:
    line = refusal(write(tmp_path / file, text))
    assert told in line
    assert "\n" not in line


def test_a_file_that_is_not_there_is_told() -> None:
    assert refusal("no/such.py").startswith("no/such.py is not a file")


def test_a_component_that_refuses_what_the_pipeline_gives_it_is_told_by_its_field(tmp_path: Path) -> None:
    found = catalog.find(str(write(tmp_path / "toy_refused.py")))

    with pytest.raises(UserError, match=r"^toy_refused: Source.count: should be greater than 0$"):
        catalog.build(found, found.config_type(count=0))
