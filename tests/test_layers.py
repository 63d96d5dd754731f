"""Who may import whom: a layer sees itself and those below it, also inside functions and for types only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import arriero

PACKAGE = Path(arriero.__file__).parent
LAYERS = ("schemas", "engine", "components", "pipelines", "launchers")  # from the lowest up


def imports(file: Path) -> set[str]:
    """The layers that a module imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name.split(".")[1] for name in names if name.startswith("arriero.")} & {*LAYERS}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_itself_and_those_below_only(layer: str) -> None:
    above = {*LAYERS[LAYERS.index(layer) + 1 :]}
    files = sorted((PACKAGE / layer).rglob("*.py"))
    assert files
    assert {str(f.relative_to(PACKAGE)): found for f in files if (found := imports(f) & above)} == {}


def test_every_module_belongs_to_a_layer() -> None:
    outside = {f.name for f in PACKAGE.rglob("*.py") if f.relative_to(PACKAGE).parts[0] not in LAYERS}
    assert outside <= {"__init__.py", "__main__.py", "run.py"}
