"""The page in a real browser: it follows a run as it goes on, obeys keys, and believes nothing it is told."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="playwright isn't installed: pip install 'arriero[dev]'")

from playwright.sync_api import expect

from arriero.launchers.rundir import RunDir
from tests.ui_pages import GROUPS, HOSTILE, SIZE, Window, asked_run, opened, serving

VIEWS = ("overview", "curves", "timeline", "rollouts", "lineage", "compare")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("hostile")
    asked_run(folder / "other", seed=1)
    with serving(asked_run(folder / "run", behind=HOSTILE)) as address:
        yield address


@pytest.fixture(scope="module")
def window(url: str) -> Iterator[Window]:
    """Opened when the runs are made: the driver has an event loop in this thread, and so have they."""
    with opened() as found:
        yield found


def go(window: Window, url: str, view: str) -> None:
    """A fresh page with one view open, and no complaint so far."""
    window.complaints.clear()
    window.asked.clear()
    window.page.goto("about:blank")
    window.page.goto(f"{url}#{view}")


def test_every_view_opens_without_a_complaint_and_asks_nobody_else(window: Window, url: str) -> None:
    go(window, url, "overview")
    page = window.page
    seen = {
        "overview": "#graph svg", "curves": "#curves svg", "timeline": "#timeline svg",
        "rollouts": "#list tbody tr", "lineage": "#kind", "compare": "#other",
    }  # fmt: skip
    for number, view in enumerate(VIEWS, 1):
        page.keyboard.press(str(number))
        page.locator(seen[view]).first.wait_for()
        assert page.locator("nav [aria-current]").inner_text() == view
    page.goto(f"{url}#compare?with=other")
    page.get_by_text("optimizer.lr").wait_for()
    page.goto(f"{url}#lineage?step=2")
    page.locator("#rollouts a").first.wait_for()
    assert window.complaints == []
    assert [asked for asked in window.asked if not asked.startswith((url, "about:"))] == []


def test_what_a_model_has_written_stays_text(window: Window, url: str) -> None:
    go(window, url, "rollouts?outcome=wrong")
    page = window.page
    page.locator("#list tbody tr").first.click()
    assert page.locator("#response").inner_text() == f"5{HOSTILE}"
    assert page.locator("#prompt").inner_text().endswith(HOSTILE)
    assert page.locator("#response *, #prompt *, #list img, #list script, main svg script").count() == 0
    page.goto(f"{url}#lineage?rollout={HOSTILE}")
    expect(page.locator("#error")).to_have_text(re.compile("no rollout or group"))
    assert page.locator("#value").input_value() == HOSTILE
    assert page.evaluate("window.hacked") is None
    refused = "Failed to load resource: the server responded with a status of 400 (Bad Request)"
    assert {*window.complaints} <= {refused}  # the question about a rollout of that name


def test_markup_can_not_be_made_of_a_string(window: Window, url: str) -> None:
    go(window, url, "overview")
    made = "try { document.body.innerHTML = '<b>x</b>'; 'made' } catch (error) { error.name }"
    assert window.page.evaluate(made) == "TypeError"


def test_tokens_are_coloured_by_what_is_chosen(window: Window, url: str) -> None:
    go(window, url, "rollouts")
    page = window.page
    page.locator("#list tbody tr").first.click()
    sampled = page.locator("#tokens span:not(.unsampled)")
    assert "log-prob" in str(sampled.first.get_attribute("title"))
    assert re.fullmatch(r"p\d v\d [ab]\d", str(sampled.first.get_attribute("class")))
    colours = set[str]()
    for choice in ("by-p", "by-v", "by-a"):
        page.locator(f"#{choice}").check()
        colours.add(str(sampled.first.evaluate("token => getComputedStyle(token).backgroundColor")))
    assert len(colours) >= 2


def test_the_rollouts_obey_keys_filters_and_the_search(window: Window, url: str) -> None:
    go(window, url, "rollouts")
    page = window.page
    page.locator("#list tbody tr").first.wait_for()
    total = int(page.locator("#told").inner_text().split()[-1])
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.locator("#list tbody tr").nth(1).get_attribute("aria-selected") == "true"
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.locator("#detail h2").first.wait_for()
    page.keyboard.press("Escape")
    assert page.locator("#detail *").count() == 0
    page.keyboard.press("/")
    page.keyboard.type("for the 1th time")
    page.keyboard.press("Enter")
    expect(page.locator("#told")).to_have_text(re.compile("searched to"))
    assert page.locator("#list tbody tr").count() == SIZE
    page.keyboard.press("Escape")
    page.locator("[name=text]").fill("")
    page.locator("[name=outcome]").select_option("ok")
    expect(page.locator("#list").get_by_text("wrong", exact=True)).to_have_count(0)
    assert 0 < int(page.locator("#told").inner_text().split()[-1]) < total
    assert {*page.locator("#list tbody td:nth-child(3)").all_inner_texts()} == {"ok"}
    assert window.complaints == []


def test_light_and_dark_are_kept(window: Window, url: str) -> None:
    go(window, url, "overview")
    page = window.page
    background = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(background)
    page.keyboard.press("d")
    after = page.evaluate(background)
    assert before != after
    page.reload()
    page.locator("#graph svg").wait_for()
    assert page.evaluate(background) == after
    page.keyboard.press("d")


def test_the_page_follows_a_run_while_it_goes_on(window: Window, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    command = [sys.executable, "-m", "tests.ui_pages", str(run.path), "12", "0.5"]
    with subprocess.Popen(command, cwd=Path(__file__).parents[1]) as process:
        try:
            while not run.manifest.exists() and process.poll() is None:
                window.page.wait_for_timeout(100)
            with serving(run) as url:
                go(window, url, "overview")
                page, head = window.page, window.page.locator("#head")
                expect(head).to_have_text(re.compile(r"goes on, step [1-9]"), timeout=60_000)
                page.locator("#nodes").get_by_text("trainer", exact=True).wait_for()
                page.locator("#edges meter").first.wait_for()
                expect(head).to_have_text("finished, step 12", timeout=60_000)
                page.keyboard.press("4")
                page.locator("#list tbody tr").first.wait_for()
                expect(page.locator("#told")).to_have_text(re.compile(f"of {12 * GROUPS * SIZE}$"))
                assert window.complaints == []
        finally:
            process.terminate()
