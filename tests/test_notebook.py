"""The notebook of the documentation, executed as Jupyter does it."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbclient", reason="nbclient isn't installed: pip install 'arriero[dev]'")
pytest.importorskip("ipykernel", reason="ipykernel isn't installed: pip install 'arriero[dev]'")

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebook.ipynb"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_shows_its_graph_learns_and_shows_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "TMPDIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    nbformat: Any = import_module("nbformat")
    client: Any = import_module("nbclient").NotebookClient
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    assert [o for o in shown if o.output_type == "error"] == []
    data = [o.data for o in shown if "data" in o]
    assert any("GroupAdvantage" in d.get("image/svg+xml", "") for d in data)
    rewards: list[float] = next(numbers(d["text/plain"]) for d in data if d["text/plain"].startswith("[0."))
    assert rewards[-1] > rewards[0]
    assert any("<iframe" in d.get("text/html", "") and "Who was busy when" in d["text/html"] for d in data)


def numbers(text: str) -> list[float]:
    """A list of numbers as Python shows it."""
    return [float(word) for word in text.strip("[]").split(",")]


def test_the_notebook_is_kept_without_outputs() -> None:
    nbformat: Any = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in notebook.cells)
