"""V-trace: by its definition, in a critic, and with log-probabilities of the version that is trained."""

# pyright: reportUnknownMemberType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from arriero.components.advantages import vtrace, whitened_tokens
from arriero.components.critic import Critic, VTraceClips
from arriero.components.policy_logprobs import PolicyLogprobs
from arriero.components.reference import ReferenceLogprobs
from arriero.engine.lineage.reader import Lineage
from arriero.engine.runtime.guard import Ahead
from arriero.launchers.cli import main
from arriero.launchers.rundir import RunDir
from arriero.schemas.messages import Batch
from tests.batches import random_batch
from tests.critics import judged
from tests.drive import Alone
from tests.inline_runs import policy_gradient_fields, tiny_model
from tests.test_guard import batch as toy_batch
from tests.test_guard import scored
from tests.test_ledger import dropped, trained

torch.set_num_threads(1)


def by_definition(
    rewards: Sequence[float], values: Sequence[float], ratios: Sequence[float], *, gamma: float, after: float
) -> list[float]:
    """Equation 1 of arXiv:1802.01561 as it stands, both clips 1: sums over products of traces."""
    n = len(rewards)
    ahead = [*values, after]
    targets: list[float] = []
    for s in range(n):
        target, product = values[s], 1.0
        for t in range(s, n):
            delta = min(1.0, ratios[t]) * (rewards[t] + gamma * ahead[t + 1] - values[t])
            target += gamma ** (t - s) * product * delta
            product *= min(1.0, ratios[t])
        targets.append(target)
    return targets


def test_vtrace_has_the_targets_of_its_definition() -> None:
    rng = np.random.default_rng(0)
    rewards, values, ratios = rng.normal(size=7), rng.normal(size=7), np.exp(rng.normal(size=7))
    expected = by_definition([*rewards], [*values], [*ratios], gamma=0.9, after=0.7)
    found = vtrace(rewards, values, ratios, gamma=0.9, bootstrap=0.7)
    np.testing.assert_allclose(found.targets, expected, atol=1e-12)


def test_vtrace_by_hand() -> None:
    # delta is 0.5 (1 - 0.25) = 0.375 at the last step and 0.25 - 0.5 = -0.25 at the first, whose trace is 1.
    found = vtrace([0, 1], [0.5, 0.25], [2, 0.5], gamma=1.0, clip_advantage=None)
    assert found.targets.tolist() == [0.625, 0.625]
    assert found.advantages.tolist() == [0.125, 0.75]
    weighed = vtrace([0, 1], [0.5, 0.25], [2, 0.5], gamma=1.0)
    assert weighed.advantages.tolist() == [0.125, 0.375]


def test_on_fresh_data_the_targets_are_the_n_step_returns() -> None:
    rewards = [0.25, -1.0, 2.0]
    found = vtrace(rewards, [9.0, -3.0, 5.0], [1, 1, 1], gamma=0.5, bootstrap=4.0)
    assert found.targets.tolist() == [0.25 - 0.5 + 0.5 + 0.5, -1.0 + 1.0 + 1.0, 2.0 + 2.0]


def read_by_the_policy(batch: Batch, log_ratio: float) -> Batch:
    """The policy finds every token so many nats likelier than who sampled it."""
    samples = tuple(
        s.model_copy(update={"policy": (s.logprobs + np.float32(log_ratio)).astype(np.float32)})
        for s in batch.samples
        if s.logprobs is not None
    )
    return Batch(id="b", samples=samples)


@pytest.mark.parametrize("whiten", [False, True])
async def test_a_critic_corrects_by_the_ratio_of_the_policy_to_who_sampled(
    whiten: bool, tmp_path: Path
) -> None:
    batch = read_by_the_policy(random_batch([6, 4], prompt=2, seed=1), np.log(0.5))
    critic = Critic(
        model=tiny_model(tmp_path), steps=1, gamma=0.9, lam=1.0, vtrace=VTraceClips(), whiten=whiten
    )
    (found,) = await judged(critic, [batch])
    # A new head gives 0, so the last target is half the reward, and each one before 0.45 of the next. What a
    # token earned is the reward, or what the token after it is worth.
    expected: list[list[float]] = []
    for s in batch.samples:
        targets = [0.5 * s.reward * 0.45**k for k in range(int(s.mask.sum()) - 1, -1, -1)]
        expected.append([*(0.9 * v for v in targets[1:]), s.reward])
    rows = whitened_tokens(expected) if whiten else [np.array(row) for row in expected]
    for sample, row in zip(found.samples, rows, strict=True):
        np.testing.assert_allclose(sample.advantages[sample.mask], row, atol=1e-5)
        assert sample.policy is None  # the trainer has its own
    assert found.parents == ("b",)


async def test_a_ratio_beyond_all_numbers_is_cut_as_any_other(tmp_path: Path) -> None:
    batch = read_by_the_policy(random_batch([6, 4], prompt=2, seed=1), 800.0)
    critic = Critic(model=tiny_model(tmp_path), steps=1, lam=1.0, vtrace=VTraceClips(), whiten=False)
    (found,) = await judged(critic, [batch])
    for s in found.samples:
        assert s.advantages[s.mask].tolist() == [s.reward] * int(s.mask.sum())


