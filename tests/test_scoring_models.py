"""Critic and reward model: read at the right place, by hand, and learning."""

# pyright: reportUnknownMemberType=false
# torch and transformers annotate only a part of what is called here.

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from arriero.components.advantages import gae, whitened_tokens
from arriero.components.critic import Critic
from arriero.components.losses import AIPO, value_loss
from arriero.components.optimizer import AdamW
from arriero.components.packing import PackedTokens
from arriero.components.preferences import PreferenceBatch, PreferenceSource
from arriero.components.reference import ReferenceLogprobs
from arriero.components.reward_model import RewardModel, RewardTrainer
from arriero.components.scoring_model import ScoringState, load_scorer, read_at_the_end
from arriero.components.trainer import Trainer
from arriero.components.training_options import Average, LoRA, TrainingOptions
from arriero.components.utterance_critic import UtteranceCritic
from arriero.engine.errors import GraphError
from arriero.engine.graph import Graph
from arriero.pipelines.aipo import AIPOConfig, aipo
from arriero.pipelines.distill import DistillConfig, distill
from arriero.pipelines.ppo import PPOConfig, ppo
from arriero.pipelines.reward_model import RewardModelConfig, reward_model
from arriero.schemas.messages import Batch, Sample
from tests.batches import random_batch, random_sample
from tests.critics import judged
from tests.drive import Alone
from tests.inline_runs import policy_gradient_fields, steps_of, tiny_model, with_a_score
from tests.tiny_models import tiny_tokenizer

torch.set_num_threads(1)


def scoring(model: str, *, token_budget: int = 40) -> ScoringState:
    """A scoring model with a head that isn't 0."""
    loaded, _ = load_scorer(model)
    head: Any = loaded
    torch.manual_seed(0)
    torch.nn.init.normal_(head.score.weight)
    # An eps this large keeps Adam from turning the sign of a rounding error into a whole step.
    return ScoringState(loaded, optimizer=AdamW(lr=1e-2, eps=1e-3), steps=9, token_budget=token_budget)


def test_a_new_head_gives_nothing_at_all(tmp_path: Path) -> None:
    model, _ = load_scorer(tiny_model(tmp_path))
    state = ScoringState(model, optimizer=AdamW(), steps=1, token_budget=64)
    assert all((v == 0).all() for v in state.values(random_batch([9, 4, 7]).samples))


def test_a_value_is_read_at_the_position_before_its_token(tmp_path: Path) -> None:
    state = scoring(tiny_model(tmp_path))
    samples = random_batch([12, 3, 30, 7], prompt=2).samples
    head: Any = state.model
    for sample, values in zip(samples, state.values(samples), strict=True):
        with torch.no_grad():
            hidden: Tensor = head.model(input_ids=torch.tensor([sample.tokens.tolist()])).last_hidden_state[0]
            expected = head.score(hidden)[:-1, 0][torch.tensor(sample.mask[1:].tolist())]
        np.testing.assert_allclose(values, expected, atol=1e-5)


def test_a_padding_token_at_the_end_of_a_response_is_read_all_the_same(tmp_path: Path) -> None:
    # ROLL 1f9d2171: with eos == pad, code that looks for the last token that isn't padding stops too early.
    state = scoring(tiny_model(tmp_path))
    tokens = np.array([1, 2, 2, 42 % 32, 3, 5, 0], np.int32)
    sample = random_sample(7).model_copy(update={"tokens": tokens, "logprobs": None, "versions": None})
    ended, longer = read_at_the_end(sample), read_at_the_end(random_sample(20, seed=3))
    assert ended.mask.tolist() == [False] * 7 + [True]
    head: Any = state.model
    with torch.no_grad():
        expected: Tensor = head.score(head.model(input_ids=torch.tensor([tokens.tolist()])).last_hidden_state)
    assert state.values([ended, longer])[0][0] == pytest.approx(float(expected[0, -1, 0]), abs=1e-5)


