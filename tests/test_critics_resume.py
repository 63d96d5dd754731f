"""What learns beside the policy comes back too: critics and reward models, with the run and by themselves."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# torch and safetensors annotate only a part of what is called here.

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from arriero.components.scoring_model import load_scorer
from arriero.engine.checkpoints import CheckpointStore
from arriero.engine.lineage.reader import Lineage
from arriero.engine.runtime.ledger import effective
from arriero.launchers.audit import audited
from arriero.launchers.cli import main
from arriero.schemas.ledger import Learned, Resumed
from tests.crashes import Crashing
from tests.inline_runs import saved
from tests.test_resume import equal, measured
from tests.test_scoring_models import write_pairs
from tests.tiny_models import save_tiny_llama, tiny_llama


def ppo_words(folder: Path) -> list[str]:
    """The words of a PPO run in which three updates are taken on every batch, by actor and critic."""
    rows = [json.dumps({"prompt": f"{a}+{a * 7}="}) for a in range(10)]
    (folder / "sums.jsonl").write_text("\n".join(rows))
    model = saved(tiny_llama(seed=5, scale=12.0), folder / "model")
    return [
        "--model", model, "--data", str(folder / "sums.jsonl"), *judge_words(folder),
        "--sampling.max-new-tokens", "5", "--groups-per-step", "4", "--samples", "4", "--slots", "16",
        "--optimizer.lr", "1e-3", "--checkpoints.every", "2", "--deterministic", "--inline", "--quiet",
    ]  # fmt: skip


def judge_words(folder: Path) -> list[str]:
    """Those of PPO alone; the reward model has a head of which a response's score depends."""
    head: Any = load_scorer(save_tiny_llama(folder / "bare"))[0]
    torch.manual_seed(0)
    torch.nn.init.normal_(head.score.weight)
    judge = saved(head, folder / "judge")
    return [
        "--reward-model", judge, "--minibatches", "3", "--optimizer.warmup-steps", "1",
        "--critic-optimizer.lr", "1e-3", "--critic-optimizer.warmup-steps", "1",
    ]  # fmt: skip


def run(*words: str) -> int:
    return main(["run", *words])


def kept_of(path: Path, node: str, version: int) -> dict[str, torch.Tensor]:
    """What a checkpoint of a node holds, but the random states of a process that others share."""
    place = Path(CheckpointStore(str(path / "checkpoints" / node)).place(version))
    found = {name: t for file in sorted(place.glob("*.safetensors")) for name, t in load_file(file).items()}
    return {name: t for name, t in found.items() if not name.startswith("random.")}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return (
        bool(one) and one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    )


@pytest.mark.parametrize(("staleness", "record"), [(0, "true"), (0, "false"), (1, "true")])
def test_some_steps_of_actor_and_critic_and_then_more_are_as_all_at_once(
    staleness: int, record: str, tmp_path: Path
) -> None:
    words = ["ppo", *ppo_words(tmp_path), "--staleness", str(staleness), "--record", record]
    halves, whole = tmp_path / "halves", tmp_path / "whole"
    assert run(*words, "--steps", "6", "--run-dir", str(whole)) == 0
    assert run(*words, "--steps", "3", "--run-dir", str(halves)) == 0
    assert run("--resume", str(halves), "--steps", "6", "--allow-change", "steps") == 0
    assert measured(halves) == measured(whole)
    assert equal(halves, whole)
    assert same(kept_of(halves, "critic", 6), kept_of(whole, "critic", 6))
    if record == "true":
        assert audited(str(halves)).findings == []


def test_a_critic_whose_checkpoint_is_lost_takes_the_recorded_batches_again(tmp_path: Path) -> None:
    words = ["ppo", *ppo_words(tmp_path)]
    halves, whole = tmp_path / "halves", tmp_path / "whole"
    assert run(*words, "--steps", "6", "--run-dir", str(whole)) == 0
    assert run(*words, "--steps", "3", "--run-dir", str(halves)) == 0
    shutil.rmtree(halves / "checkpoints" / "critic")
    assert run("--resume", str(halves)) == 0
    assert run("--resume", str(halves), "--steps", "6", "--allow-change", "steps") == 0
    assert measured(halves) == measured(whole)
    assert same(kept_of(halves, "critic", 6), kept_of(whole, "critic", 6))


def test_without_a_record_all_that_learns_goes_on_from_checkpoints_that_go_together(tmp_path: Path) -> None:
    words = ["ppo", *ppo_words(tmp_path), "--record", "false"]
    halves, whole = tmp_path / "halves", tmp_path / "whole"
    assert run(*words, "--steps", "5", "--run-dir", str(whole)) == 0
    assert run(*words, "--steps", "3", "--run-dir", str(halves)) == 0
    shutil.rmtree(halves / "checkpoints" / "critic" / "000000003")
    assert run("--resume", str(halves), "--steps", "5", "--allow-change", "steps") == 0
    assert measured(halves) == measured(whole)
    assert same(kept_of(halves, "critic", 5), kept_of(whole, "critic", 5))