async def test_the_price_of_a_nat_is_that_of_the_policy_of_now(tmp_path: Path) -> None:
    batch = read_by_the_policy(random_batch([2], seed=1), 0.25)
    (sample,) = batch.samples
    batch = batch.model_copy(update={"samples": (sample.model_copy(update={"reference": sample.logprobs}),)})
    critic = Critic(model=tiny_model(tmp_path), steps=1, kl=0.5, vtrace=VTraceClips(), whiten=False)
    (found,) = await judged(critic, [batch])
    assert found.samples[0].advantages[1] == pytest.approx(sample.reward - 0.5 * 0.25, abs=1e-6)


def test_a_correction_and_who_reads_for_it_come_together(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    reader = PolicyLogprobs(model=model)
    plain, corrected = Critic(model=model, steps=1), Critic(model=model, steps=1, vtrace=VTraceClips())
    assert list(corrected.problems(Alone(reader))) == list(plain.problems(Alone())) == []
    (lacks,) = corrected.problems(Alone(ReferenceLogprobs(model=model)))
    assert lacks == "vtrace needs log-probabilities of the policy; put a PolicyLogprobs before the critic"
    (unread,) = plain.problems(Alone(reader))
    assert unread.startswith("what PolicyLogprobs reads is of use to vtrace alone; set it")
    (missing,) = PolicyLogprobs(model=str(tmp_path / "nowhere")).problems(Alone())
    assert "nowhere" in missing


async def test_a_node_waits_until_what_it_gave_is_trained_or_dropped() -> None:
    ahead, over = Ahead("trainer"), asyncio.Event()
    assert await ahead.none_under_way(over) == 0
    ahead.gave(toy_batch(scored(0, 0)))
    waiting = asyncio.create_task(ahead.none_under_way(over))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    ahead.apply(trained(1, 0))
    assert await asyncio.wait_for(waiting, 1) == 1
    ahead.gave(toy_batch(scored(1, 1)))
    ahead.apply(dropped(1))
    assert await asyncio.wait_for(ahead.none_under_way(over), 1) == 1
    ahead.gave(toy_batch(scored(2, 1)))
    over.set()  # the trainer has ended, and nobody will train it
    assert await asyncio.wait_for(ahead.none_under_way(over), 1) == 1


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Four steps on 8 groups of two responses, up to two versions old."""
    path = tmp_path_factory.mktemp("vtrace")
    policy_gradient_fields(path)
    words = ["run", "vtrace", "--model", str(path / "tiny"), "--data", str(path / "sums.jsonl"), "--inline"]
    words += ["--reward", "contains", "--reward.text", "3", "--sampling.max-new-tokens", "5", "--steps", "4"]
    words += ["--groups-per-step", "8", "--samples", "2", "--slots", "16", "--optimizer.lr", "1e-2"]
    words += ["--critic-optimizer.lr", "1e-2", "--staleness", "2", "--deterministic", "--quiet"]
    assert main([*words, "--run-dir", str(path / "run"), "--wait-bound-s", "60"]) == 0
    return RunDir(path / "run")


def test_the_policy_is_read_with_the_version_that_the_batch_trains(recorded: RunDir) -> None:
    steps = [json.loads(line) for line in recorded.metrics.read_text().splitlines()]
    record = Lineage(str(recorded.path))
    batches = [record.batch(k) for k, b in record.batches.items() if b.edge == "policy"]
    assert len(batches) == len(steps) == 4
    for step, batch in zip(steps, batches, strict=True):
        ratios = [
            (s.policy - s.logprobs)[s.mask]
            for s in batch.samples
            if s.policy is not None and s.logprobs is not None
        ]
        log_ratio = np.concatenate(ratios).astype(np.float64)
        # What the trainer measures with its own weights, before the update.
        assert step["kl"] == pytest.approx(np.mean(np.exp(log_ratio) - 1 - log_ratio), abs=1e-7)
        assert step["mismatch"] == pytest.approx(np.abs(log_ratio).mean(), abs=1e-5)
    assert [s["staleness_max"] for s in steps] == [0, 1, 2, 2]
    assert steps[-1]["mismatch"] > 0.01  # or there would be nothing to correct


def test_what_cannot_be_computed_again_is_said_and_the_rest_audited(
    recorded: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(shutil.copytree(recorded.path, tmp_path / "run"))
    assert main(["audit", run]) == 0
    said = capsys.readouterr().out
    assert "not checked: advantages of policy: PolicyLogprobs can't be run again by itself" in said
    assert "not checked: advantages of critic: Critic can't be run again by itself" in said
    assert main(["lineage", "redact", run, "--all"]) == 0
    record = Lineage(run)
    (first, *_) = [record.batch(k) for k, b in record.batches.items() if b.edge == "policy"]
    assert all(s.policy is not None and not s.policy[s.mask].any() for s in first.samples)
    assert main(["audit", run]) == 0
