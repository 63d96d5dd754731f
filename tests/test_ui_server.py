"""What the server of the page answers: only to who has the address, and what the record holds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import numpy as np
import pytest

from arriero.engine.lineage.reader import Lineage
from arriero.launchers.cli import main
from arriero.launchers.rundir import RunDir
from arriero.launchers.ui.record import Record
from arriero.launchers.ui.server import POLICY
from arriero.schemas.messages import ScoredGroup
from tests.ui_pages import GROUPS, HOSTILE, SIZE, asked_run, serving

STEPS = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    folder = tmp_path_factory.mktemp("runs")
    asked_run(folder / "other", seed=1, steps=STEPS)
    return asked_run(folder / "run", behind=HOSTILE, steps=STEPS)


@pytest.fixture(scope="module")
def client(run: RunDir) -> Iterator[httpx.Client]:
    with serving(run) as url, httpx.Client(base_url=url, timeout=30) as asking:
        yield asking


def got(client: httpx.Client, path: str, **query: Any) -> Any:
    answer = client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_nobody_gets_anything_without_the_token(client: httpx.Client) -> None:
    origin = str(client.base_url).removesuffix("/secret/")
    for path in ("/", "/wrong/", "/wrong/api/run", "/api/run", "/static/page.js", "//secret/"):
        answer = httpx.get(origin + path)
        assert answer.status_code == 403, path
        assert answer.headers["content-security-policy"] == POLICY
    assert client.get("", headers={"host": "elsewhere.example"}).status_code == 400
    assert client.get("static/../../server.py").status_code == 403
    assert client.get("static/%2e%2e/server.py").status_code == 404
    assert client.post("api/run").status_code == 405


def test_every_answer_forbids_what_is_not_its_own(client: httpx.Client) -> None:
    paths = ("", "static/page.js", "tokens.css", "api/run", "pictures/graph", "nowhere")
    for path in paths:
        headers = client.get(path).headers
        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
    assert "unsafe" not in POLICY


def test_the_pages_of_the_browser_hold_every_rollout_once(client: httpx.Client, run: RunDir) -> None:
    groups = Lineage(str(run.path)).groups
    expected = {f"{g.id}/{k}" for g in groups.values() for k in range(SIZE)}
    page = got(client, "api/rollouts", count=7, order="oldest")
    found = [line["id"] for line in page["lines"]]
    while page["after"] is not None:
        page = got(client, "api/rollouts", start=page["after"], count=7, order="oldest")
        found += [line["id"] for line in page["lines"]]
    assert page["total"] == len(found) == len(expected)
    assert {*found} == expected


def test_filters_and_orders_are_those_of_the_recorded_scores(client: httpx.Client, run: RunDir) -> None:
    record = Lineage(str(run.path))
    first = record.steps[0]
    names = record.batches[first.batch].groups
    scores = [v for n in names if (s := record.groups[n].scores) is not None for v in s.values]
    page = got(client, "api/rollouts", step=1, order="best")
    assert page["total"] == GROUPS * SIZE
    assert [line["reward"] for line in page["lines"]] == sorted(scores, reverse=True)
    wrong = got(client, "api/rollouts", step=1, outcome="wrong", count=200)
    assert wrong["total"] == scores.count(0.0)
    assert {line["outcome"] for line in wrong["lines"]} == {"wrong"}
    assert got(client, "api/rollouts", least=0.5, step=1)["total"] == scores.count(1.0)
    assert got(client, "api/rollouts", step=99)["lines"] == []


def test_a_search_looks_into_texts_beyond_the_first_page(client: httpx.Client) -> None:
    row = got(client, "api/rollouts", order="oldest")["lines"][-1]["row"]
    page = got(client, "api/rollouts", text=f"FOR THE {row}TH TIME")
    assert {line["row"] for line in page["lines"]} == {row}
    assert len(page["lines"]) == page["total"] / len({*range(page["total"] // SIZE)})
    assert page["after"] is None
    assert got(client, "api/rollouts", text="nowhere said")["lines"] == []


def test_a_rollout_is_shown_token_by_token_as_it_was_recorded(client: httpx.Client, run: RunDir) -> None:
    record = Lineage(str(run.path))
    step = record.steps[-1]
    batch = record.batch(step.batch)
    sample = batch.samples[1]
    group = record.group(sample.group)
    assert isinstance(group, ScoredGroup)
    number = next(k for k, r in enumerate(group.group.rollouts) if np.array_equal(r.tokens, sample.tokens))
    one = got(client, "api/rollout", id=f"{group.group.id}/{number}")
    said = group.group.rollouts[number]
    sampled = [t for t in one["tokens"] if t["logprob"] is not None]
    assert len(one["tokens"]) == len(said.tokens)
    np.testing.assert_array_equal([t["logprob"] for t in sampled], said.logprobs[said.mask])
    assert [t["version"] for t in sampled] == said.versions[said.mask].tolist()
    np.testing.assert_array_equal([t["advantage"] for t in sampled], sample.advantages[sample.mask])
    assert one["texts"]["response"] == said.text
    assert one["line"]["reward"] == group.scores[number].value
    assert one["steps"] == [step.version]
    assert [reward for _, reward in one["others"]] == [s.value for s in group.scores]


def test_the_lineage_leads_from_a_step_to_its_prompts_and_back(client: httpx.Client) -> None:
    step = got(client, "api/lineage", step=2)
    assert len(step["rollouts"]) == GROUPS * SIZE
    prompt = got(client, "api/lineage", prompt=step["prompts"][0]["id"])
    assert [s["version"] for s in prompt["steps"]] == [2]
    assert {r["prompt"] for r in prompt["rollouts"]} == {step["prompts"][0]["id"]}


def test_only_runs_beside_this_one_can_be_compared(client: httpx.Client) -> None:
    assert got(client, "api/runs") == ["other"]
    found = got(client, "api/compare", **{"with": "other"})
    assert ["optimizer.lr", 0.1, 0.2] in found["differences"]
    assert found["both"] == STEPS
    for name in ("../run", "/etc", "", "run"):
        answer = client.get("api/compare", params={"with": name})
        assert (answer.status_code, "lies beside" in answer.text) == (400, True)


@pytest.mark.parametrize(
    ("path", "query", "told"),
    [
        ("api/rollouts", {"step": "three"}, "step"),
        ("api/rollouts", {"order": "prettiest"}, "order"),
        ("api/rollouts", {"count": "1000000"}, "count"),
        ("api/rollouts", {"colour": "red"}, "colour"),
        ("api/rollout", {"id": "none"}, "no rollout 'none' is recorded"),
        ("api/lineage", {"step": "99"}, "no step 99 is recorded; there are 1 to 4"),
        ("api/lineage", {}, "ask about one of step"),
        ("pictures/distribution", {"name": "x"}, "no distribution 'x'"),
    ],
)
def test_what_can_not_be_answered_is_said_with_its_key(
    client: httpx.Client, path: str, query: dict[str, str], told: str
) -> None:
    answer = client.get(path, params=query)
    assert answer.status_code == 400
    assert told in answer.json()["error"]


def test_pictures_are_xml_whatever_the_model_has_written(client: httpx.Client) -> None:
    for path, query in (
        ("graph", {}), ("curve", {"measure": "train/reward"}), ("distribution", {"name": "lengths"}),
        ("distribution", {"name": "staleness"}), ("timeline", {}),
        ("compare", {"with": "other", "measure": "loss"}),
    ):  # fmt: skip
        answer = client.get(f"pictures/{path}", params=query)
        assert answer.status_code == 200, path
        assert answer.headers["content-type"].startswith("image/svg+xml")
        assert ElementTree.fromstring(answer.text).tag == "{http://www.w3.org/2000/svg}svg"
    assert client.get("pictures/curve", params={"measure": HOSTILE}).status_code == 204


def test_redacted_rollouts_are_listed_without_what_they_said(tmp_path: Path) -> None:
    run = asked_run(tmp_path / "run", steps=2)
    assert main(["lineage", "redact", str(run.path), "--row", "0", "--reason", "asked for"]) == 0
    with serving(run) as url, httpx.Client(base_url=url) as client:
        page = got(client, "api/rollouts", row=0)
        assert page["total"] == SIZE
        assert {line["response"] for line in page["lines"]} == {""}
        one = got(client, "api/rollout", id=page["lines"][0]["id"])
        assert (one["texts"], one["tokens"]) == (None, [])
        assert one["line"]["reward"] == page["lines"][0]["reward"]
        assert got(client, "api/rollouts", text="for the 0th time")["lines"] == []


def test_a_run_that_goes_on_after_its_end_is_read_again(run: RunDir, tmp_path: Path) -> None:
    shutil.copytree(run.path, tmp_path / "run")
    seen = Record(ended := RunDir(tmp_path / "run"))
    with seen.index() as index:
        pass
    with seen.index() as again:
        assert again is index
    ended.summary.unlink()  # as `arriero run --resume` does
    with seen.index() as again:
        assert again is not index


def test_a_damaged_record_is_said_in_a_sentence_and_the_page_goes_on(run: RunDir, tmp_path: Path) -> None:
    copy = RunDir(tmp_path / "run")
    shutil.copytree(run.path, copy.path)
    with serving(copy) as url, httpx.Client(base_url=url, timeout=30) as asking:
        (line,) = got(asking, "api/rollouts", count=1)["lines"]
        for part in (p for p in (copy.lineage / "rollouts").rglob("*") if p.is_file()):
            part.write_bytes(b"damaged")
        answer = asking.get("api/rollout", params={"id": line["id"]})
        assert answer.status_code == 500
        assert answer.json()["error"].startswith("this can't be read: ")
        assert "see arriero audit" in answer.json()["error"]
        assert got(asking, "api/run")["sections"]["Result"]


def test_the_command_says_its_address_and_leaves_on_ctrl_c(run: RunDir) -> None:
    command = [sys.executable, "-m", "arriero.launchers.cli", "ui", str(run.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        try:
            assert url.startswith("http://127.0.0.1:")
            assert len(url.split("/")[3]) >= 32
            with httpx.stream("GET", f"{url}events", timeout=30) as stream:
                first = next(line for line in stream.iter_lines() if line.startswith("data: "))
                assert json.loads(first[6:]) is None or json.loads(first[6:])["state"] == "finished"
        finally:
            process.send_signal(2)
        assert process.wait(20) == 0


def test_a_mistake_of_the_command_is_one_line(
    tmp_path: Path, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ui", str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err
    assert main(["ui", str(run.path), "--port", "high"]) == 2
    assert "--port high: a number" in capsys.readouterr().err
    assert main(["ui", str(run.path), "--host", "0.0.0.0"]) == 2
    assert "isn't understood" in capsys.readouterr().err
