"""The page about a run: whole, without the network, and with hostile model output as nothing but text."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from arriero.launchers import charts
from arriero.launchers.cli import main
from arriero.launchers.report_rollouts import group_html
from arriero.schemas.ledger import Trained
from arriero.schemas.messages import Outcome, Prompt, RolloutGroup, Score, ScoredGroup
from tests.inline_runs import recorded_grpo
from tests.toys import rollout

torch.set_num_threads(1)

HOSTILE = (
    '</pre></title></svg><script>alert(1)</script><img src=x onerror="alert(2)">'
    '" onmouseover="alert(3)" \'><svg/onload=a()>'
)


class Tags(HTMLParser):
    """All tags and attributes of a page, and its text; a tag that isn't closed in its turn is a fault."""

    VOID = ("meta", "input", "img", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {k: v or "" for k, v in attrs}))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {k: v or "" for k, v in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def assert_harmless(tags: Tags) -> None:
    names = {tag for tag, _ in tags.tags}
    assert not names & {"script", "img", "iframe", "object", "embed", "link", "base", "form", "a"}
    for tag, attributes in tags.tags:
        assert not [k for k in attributes if k.startswith("on")], (tag, attributes)
        addresses = {k: v for k, v in attributes.items() if k in ("src", "href", "data", "action", "style")}
        assert addresses == {}, (tag, addresses)


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    path = tmp_path_factory.mktemp("report")
    run = recorded_grpo(path)
    assert main(["report", str(run.path)]) == 0
    return run.path, (run.path / "report.html").read_text()


def test_the_page_of_a_run_has_all_sections_and_no_address(reported: tuple[Path, str]) -> None:
    path, text = reported
    tags = Tags(text)
    assert_harmless(tags)
    policy = [a["content"] for _, a in tags.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"]
    assert "@import" not in text
    assert "url(" not in text.replace("url(#tip)", "").replace("url(#looptip)", "")
    for section in ("Result", "Graph", "Curves", "Health", "Staleness and lengths", "Rollouts", "Lineage"):
        assert f"<h2>{section}</h2>" in text
    summary = json.loads((path / "summary.json").read_text())
    assert summary["lineage"]["head"] in tags.text
    assert "mean reward of the batch" in tags.text
    assert "staleness of a rollout's oldest token" in tags.text


def test_tokens_are_coloured_by_log_probability_version_and_advantage(reported: tuple[Path, str]) -> None:
    tags = Tags(reported[1])
    tokens = [a for tag, a in tags.tags if tag == "span" and "title" in a]
    # Three steps, two groups of each, three rollouts of each, up to five tokens.
    assert 3 * 2 * 3 <= len(tokens) <= 3 * 2 * 3 * 5
    assert all(len(a["class"].split()) == 3 for a in tokens)
    assert {a["class"].split()[2][0] for a in tokens} <= {"a", "b"}
    assert [a["id"] for name, a in tags.tags if name == "input"] == ["by-p", "by-v", "by-a"]


def test_hostile_output_stays_text() -> None:
    said = rollout(0).model_copy(update={"text": HOSTILE})
    prompt = Prompt(id="p", origins=(0,), text=HOSTILE, answer=HOSTILE)
    group = RolloutGroup(id="g", parents=("p",), origins=(0,), prompt=prompt, rollouts=(said,))
    score = Score(value=1.0, outcome=Outcome.OK, detail=HOSTILE)
    scored = ScoredGroup(id="s", parents=("g",), origins=(0,), group=group, scores=(score,))
    step = Trained(
        node="t", version=1, batch="b", origins=(0,), tokens=3, staleness_max=0, staleness_mean=0.0,
        reward_mean=1.0,
    )  # fmt: skip

    def pieces(ids: Sequence[int]) -> list[str]:
        return [HOSTILE for _ in ids]

    for number, known in ((4, None), (6, pieces)):  # prompt, answer, detail; the response, or its tokens
        tags = Tags(group_html(scored, step, {}, known))
        assert_harmless(tags)
        assert tags.text.count(HOSTILE) == number


def test_a_rollout_tells_what_each_of_its_turns_earned() -> None:
    group = RolloutGroup(id="g", prompt=Prompt(id="p", text="?"), rollouts=(rollout(0), rollout(0)))
    scores = (
        Score(value=1.25, outcome=Outcome.OK, turns=(-0.25, 1.5)),
        Score(value=0.0, outcome=Outcome.WRONG),
    )
    step = Trained(
        node="t", version=1, batch="b", origins=(0,), tokens=3, staleness_max=0, staleness_mean=0.0,
        reward_mean=1.0,
    )  # fmt: skip
    page = group_html(ScoredGroup(id="s", group=group, scores=scores), step, {}, None)
    assert "reward 1.25 (ok)" in page
    assert page.count("of its turns -0.25, 1.5") == page.count("of its turns") == 1


def test_hostile_names_stay_text_in_charts() -> None:
    drawn = charts.timeline({HOSTILE: [(0.0, 1.0, HOSTILE), (1.0, 2.0, "busy")]})
    drawn += charts.line(HOSTILE, [(1, 1.0), (2, 3.0)]) + charts.histogram(HOSTILE, [1.0, 2.0, 2.0])
    tags = Tags(drawn)
    assert_harmless(tags)
    assert tags.text.count(HOSTILE) == 4


def test_charts_bear_one_value_none_and_what_is_not_a_number() -> None:
    assert charts.line("empty", []) == charts.line("nan", [(1, math.nan)]) == ""
    assert charts.histogram("empty", []) == charts.timeline({}) == charts.timeline({"a": []}) == ""
    for drawn in (
        charts.line("one", [(1, 2.0)]),
        charts.histogram("one", [3.0]),
        charts.histogram("f", [0.5]),
    ):
        assert "nan" not in drawn
        Tags(drawn)
    bars = charts.histogram("whole", [0, 0, 1, 3])
    assert [bars.count(f"<title>{k}: {n}</title>") for k, n in ((0, 2), (1, 1), (2, 0), (3, 1))] == [1] * 4


def test_a_run_without_a_record_has_a_page_without_rollouts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorded_grpo(tmp_path, "--record", "false")
    out = tmp_path / "page.html"
    assert main(["report", str(run.path), "--out", str(out)]) == 0
    tags = Tags(out.read_text())
    assert_harmless(tags)
    assert "Curves" in tags.text
    assert "Rollouts" not in tags.text
    capsys.readouterr()
    assert main(["report", str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err