def test_two_critics_of_turns_and_what_they_draw_from_go_on_bit_for_bit(tmp_path: Path) -> None:
    """The buffer holds what stands in the record, the second half of it from before."""
    rows = [json.dumps({"prompt": f"{a}+{a * 7}="}) for a in range(10)]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows))
    words = [
        "archer", "--model", saved(tiny_llama(seed=5, scale=12.0), tmp_path / "model"),
        "--data", str(tmp_path / "sums.jsonl"), "--environment", "user",
        "--environment.make", "tests.test_replay:Threes", "--sampling.max-new-tokens", "3",
        "--groups-per-step", "4", "--samples", "4", "--slots", "16", "--replay", "24", "--capacity", "40",
        "--critic-optimizer.lr", "1e-3", "--critic-optimizer.warmup-steps", "1", "--optimizer.lr", "1e-3",
        "--optimizer.warmup-steps", "1", "--checkpoints.every", "2", "--deterministic", "--inline", "--quiet",
    ]  # fmt: skip
    halves, whole = tmp_path / "halves", tmp_path / "whole"
    assert run(*words, "--steps", "6", "--run-dir", str(whole)) == 0
    assert run(*words, "--steps", "3", "--run-dir", str(halves)) == 0
    shutil.rmtree(halves / "checkpoints" / "critic" / "000000003")
    assert run("--resume", str(halves)) == 0  # the critics take their third step again
    assert run("--resume", str(halves), "--steps", "6", "--allow-change", "steps") == 0
    assert measured(halves) == measured(whole)
    assert equal(halves, whole)
    assert same(kept_of(halves, "critic", 6), kept_of(whole, "critic", 6))


def test_what_a_critic_learned_after_the_last_version_is_undone() -> None:
    made = [
        Learned(node="critic", version=n, batch=f"b{n}>critic", inputs=(f"b{n}",), origins=(n,))
        for n in (1, 2, 3)
    ]
    resumed = Resumed(number=1, versions={"trainer": 2}, learned={"critic": 2})
    assert effective([*made, resumed]) == made[:2]
    assert effective([*made, resumed, made[2]]) == made


def test_a_reward_model_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model = saved(tiny_llama(seed=5, scale=12.0), tmp_path / "model")
    words = [
        "reward_model", "--model", model, "--data", write_pairs(tmp_path / "pairs.jsonl"), "--pairs-per-step",
        "8", "--checkpoints.every", "2", "--optimizer.lr", "1e-3", "--optimizer.warmup-steps", "1",
        "--inline", "--quiet",
    ]  # fmt: skip
    halves, whole = tmp_path / "halves", tmp_path / "whole"
    assert run(*words, "--steps", "6", "--run-dir", str(whole)) == 0
    assert run(*words, "--steps", "3", "--run-dir", str(halves)) == 0
    assert run("--resume", str(halves), "--steps", "6", "--allow-change", "steps") == 0
    assert measured(halves) == measured(whole)
    assert equal(halves, whole)
    assert same(kept_of(halves, "trainer", 6), kept_of(whole, "trainer", 6))


@pytest.mark.timeout(300)
def test_a_killed_critic_comes_back_to_where_it_was(tmp_path: Path) -> None:
    words = [*judge_words(tmp_path), "--deterministic"]
    whole = Crashing(tmp_path, *words, name="whole", steps=8, pipeline="ppo")
    assert whole.wait() == 0, whole.errors
    broken = Crashing(tmp_path, *words, name="broken", steps=8, pipeline="ppo")
    broken.until(lambda: broken.steps() >= 4)
    broken.kill("critic")
    assert broken.wait() == 0, broken.errors
    assert "critic-0 was killed by signal 9 (SIGKILL)" in broken.errors
    s = broken.summary
    assert (s.state, s.steps, s.restarts) == ("finished", 8, {"critic-0": 1})
    assert s.groups_trained == 8 * 4
    assert [prints[-1] for _, prints in sorted(broken.fingerprints().items())] == [
        prints[-1] for _, prints in sorted(whole.fingerprints().items())
    ]
    assert same(kept_of(broken.path, "critic", 8), kept_of(whole.path, "critic", 8))
    steps = [e.version for e in Lineage(str(broken.path)).events if isinstance(e, Learned)]
    assert steps == list(range(1, 9))
    assert broken.findings() == []


@pytest.mark.timeout(300)
def test_a_critic_on_two_ranks_goes_on_with_the_whole_run(tmp_path: Path) -> None:
    words = [
        *judge_words(tmp_path),
        "--deterministic",
        "--critic-ranks",
        "2",
        "--critic-training.shards",
        "2",
    ]
    run = Crashing(tmp_path, *words, steps=6, pipeline="ppo")
    run.until(lambda: run.steps() >= 3)
    run.kill("critic")
    assert run.wait() == 0, run.errors
    s = run.summary
    assert (s.state, s.steps, s.groups_trained) == ("finished", 6, 24)
    (resumed,) = [e for e in Lineage(str(run.path)).events if isinstance(e, Resumed)]
    assert resumed.learned["critic"] == resumed.versions["trainer"] >= 2
    assert run.findings() == []
