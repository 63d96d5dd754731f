"""pass@k, intervals and reports of held-out prompts; `arriero eval` on a model, and its mistakes."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest

from arriero.launchers.cli import main
from arriero.launchers.evaluations import Evaluations, evaluation_table, pass_at_k, share_estimate
from arriero.schemas.ledger import Admitted, DroppedEvent, Evaluated
from arriero.schemas.messages import Outcome, Prompt, Rollout
from tests import engines
from tests.engines import needs_vllm
from tests.inline_runs import peaked_model

OK, WRONG, ERROR = Outcome.OK, Outcome.WRONG, Outcome.ERROR


@pytest.mark.parametrize(("samples", "right"), [(4, 0), (4, 1), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_one(samples: int, right: int) -> None:
    for k in range(1, samples + 1):
        chosen = list(combinations([i < right for i in range(samples)], k))
        assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, chosen)) / len(chosen), abs=1e-12)


def test_pass_at_k_has_the_published_value() -> None:
    # 1 - C(7, 5) / C(10, 5), by the estimator of Chen et al., section 2.1.
    assert pass_at_k(10, 3, 5) == pytest.approx(1 - 21 / 252)
    with pytest.raises(ValueError, match="pass@3 of 2 rollouts, 1 of them right, isn't defined"):
        pass_at_k(2, 1, 3)


def test_one_rollout_per_prompt_has_the_interval_of_wilson() -> None:
    # statsmodels: proportion_confint(8, 10, method="wilson").
    found = share_estimate([1.0] * 8 + [0.0] * 2, 10)
    assert (found.low, found.high) == pytest.approx((0.4901625, 0.9433178), abs=1e-5)


def test_rollouts_of_one_prompt_that_agree_count_once() -> None:
    alike = share_estimate([1.0] * 8 + [0.0] * 2, 100)  # ten rollouts each, all alike
    assert alike == share_estimate([1.0] * 8 + [0.0] * 2, 10)
    apart = share_estimate([0.8, 0.7, 0.9, 0.8] * 5, 200)
    assert apart.high - apart.low < alike.high - alike.low
    none = share_estimate([0.0] * 6, 24)
    assert none.low == 0.0
    assert 0.3 < none.high < 0.5  # six prompts without a right rollout don't prove that there is none


def sent(origin: int, version: int, source: str = "a") -> Admitted:
    return Admitted(
        id=f"p{origin}@{version}", origin=origin, split="eval", epoch=0, row=0, min_version=version,
        source=source,
    )  # fmt: skip


def back(origin: int, version: int, *outcomes: Outcome, source: str = "a", length: int = 3) -> Evaluated:
    return Evaluated(
        id=f"p{origin}@{version}", origin=origin, version=version, outcomes=outcomes,
        source=source, values=tuple(float(o is OK) for o in outcomes), truncated=1,
        lengths=(length,) * len(outcomes),
    )  # fmt: skip


def test_a_report_counts_what_came_back_and_what_didnt() -> None:
    found = Evaluations()
    assert found.newest() == {}
    for origin in (-1, -2, -3):
        found.event(sent(origin, 2))
    found.event(back(-1, 2, OK, WRONG))
    found.event(back(-2, 2, ERROR, WRONG))
    found.event(DroppedEvent(node="generator", parent="p", origins=(-3,), reason="too_long"))
    (report,) = found.report(2)
    assert (report.prompts, report.samples, report.missing) == (2, 4, 1)
    assert (report.no_verdict, report.truncated) == (1, 2)
    assert {k: e.value for k, e in report.pass_at.items()} == {1: 0.25, 2: 0.5}
    assert report.avg is not None
    assert report.length is not None
    assert (report.avg.value, report.length.value) == (0.25, 3.0)
    newest = found.newest()
    assert (newest["version"], newest["pass@1"], newest["prompts"]) == (2, 0.25, 2)


def test_what_is_missing_is_told_of_its_own_data_set() -> None:
    found = Evaluations()
    for origin, source in ((-1, "a"), (-2, "b"), (-3, "b")):
        found.event(sent(origin, 0, source))
    found.event(back(-1, 0, OK, source="a"))
    found.event(back(-2, 0, OK, source="b"))
    found.event(DroppedEvent(node="generator", parent="p", origins=(-3,), reason="too_long"))
    assert {r.source: r.missing for r in found.report(0)} == {"": 1, "a": 0, "b": 1}


def test_a_data_set_of_which_nothing_came_back_has_a_line_and_no_mean() -> None:
    found = Evaluations()
    for origin, source in ((-1, "a"), (-2, "b"), (-3, "b")):
        found.event(sent(origin, 20, source))
    found.event(back(-1, 20, OK, source="a"))
    found.event(DroppedEvent(node="generator", parent="p", origins=(-2, -3), reason="too_long"))
    whole, a, b = found.report(20)
    assert (whole.prompts, whole.missing, a.missing) == (1, 2, 0)
    assert (b.source, b.prompts, b.missing, b.pass_at, b.avg, b.length) == ("b", 0, 2, {}, None, None)
    lines = evaluation_table(found.report(20)).splitlines()
    assert lines[3].split() == ["20", "b", "0", "0", "-", "-", "-", "-", "2"]


def test_a_version_of_which_nothing_came_back_is_reported_all_the_same() -> None:
    found = Evaluations()
    found.event(sent(-1, 3))
    found.event(DroppedEvent(node="generator", parent="p", origins=(-1,), reason="too_long"))
    assert found.versions == [3]
    assert [(r.source, r.prompts, r.missing) for r in found.report(3)] == [("", 0, 1)]
    assert found.newest() == {}


def test_lengths_that_nobody_told_are_no_lengths() -> None:
    found = Evaluations()
    found.event(sent(-1, 0))
    found.event(back(-1, 0, OK).model_copy(update={"lengths": ()}))
    (report,) = found.report(0)
    assert report.length is None


def test_several_data_sets_are_reported_apart_too() -> None:
    found = Evaluations()
    for k, source in enumerate(["b", "a", "b"]):
        found.event(sent(-1 - k, 0, source))
        found.event(back(-1 - k, 0, OK if source == "a" else WRONG, source=source))
    assert [(r.source, r.prompts, r.pass_at[1].value) for r in found.report(0)] == [
        ("", 3, 1 / 3), ("a", 1, 1.0), ("b", 2, 0.0),
    ]  # fmt: skip
    lines = evaluation_table(found.report(0)).splitlines()
    assert [line.split()[1] for line in lines] == ["data", "all", "a", "b"]


def test_a_model_is_evaluated_on_all_rows_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = peaked_model(tmp_path / "model")
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": "3"}) + "\n" for i in range(3)))
    given = ["--data", str(data), "--reward", "contains", "--reward.text", "3", "--samples", "4"]
    run = tmp_path / "run"
    words = ["eval", model, *given, "--sampling.max-new-tokens", "4", "--inline", "--json"]
    assert main([*words, "--run-dir", str(run)]) == 0
    told = json.loads(capsys.readouterr().out)
    (report,) = told["reports"]
    assert (report["prompts"], report["samples"], report["missing"]) == (3, 12, 0)
    assert {*report["pass_at"]} == {"1", "2", "4"}
    assert told == json.loads((run / "evaluation.json").read_text())
    assert len(told["weights_sha256"]) == 64
    kinds = [json.loads(line)["kind"] for line in (run / "ledger.jsonl").read_text().splitlines()]
    assert kinds.count("evaluated") == 3
    assert not {"trained", "dropped"} & {*kinds}


def test_an_evaluation_decodes_with_the_engine_that_it_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    words = ["evaluate", "--model", peaked_model(tmp_path / "model"), "--data", str(data), "--engine", "vllm"]
    assert main(["check", *words, "--sampling.max-new-tokens", "4", "--vllm.tensor-parallel", "2"]) == 0
    told = capsys.readouterr().out
    assert "vllm" in told
    assert main(["check", *words[:-1], "transformers", "--vllm.tensor-parallel", "2"]) == 2
    assert "set engine=vllm or leave these out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["eval"], "eval needs a model or run directory first"),
        (
            ["eval", "/nowhere", "--data", "d.jsonl"],
            "/nowhere: no such directory; eval takes a model directory or the directory of a run",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert told in capsys.readouterr().err


def test_a_run_in_an_environment_is_evaluated_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a reward without turns the model would look better or worse than it was trained to be."""
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(4)))
    words = ["--model", peaked_model(tmp_path / "model"), "--data", str(data), "--data.held-out", "2"]
    words += [
        "--environment.kind",
        "question",
        "--environment.attempts",
        "2",
        "--samples",
        "4",
        "--slots",
        "8",
    ]
    words += ["--turns", "3", "--sampling.max-new-tokens", "3", "--inline", "--quiet"]
    run, more = tmp_path / "run", ["--groups-per-step", "2", "--steps", "1", "--environment.discount", "0.5"]
    assert main(["run", "archer", *words, *more, "--run-dir", str(run)]) == 0
    capsys.readouterr()
    where = ["--inline", "--json", "--samples", "2", "--run-dir", str(tmp_path / "eval")]
    assert main(["eval", str(run), *where]) == 0
    (report,) = json.loads(capsys.readouterr().out)["reports"]
    assert (report["prompts"], report["samples"], report["version"]) == (2, 4, 1)
    graph = json.loads((tmp_path / "eval" / "graph.json").read_text())
    (episodes,) = [n["config"] for n in graph["nodes"] if "environment" in n["config"]]
    assert (episodes["turns"], episodes["environment"]["attempts"]) == (3, 2)
    assert main(["eval", str(run), "--reward", "contains", "--reward.text", "3", *where, "--overwrite"]) == 2
    assert "reward and environment are both set" in capsys.readouterr().err


