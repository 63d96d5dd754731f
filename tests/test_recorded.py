"""Recorded rollouts come back as they were, and are learned from without a generator."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from arriero.components.losses import DRO
from arriero.components.optimizer import AdamW
from arriero.components.recorded import RecordedRollouts, write_recorded
from arriero.components.trainer import Trainer
from arriero.engine.errors import UserError
from arriero.engine.graph import Graph
from arriero.pipelines.offline import OfflineConfig, offline
from arriero.schemas.messages import Outcome, Prompt, Rollout, RolloutGroup, Score, ScoredGroup
from tests.drive import Alone, kept, outputs
from tests.inline_runs import steps_of, tiny_model

torch.set_num_threads(1)


def group(digits: list[str], *, prompt: str = "1+1=") -> ScoredGroup:
    """Responses of three digits after a prompt of four tokens; the reward is the share of threes."""
    head = np.array([5, 14, 5, 18], np.int32)
    rollouts: list[Rollout] = []
    for text in digits:
        tokens = np.concatenate([head, np.array([4 + int(d) for d in text], np.int32)])
        mask = np.arange(len(tokens)) >= 4
        rollouts.append(
            Rollout(
                tokens=tokens,
                mask=mask,
                # Of one digit in ten: the policy that recorded isn't the model.
                logprobs=np.where(mask, np.log(0.1), np.nan).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                text=text,
                finish="length",
            )
        )
    rewards = [text.count("3") / 3 for text in digits]
    scores = tuple(Score(value=r, outcome=Outcome.OK if r else Outcome.WRONG) for r in rewards)
    return ScoredGroup(
        group=RolloutGroup(prompt=Prompt(text=prompt), rollouts=tuple(rollouts)), scores=scores
    )


async def test_what_is_written_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "recorded.jsonl"
    before = group(["123", "333"])
    write_recorded(path, [before])
    (after,) = kept(await outputs(RecordedRollouts(path=str(path), epochs=1).run()))
    assert after.id == "e0-r0"
    assert after.scores == before.scores
    for ours, theirs in zip(after.group.rollouts, before.group.rollouts, strict=True):
        for name in ("tokens", "mask", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        assert (ours.text, ours.finish) == (theirs.text, theirs.finish)


async def test_a_line_that_is_no_group_is_named_with_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "recorded.jsonl"
    write_recorded(path, [group(["123"])])
    row = json.loads(path.read_text())
    row["rollouts"][0]["logprobs"].pop()
    path.write_text(json.dumps(row))
    with pytest.raises(UserError, match=r"recorded.jsonl:1: rollouts.0: .*must be of one length"):
        await outputs(RecordedRollouts(path=str(path), epochs=1).run())
    row["rollouts"][0]["logprobs"].append(None)
    path.write_text(json.dumps(row))
    with pytest.raises(UserError, match="finite where mask is true"):
        await outputs(RecordedRollouts(path=str(path), epochs=1).run())


def test_recorded_rollouts_have_behaviour_logprobs_for_a_loss_that_needs_them() -> None:
    trainer = Trainer(model="m", loss=DRO(), steps=1)
    lines = list(trainer.problems(Alone(RecordedRollouts(path="x.jsonl"))))
    assert not any("behaviour" in line for line in lines)
    assert any("behaviour" in line for line in trainer.problems(Alone()))


def test_the_better_of_recorded_responses_are_imitated(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    path = tmp_path / "recorded.jsonl"
    write_recorded(
        path,
        (
            group(["".join(map(str, draw.integers(0, 10, 3))) for _ in range(8)], prompt=str(i))
            for i in range(40)
        ),
    )
    config = OfflineConfig(
        model=tiny_model(tmp_path / "tiny"),
        data=RecordedRollouts(path=str(path)),
        optimizer=AdamW(lr=1e-2),
        beta=0.5,
        steps=12,
        groups_per_step=8,
    )
    spec = offline(config).check()
    assert Graph.from_spec(spec).check().digest == spec.digest
    steps = steps_of(offline(config), tmp_path / "run")
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"]
    # log 32 - log 10 nats from who recorded: told, and no fault of a generator that there isn't.
    assert steps[0]["mismatch"] == pytest.approx(np.log(3.2), abs=0.05)
    assert "fresh_tokens" not in steps[0]
    # The recorded policy said 3 one time in ten; the best of its responses say it more often.
    assert probability_of_three(tmp_path / "run" / "model") > 0.25


def probability_of_three(model: Path) -> float:
    """Of the first token of a response."""
    from arriero.components.policy import load_policy

    policy, _ = load_policy(model)
    with torch.no_grad():
        logits = policy(input_ids=torch.tensor([[5, 14, 5, 18]])).logits
    return float(logits[0, -1].softmax(-1)[7])