def test_the_step_of_a_scoring_model_ignores_how_it_is_cut(tmp_path: Path) -> None:
    samples = random_batch([12, 3, 30, 7], prompt=2).samples

    def squared(values_T: Tensor, tokens: PackedTokens) -> Tensor:
        return value_loss(values_T, tokens.advantages_T)

    whole, cut = (scoring(tiny_model(tmp_path), token_budget=b) for b in (4096, 1))
    losses = [(whole.step(samples, squared)["loss"], cut.step(samples, squared)["loss"]) for _ in range(6)]
    for ours, theirs in losses:
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert losses[-1][0] < 0.8 * losses[0][0]


async def test_the_first_advantages_of_a_critic_are_those_of_values_that_are_zero(tmp_path: Path) -> None:
    batch = random_batch([5, 4], prompt=2).model_copy(update={"id": "b"})
    samples = tuple(
        s.model_copy(update={"reward": r, "reference": np.where(s.mask, -3.0, np.nan).astype(np.float32)})
        for s, r in zip(batch.samples, (1.0, -1.0), strict=True)
    )
    critic = Critic(model=tiny_model(tmp_path), steps=1, lam=0.5, kl=0.1)
    (found,) = await judged(critic, [batch.model_copy(update={"samples": samples})])
    raw: list[list[float]] = []
    for s in samples:
        assert s.logprobs is not None
        ahead = 0.0
        advantages: list[float] = []
        for t, logprob in reversed(list(enumerate(s.logprobs[s.mask]))):
            last = t == int(s.mask.sum()) - 1
            ahead = -0.1 * (float(logprob) + 3.0) + (s.reward if last else 0.0) + 0.5 * ahead
            advantages.insert(0, ahead)
        raw.append(advantages)
    for s, expected in zip(found.samples, whitened_tokens(raw), strict=True):
        np.testing.assert_allclose(s.advantages[s.mask], expected, atol=1e-5)
        assert (s.advantages[~s.mask] == 0).all()
    assert found.parents == ("b",)


@pytest.mark.parametrize("bootstrap", [False, True])
async def test_a_response_that_was_cut_off_may_go_on_with_its_value(tmp_path: Path, bootstrap: bool) -> None:
    state = scoring(tiny_model(tmp_path / "tiny"))
    parts: tuple[Any, Any] = (state.model, tiny_tokenizer())  # `save_pretrained` is partly untyped
    for part in parts:
        part.save_pretrained(tmp_path / "critic")
    samples = tuple(
        s.model_copy(update={"truncated": i == 0})
        for i, s in enumerate(random_batch([6, 9], prompt=2).samples)
    )
    critic = Critic(model=str(tmp_path / "critic"), steps=1, gamma=0.9, lam=0.8, bootstrap=bootstrap)
    (found,) = await judged(critic, [Batch(id="b", samples=samples)])
    values, ends = state.values(samples), state.values([read_at_the_end(s) for s in samples])
    expected = whitened_tokens(
        [
            gae(
                np.append(np.zeros(len(v) - 1), s.reward),
                v,
                gamma=0.9,
                lam=0.8,
                bootstrap=float(end[0]) if s.truncated and bootstrap else 0.0,
            )
            for s, v, end in zip(samples, values, ends, strict=True)
        ]
    )
    for s, ours in zip(found.samples, expected, strict=True):
        np.testing.assert_allclose(s.advantages[s.mask], ours, atol=1e-4)


async def test_a_critic_learns_what_a_reward_depends_on(tmp_path: Path) -> None:
    # The reward is known from the prompt, so a right critic leaves no advantage in it but its own error.
    def told(first: int, reward: float, seed: int) -> Sample:
        sample = random_sample(6, prompt=3, seed=seed)
        tokens = sample.tokens.copy()
        tokens[:3] = first
        return sample.model_copy(update={"tokens": tokens, "reward": reward, "reference": None})

    batches = [
        Batch(id=f"b{i}", samples=tuple(told(5 + j % 2, float(j % 2), 16 * i + j) for j in range(16)))
        for i in range(40)
    ]
    critic = Critic(model=tiny_model(tmp_path), steps=40, optimizer=AdamW(lr=1e-2), clip=9.0, epochs=2)
    found = await judged(critic, batches)

    def gap(batch: Batch) -> float:
        """Difference of the mean advantages of samples with reward 1 and 0."""
        means = [
            float(np.mean([s.advantages[s.mask].mean() for s in batch.samples if s.reward == r]))
            for r in (0, 1)
        ]
        return means[1] - means[0]

    assert gap(found[0]) > 1.9
    assert abs(np.mean([gap(b) for b in found[-10:]])) < 0.6


