"""A hundred thousand rollouts: pages come at once, and a search that takes long says how far it came."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("playwright", reason="playwright isn't installed: pip install 'arriero[dev]'")

from playwright.sync_api import expect

from benchmarks.lineage import written
from tests.ui_pages import asked_graph, begun, opened, serving

ROLLOUTS, PER_STEP = 100_000, 1024
WRITTEN = ROLLOUTS // PER_STEP * PER_STEP
BOUND_S = 10.0  # on a machine that much else is at work on; an idle one takes a small part of it

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("large") / "run"
    run, _ = begun(folder, asked_graph(steps=1))
    written(run.lineage, ROLLOUTS)
    run.metrics.write_text(json.dumps({"step": 1, "reward": 0.5}) + "\n")
    with serving(run) as address:
        httpx.get(f"{address}api/run", timeout=300)  # makes the tables
        yield address


def asked(url: str, **query: Any) -> tuple[dict[str, Any], float]:
    began = time.monotonic()
    answer = httpx.get(f"{url}api/rollouts", params=query, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json(), time.monotonic() - began


@pytest.mark.parametrize("order", ["newest", "oldest", "best", "longest", "stalest"])
def test_first_middle_and_last_page_come_at_once(url: str, order: str) -> None:
    for start in (0, WRITTEN // 2, WRITTEN - 50):
        page, took_s = asked(url, order=order, start=start)
        assert page["total"] == WRITTEN
        assert len(page["lines"]) == 50
        assert page["lines"][0]["response"].startswith("word")
        assert took_s < BOUND_S
    assert page["after"] is None


@pytest.mark.parametrize("order", ["newest", "best"])
def test_a_search_goes_on_where_it_ended_until_it_has_looked_into_all(url: str, order: str) -> None:
    at = 0
    while at < WRITTEN:
        page, _ = asked(url, text="never said", start=at, order=order)
        assert page["lines"] == []
        assert page["searched"] > at
        assert page["after"] == (page["searched"] if page["searched"] < WRITTEN else None)
        at = page["searched"]


def test_a_search_finds_what_the_list_shows_in_its_order(url: str) -> None:
    for order in ("oldest", "best"):
        listed, _ = asked(url, order=order, start=3000, count=200)
        found, _ = asked(url, order=order, start=3000, count=200, text="WORD")
        assert found["lines"] == listed["lines"]


def test_the_page_shows_them_in_a_browser(url: str) -> None:
    with opened() as window:
        page = window.page
        page.goto(f"{url}#rollouts?order=best")
        page.locator("#list tbody tr").first.wait_for()
        for start in (51, 101, 151):
            page.keyboard.press("n")
            expect(page.locator("#told")).to_have_text(f"50 shown from {start} of {WRITTEN}")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.locator("#tokens span").first.wait_for()
        page.goto(f"{url}#curves")
        page.locator("#distributions svg").first.wait_for()
        assert page.evaluate("document.querySelectorAll('*').length") < 5000
        assert window.complaints == []
