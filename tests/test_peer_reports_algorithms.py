"""Faults that users of comparable systems reported of log-probabilities, masks, normalisation, advantages."""

# pyright: reportUnknownMemberType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from arriero.components.advantage import GroupAdvantage
from arriero.components.decoding import DecodeEngine
from arriero.components.losses import AIPO, Reinforce, sequence_weights
from arriero.components.optimizer import AdamW
from arriero.components.packing import plan, read
from arriero.components.rollout_engine import Request
from arriero.components.sampling import Sampling, draw
from arriero.components.trainer import Trainer
from arriero.components.training import TrainState
from arriero.engine.errors import UserError
from arriero.launchers.options import Arguments, resolve_command
from arriero.pipelines.aipo import AIPOConfig
from arriero.pipelines.grpo import GRPOConfig
from arriero.schemas.messages import Batch, Rollout
from tests.batches import random_batch, random_sample
from tests.drive import Alone
from tests.inline_runs import policy_gradient_fields, tiny_model
from tests.tiny_models import tiny_llama, tiny_tokenizer

torch.set_num_threads(1)


def test_log_probabilities_are_of_the_temperature_that_was_sampled_at() -> None:
    # TRL #4159: at temperature 0.6 the first token's ratio was about 2 for equal weights.
    engine = DecodeEngine(
        tiny_llama(scale=6.0), tiny_tokenizer(), Sampling(max_new_tokens=6, temperature=0.6),
        slots=1, max_length=64,
    )  # fmt: skip
    engine.add([Request(key="a", prompt_ids=[1, 5, 6], seed=1)])
    while not (done := engine.step()):
        pass
    (answer,) = done
    ids = torch.tensor([[1, 5, 6, *answer.token_ids.tolist()]])
    with torch.no_grad():
        logits_LV = tiny_llama(scale=6.0)(input_ids=ids).logits[0]
    cooled = (logits_LV[2:-1] / 0.6).log_softmax(-1).gather(1, ids[0, 3:, None])[:, 0]
    warm = logits_LV[2:-1].log_softmax(-1).gather(1, ids[0, 3:, None])[:, 0]
    np.testing.assert_allclose(answer.logprobs, cooled, atol=1e-4)
    assert abs(answer.logprobs - warm.numpy()).max() > 0.1


@pytest.mark.parametrize("sampling", [Sampling(top_p=0.9), Sampling(greedy=True)])
def test_sampling_whose_log_probabilities_the_trainer_cant_reproduce_is_refused(
    tmp_path: Path, sampling: Sampling
) -> None:
    # verl #6240: with top_p the support is truncated, and the trainer scores the whole distribution.
    sampler = AIPOConfig(**policy_gradient_fields(tmp_path, sampling=sampling)).generator()
    trainer = Trainer(model=tiny_model(tmp_path / "m"), loss=AIPO(), steps=1)
    assert any("can't reproduce those log-probabilities" in line for line in trainer.problems(Alone(sampler)))


def test_the_log_probability_is_that_of_the_token_that_was_drawn() -> None:
    # NeMo-RL PR 3297 took the first entry of a table: -0.10 of token 512 for the -2.30 of token 880.
    logits = torch.full((1, 1000), -50.0)
    logits[0, 512], logits[0, 880] = math.log(0.9), math.log(0.1)
    token, logprob = draw(logits, torch.tensor([0.95], dtype=torch.float64), Sampling())
    assert token.item() == 880
    assert logprob.item() == pytest.approx(-2.3026, abs=1e-4)


def test_a_rollout_without_log_probabilities_isnt_one() -> None:
    # NeMo-Gym PR 1612: the engine gave none, the mask became empty, and training stood still silently.
    fields: dict[str, Any] = {"tokens": np.arange(3, dtype=np.int32), "mask": np.array([False, True, True])}
    versions = np.array([-1, 0, 0], np.int32)
    with pytest.raises(ValueError, match="missing is never zero"):
        Rollout(**fields, logprobs=np.full(3, np.nan, np.float32), versions=versions, text="", finish="stop")
    model = tiny_llama()
    state = TrainState(model, loss=Reinforce(), optimizer=AdamW(), steps=1)
    nothing = random_sample(5).model_copy(
        update={"mask": np.zeros(5, np.bool_), "logprobs": None, "versions": None}
    )
    with pytest.raises(ValueError, match="trained tokens = 0"):
        state.step(Batch(samples=(nothing,)))


def test_the_step_says_how_far_sampling_and_training_differ() -> None:
    # tinker-cookbook #396: they differed, and nothing showed it.
    state = TrainState(tiny_llama(), loss=AIPO(), optimizer=AdamW(), steps=1)
    metrics = state.step(random_batch([9, 7]))
    assert {"mismatch", "mismatch_max", "ratio_max", "kl"} <= metrics.keys()
    assert metrics["mismatch_max"] >= metrics["mismatch"] > 0


def test_the_mean_over_tokens_is_that_of_the_whole_batch() -> None:
    # SkyRL PR 1296: lengths 1 and 9 in two micro-batches, losses 1 and 0, gave 0.5 instead of 0.1.
    weights = sequence_weights(np.array([1, 9]), "token_mean")
    assert weights[0] * 1 * 1.0 + weights[1] * 9 * 0.0 == pytest.approx(0.1)


def test_a_group_of_one_has_no_group_baseline(tmp_path: Path) -> None:
    # ROLL 52e0978b trained on advantages that were all 0; verl gives such a sample its raw reward.
    single = AIPOConfig(**policy_gradient_fields(tmp_path, samples=1)).generator()
    (line,) = GroupAdvantage(groups=2).problems(Alone(single))
    assert "samples=1" in line


def test_every_rank_has_equally_many_micro_batches() -> None:
    # verl PR 5591: sequences that pack to three micro-batches on one rank and four on another hung the run.
    samples = random_batch([30, 30, 30, 8, 8, 8, 8]).samples
    shares = plan([read(s) for s in samples], token_budget=32, ranks=2)
    assert len({len(micros) for micros in shares}) == 1
    assert sorted(i for micros in shares for micro in micros for i in micro) == list(range(7))


def test_an_advantage_of_a_critic_is_no_option_of_a_graph_without_one(tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"prompt": "1+1="}\n')
    given = ["--model", tiny_model(tmp_path / "m"), "--data", str(data), "--lam", "0.9"]
    with pytest.raises(UserError, match="lam"):
        resolve_command(GRPOConfig, Arguments, given)


def test_stale_data_under_a_loss_without_ratio_control_is_refused(tmp_path: Path) -> None:
    # tinker-cookbook PR 822: three off-policy steps without a clip grew the divergence thirtyfold.
    trainer = Trainer(model=tiny_model(tmp_path), loss=Reinforce(), steps=1)
    assert any("controls no ratio" in line for line in trainer.problems(Alone(staleness=3)))


def test_options_that_a_loss_or_an_aggregation_doesnt_use_are_refused(tmp_path: Path) -> None:
    # verl #5354: options with no effect.
    trainer = Trainer(model=tiny_model(tmp_path), loss=Reinforce(), steps=1, horizon=9.0)
    assert any("doesn't read horizon=9.0" in line for line in trainer.problems(Alone()))