async def test_a_batch_of_one_token_has_an_advantage_all_the_same(tmp_path: Path) -> None:
    # Nothing to whiten it by: reward 1, value 0.
    (single,) = random_batch([2]).samples
    batch = Batch(id="b", samples=(single.model_copy(update={"reward": 1.0}),))
    critic = Critic(model=tiny_model(tmp_path), steps=1)
    (found,) = await judged(critic, [batch])
    assert found.samples[0].advantages.tolist() == [0.0, 1.0]


def test_the_schedule_of_a_critic_is_over_all_its_updates(tmp_path: Path) -> None:
    falling = AdamW(lr=1e-2, schedule="linear", warmup_steps=3)
    critic = Critic(model=tiny_model(tmp_path), steps=2, epochs=4, optimizer=falling)
    assert list(critic.problems(Alone())) == []
    state = critic._load(1)  # pyright: ignore[reportPrivateUsage]  # what a run trains

    def update() -> float:
        return state.step(random_batch([5]).samples, lambda v, t: value_loss(v, t.advantages_T))["lr"]

    # Three steps up, then down to 0 behind the last of 2 * 4.
    assert [update() for _ in range(8)] == pytest.approx(
        [1e-2 * x for x in (1 / 3, 2 / 3, 1, 1, 0.8, 0.6, 0.4, 0.2)]
    )


def test_a_response_that_fills_the_context_is_scored(tmp_path: Path) -> None:
    state = scoring(tiny_model(tmp_path), token_budget=1024)
    full = state.model.config.max_position_embeddings
    (score,) = state.values([read_at_the_end(random_sample(full))])
    assert np.isfinite(score).all()
    with pytest.raises(ValueError, match=f"{full + 1} tokens to read; the context is {full}"):
        state.values([read_at_the_end(random_sample(full + 1))])


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    # A head of zeros would give every response the reward 0, and ppo would learn nothing without a word.
    bare = tiny_model(tmp_path / "bare")
    (problem,) = RewardModel(model=bare).problems(Alone())
    assert "has no head of one score (score.weight)" in problem
    assert "train one with the pipeline reward_model" in problem
    assert list(RewardModel(model=with_a_score(tmp_path / "judge")).problems(Alone())) == []


@pytest.mark.parametrize("reader", [RewardModel, ReferenceLogprobs])
def test_a_reader_with_other_tokens_than_the_policy_is_a_problem(
    reader: type[RewardModel | ReferenceLogprobs], tmp_path: Path
) -> None:
    other = with_a_score(tmp_path / "judge", vocab_size=40)
    policy = Trainer(model=tiny_model(tmp_path / "tiny"), loss=AIPO(), steps=1)
    (problem,) = reader(model=other).problems(Alone(policy))
    assert f"{other} has 40 tokens and {policy.model} 32" in problem
    assert list(reader(model=with_a_score(tmp_path / "same")).problems(Alone(policy))) == []


def test_a_warmup_longer_than_the_run_is_a_problem(tmp_path: Path) -> None:
    model, slow = tiny_model(tmp_path), AdamW(warmup_steps=9)
    for component in (
        Trainer(model=model, loss=AIPO(), steps=8, optimizer=slow),
        Critic(model=model, steps=4, epochs=2, optimizer=slow),
        UtteranceCritic(model=model, steps=2, updates=4, optimizer=slow),
        RewardTrainer(model=model, steps=8, optimizer=slow),
    ):
        lines = [line for line in component.problems(Alone()) if "warmup" in line]
        assert len(lines) == 1
        assert lines[0].startswith(
            "optimizer.warmup_steps=9 are more than the 8 steps of the run, so lr=1e-06 is"
        )


