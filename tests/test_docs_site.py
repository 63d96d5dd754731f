"""The website of the documentation: built strictly, whole, and at home without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="mkdocs isn't installed: pip install 'arriero[docs]'")

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


class Loaded(HTMLParser):
    """What a page loads by itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.places: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        kind = {"script": "src", "img": "src", "link": "href", "iframe": "src"}.get(tag)
        self.places += [value or "" for name, value in attrs if name == kind]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_site_is_built_strictly_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = [*site.rglob("*.html")]
    assert len(pages) > 30
    for page in pages:
        loaded = Loaded(page.read_text(encoding="utf-8")).places
        assert [p for p in loaded if re.match(r"(https?:)?//", p)] == [], page


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_reference_is_made_of_the_docstrings(site: Path) -> None:
    for page, names in {
        "graph": ("Graph", "Stream", "Rates"), "messages": ("Rollout", "ScoredGroup", "Batch"),
        "losses": ("AIPO", "ClippedPolicyGradient"), "lineage": ("Index", "Questions", "Lineage"),
    }.items():  # fmt: skip
        text = (site / "reference" / page / "index.html").read_text(encoding="utf-8")
        for name in names:
            assert re.search(rf'id="arriero[\w.]*\.{name}"', text), (page, name)


def test_every_page_stands_in_the_navigation() -> None:
    listed = set(re.findall(r": ([\w/-]+\.(?:md|ipynb))$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md")}