def test_a_template_in_jinja_may_stand_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    words = ["check", "grpo", "--model", peaked_model(tmp_path / "model"), "--data", str(data)]
    words += ["--sampling.max-new-tokens", "4"]
    assert main([*words, "--chat", "{{ messages[0].content }}"]) == 0
    assert "{{ messages[0].content }}" in capsys.readouterr().out
    assert main([*words, "--chat", '{"template": ']) == 2
    assert "is not JSON" in capsys.readouterr().err


def test_the_list_names_what_can_be_trained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert "grpo" in [line.split()[0] for line in told]
    assert "evaluate" not in [line.split()[0] for line in told]


def fingerprint(prompt: Prompt, rollout: Rollout) -> float:
    """Another number for nearly any other text."""
    return sum(k * ord(c) for k, c in enumerate(rollout.text, start=1)) / 1000


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("split", [1, 2])
def test_vllm_gives_the_same_greedy_evaluation(split: int, tmp_path: Path) -> None:
    """As the embedded engine does, response by response; also with the model on two processes."""
    model, data = (
        engines.saved(engines.small_llama(ends=True), tmp_path / "m", ends=True),
        tmp_path / "d.jsonl",
    )
    data.write_text("".join(json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(6)))
    words = ["eval", model, "--data", str(data), "--reward", "function", "--reward.isolate", "false"]
    words += ["--reward.function", "tests.test_evaluations:fingerprint", "--samples", "1", "--slots", "4"]
    words += ["--sampling.greedy", "true", "--sampling.max-new-tokens", "12", "--inline", "--quiet"]
    found = list[dict[str, object]]()
    for name, more in {"transformers": [], "vllm": ["--vllm.tensor-parallel", str(split)]}.items():
        run = tmp_path / name
        assert main([*words, "--engine", name, *more, "--run-dir", str(run)]) == 0
        events = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
        found.append({e["id"]: (e["values"], e["lengths"]) for e in events if e["kind"] == "evaluated"})
        report = json.loads((run / "evaluation.json").read_text())["reports"][0]
        assert (report["prompts"], report["no_verdict"]) == (6, 0)
    assert len(found[0]) == 6
    assert found[0] == found[1]