def test_a_critic_whose_price_has_no_reference_is_a_problem(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    (problem,) = Critic(model=model, steps=1, kl=0.1).problems(Alone())
    assert "put a ReferenceLogprobs before" in problem
    assert list(Critic(model=model, steps=1).problems(Alone())) == []


def test_a_critic_has_one_replica_and_no_option_that_its_head_has_no_use_for(
    tmp_path: Path,
) -> None:
    model = tiny_model(tmp_path)
    data = PreferenceSource(path=write_pairs(tmp_path / "pairs.jsonl"))
    g = Graph("twice")
    batches = g.add(PreferenceBatch(model=model, pairs=4, max_length=64), name="batch")(g.add(data)())
    judged = g.add(Critic(model=model, steps=1), name="critic", replicas=2)(batches)
    g.add(RewardTrainer(model=model, steps=1), name="trainer")(judged)
    with pytest.raises(GraphError, match="critic: it learns, so it has one replica, not 2; use ranks"):
        g.check()
    odd = TrainingOptions(shards=2, logits_mb=64, average=Average(decay=0.9), lora=LoRA(rank=2))
    shards, lora, logits, average = Critic(model=model, steps=1, training=odd).problems(Alone())
    assert shards.startswith("training.shards=2 doesn't divide ranks=1")
    assert lora.startswith("training.lora.rank=2: a new head is trained as a whole")
    assert logits.startswith("training.fp32_logits and training.logits_mb are for logits")
    assert average.startswith("training.average.decay=0.9, used_for=save: nothing is saved or published")
    kept = TrainingOptions(average=Average(decay=0.9))
    assert list(RewardTrainer(model=model, steps=1, training=kept).problems(Alone())) == []


def write_pairs(path: Path) -> str:
    """Of two random numbers the one with more threes is chosen."""
    draw = random.Random(0)
    rows: list[dict[str, str]] = []
    while len(rows) < 100:
        pair = ["".join(draw.choices("0123456789", k=5)) for _ in range(2)]
        rejected, chosen = sorted(pair, key=lambda text: text.count("3"))
        if chosen.count("3") > rejected.count("3"):
            rows.append({"prompt": f"{len(rows)}=", "chosen": chosen, "rejected": rejected})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_ppo_raises_the_score_of_a_reward_model_that_learned_from_pairs(tmp_path: Path) -> None:
    fields = policy_gradient_fields(tmp_path, samples=8)
    del fields["reward"]
    config = RewardModelConfig(
        model=fields["model"],
        data=PreferenceSource(path=write_pairs(tmp_path / "pairs.jsonl")),
        optimizer=AdamW(lr=3e-3),
        steps=30,
        pairs_per_step=16,
    )
    spec = reward_model(config).check()
    assert Graph.from_spec(spec).check().digest == spec.digest
    judged = steps_of(reward_model(config), tmp_path / "judge")
    assert judged[0]["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert np.mean([s["accuracy"] for s in judged[-5:]]) > 0.9
    actor = PPOConfig(
        **fields, reward_model=str(tmp_path / "judge" / "model"), critic_optimizer=AdamW(lr=3e-3)
    )
    scores = [s["reward"] for s in steps_of(ppo(actor), tmp_path / "run")]
    assert np.mean(scores[-3:]) > scores[0] + 1.0


def test_distillation_brings_the_student_nearer_to_its_teacher(tmp_path: Path) -> None:
    fields = policy_gradient_fields(tmp_path)
    assert steps_of(aipo(AIPOConfig(**fields)), tmp_path / "teacher")[-1]["reward"] > 0.5
    steps = steps_of(
        distill(DistillConfig(**fields, teacher=str(tmp_path / "teacher" / "model"))), tmp_path / "run"
    )
    assert steps[0]["loss"] > 1.0
    assert np.mean([s["loss"] for s in steps[-3:]]) < 0.5 * steps[0]["loss"]
    # The reward isn't what it is told, but what the teacher has learned.
    assert steps[-1]["reward"] > steps[0]["reward"] + 0.3
