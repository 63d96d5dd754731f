"""What is shipped: one copy of every module, under the name arriero, with its types."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem
from hatchling.build import build_sdist, build_wheel
from torchx.workspace.api import walk_workspace

import arriero

ROOT = Path(__file__).parents[1]
LINKS = ("schemas", "engine", "components", "pipelines", "launchers")


@pytest.fixture
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The build backend builds the project in the current directory."""
    monkeypatch.chdir(ROOT)


@pytest.mark.usefixtures("in_root")
def test_the_wheel_holds_every_module_once_and_the_type_marker(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / build_wheel(str(tmp_path))) as wheel:
        names = wheel.namelist()
        entry_points = wheel.read(f"arriero-{arriero.__version__}.dist-info/entry_points.txt").decode()

    assert {name.split("/")[0] for name in names} == {"arriero", f"arriero-{arriero.__version__}.dist-info"}
    assert "arriero/py.typed" in names
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "arriero").rglob("*.py")}
    assert {f"arriero/{link}/__init__.py" for link in LINKS} <= modules
    assert sorted(name for name in names if name.endswith(".py")) == sorted(modules)
    assert "arriero = arriero.launchers.cli:main" in entry_points


@pytest.mark.slow
@pytest.mark.usefixtures("in_root")
def test_an_installed_wheel_is_found_under_its_one_name(tmp_path: Path) -> None:
    site = tmp_path / "site"
    wheel = tmp_path / build_wheel(str(tmp_path))
    install = ["pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, "-m", *install], check=True, timeout=100)

    names = [*LINKS, *(f"arriero.{link}" for link in LINKS)]
    code = f"from importlib.util import find_spec; print([n for n in {names} if find_spec(n)])"
    # -S: without the editable install of this checkout.
    found = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert found.stdout.strip() == str([f"arriero.{link}" for link in LINKS])
    assert (site / "bin" / "arriero").is_file()


@pytest.mark.usefixtures("in_root")
def test_the_source_archive_builds_the_same_modules_without_the_root_links(tmp_path: Path) -> None:
    archive = tmp_path / build_sdist(str(tmp_path))
    with tarfile.open(archive) as sdist:
        names = [name.split("/", 1)[1] for name in sdist.getnames()]

    assert not [name for name in names if name.split("/")[0] in LINKS]
    assert "arriero/py.typed" in names
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "arriero").rglob("*.py")}
    assert sorted(name for name in names if name.endswith(".py")) == sorted(modules)


@pytest.mark.parametrize("link", LINKS)
def test_the_root_shows_each_package_through_a_relative_link(link: str) -> None:
    assert (ROOT / link).readlink() == Path("arriero", link)
    assert (ROOT / link).resolve() == ROOT.resolve() / "arriero" / link
    assert (ROOT / link / "__init__.py").is_file()


@pytest.mark.parametrize("ignore_file", [".torchxignore", ".dockerignore"])
def test_a_workspace_copy_holds_the_package_once(ignore_file: str, tmp_path: Path) -> None:
    for link in LINKS:
        package = tmp_path / "arriero" / link
        (package / "__pycache__").mkdir(parents=True)
        (package / "module.py").touch()
        (package / "__pycache__" / "module.pyc").touch()
        (tmp_path / link).symlink_to(Path("arriero", link))
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "python").touch()
    shutil.copy(ROOT / ignore_file, tmp_path)

    copied = {
        Path(folder, name).relative_to(tmp_path).as_posix()
        for folder, _, files in walk_workspace(LocalFileSystem(), str(tmp_path), ignore_file)
        for name in files
    }
    assert copied == {ignore_file, *(f"arriero/{link}/module.py" for link in LINKS)}


def _lint(source: str) -> subprocess.CompletedProcess[str]:
    """Ruff's verdict on a module of the package, with the project's configuration."""
    filename = str(ROOT / "arriero" / "snippet.py")
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--stdin-filename", filename, "-"]
    return subprocess.run(
        command, input=source, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("statement", ["import {}", "from {} import x", "from {}.x import y"])
def test_ruff_refuses_to_import_a_package_by_its_bare_name(statement: str, link: str) -> None:
    verdict = _lint(f"{statement.format(link)}\n")
    assert verdict.returncode == 1
    assert "TID251" in verdict.stdout
    assert f"Import arriero.{link}" in verdict.stdout


def test_the_recipe_of_the_image_names_extras_that_there_are() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"EXTRAS=([\w,-]+)", (ROOT / "Containerfile").read_text())
    assert len(named) == 2
    assert {extra for words in named for extra in words.split(",")} <= extras.keys()


def test_ruff_accepts_the_full_name() -> None:
    verdict = _lint('import arriero.engine\n\n__all__ = ["arriero"]\n')
    assert verdict.returncode == 0, verdict.stdout
