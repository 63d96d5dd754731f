"""The replay buffer, the critic of turns, and ArCHer on an environment of two turns."""

# pyright: reportUnknownMemberType=false
# torch is annotated only in part.

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from arriero.components.checkpoints import Checkpoints
from arriero.components.environments import Environment, Episode, Turn, UserEnvironment
from arriero.components.laws import check_laws, graph_losses
from arriero.components.losses import Reinforce
from arriero.components.optimizer import AdamW
from arriero.components.replay import Replay, draw_seed
from arriero.components.trainer import Trainer
from arriero.components.utterance_critic import UtteranceCritic, read_turns, turn_targets
from arriero.engine.graph import Graph
from arriero.engine.runtime.ledger import Ledger
from arriero.pipelines.archer import ArcherConfig, archer
from arriero.schemas.ledger import EVENT
from arriero.schemas.messages import Batch, Prompt, Sample
from tests.batches import random_sample
from tests.drive import Alone, in_admission_order, kept, outputs, stream
from tests.inline_runs import policy_gradient_fields, steps_of, tiny_model

torch.set_num_threads(1)


def batch(number: int, size: int = 3) -> Batch:
    samples = tuple(random_sample(6, seed=10 * number + i) for i in range(size))
    named = tuple(s.model_copy(update={"group": f"b{number}", "origin": number}) for s in samples)
    return Batch(id=f"b{number}", origins=(number,), samples=named)


async def replayed(component: Replay, *numbers: int) -> list[Batch]:
    with in_admission_order(0):
        return kept(await outputs(component.run(stream([batch(n) for n in numbers], Batch))))


def tokens(samples: tuple[Sample, ...]) -> list[tuple[int, ...]]:
    return [tuple(s.tokens.tolist()) for s in samples]


async def test_a_draw_is_of_the_last_samples_and_the_same_every_time() -> None:
    found = await replayed(Replay(capacity=6, samples=4), 0, 1, 2, 3)
    again = await replayed(Replay(capacity=6, samples=4), 0, 1, 2, 3)
    assert [tokens(b.samples) for b in found] == [tokens(b.samples) for b in again]
    assert [len(b.samples) for b in found] == [3, 4, 4, 4]
    assert {s.group for s in found[3].samples} <= {"b2", "b3"}
    assert all(s.replayed for b in found for s in b.samples)
    assert [b.parents for b in found] == [(f"b{n}",) for n in range(4)]
    assert all(len(set(tokens(b.samples))) == len(b.samples) for b in found)
    assert draw_seed(0, "b1") != draw_seed(0, "b2") != draw_seed(1, "b2")


async def test_beside_fresh_samples_only_older_ones_are_drawn() -> None:
    found = await replayed(Replay(capacity=100, samples=2, fresh=True), 0, 1, 2)
    assert [[s.replayed for s in b.samples] for b in found] == [[False] * 3, *[[False] * 3 + [True] * 2] * 2]
    assert {s.group for s in found[1].samples if s.replayed} == {"b0"}
    left = found[1].without(frozenset({"b1"}))
    assert (left.origins, len(left.samples)) == ((), 2)


def test_replayed_samples_under_a_loss_without_ratio_control_are_refused(tmp_path: Path) -> None:
    trainer = Trainer(model=tiny_model(tmp_path), loss=Reinforce(), steps=1)
    (line,) = trainer.problems(Alone(Replay(capacity=9, samples=9)))
    assert "replayed samples of any age with Reinforce" in line
    assert "lower samples" in next(iter(Replay(capacity=8, samples=9).problems(Alone())))


def conversation(*, reward: float = 0.0, turns: tuple[float, ...] = ()) -> Sample:
    """Two tokens of prompt, a turn of two, one observed, a turn of one."""
    mask = np.array([False, False, True, True, False, True])
    sample = random_sample(6)
    return sample.model_copy(
        update={
            "mask": mask,
            "logprobs": np.where(mask, -1.0, np.nan).astype(np.float32),
            "versions": np.where(mask, 0, -1).astype(np.int32),
            "reward": reward,
            "turns": turns,
        }
    )


def test_a_turn_is_read_in_front_of_it_and_behind_it() -> None:
    read = read_turns(conversation())
    # In front of tokens 2 and 5 stand the states, in front of 4 and 6 (one past the end) the turns.
    assert np.flatnonzero(read.mask).tolist() == [2, 4, 5, 6]
    sampled = conversation().model_copy(
        update={"mask": np.ones(6, np.bool_), "logprobs": None, "versions": None}
    )
    with pytest.raises(ValueError, match="no state comes before"):
        read_turns(sampled)


def test_targets_of_turns_are_those_worked_out_by_hand() -> None:
    v, q = np.array([0.5, 0.25]), np.array([0.75, 2.0])
    # Q(0) <- r0 + gamma V(1) = 1 + 0.5 * 0.25; Q(1) <- r1; V <- Q.
    apart = turn_targets(conversation(turns=(1.0, -1.0)), v, q, gamma=0.5)
    assert apart.tolist() == [0.75, 1.125, 2.0, -1.0]
    whole = turn_targets(conversation(reward=3.0), v, q, gamma=0.5)
    assert whole.tolist() == [0.75, 0.125, 2.0, 3.0]


async def test_the_critic_finds_out_which_turn_earned_the_reward(tmp_path: Path) -> None:
    # Turn 0 ends in token 5 or 6, and token 5 there is worth 1; turn 1 is worth nothing, whatever it says.
    def told(seed: int) -> Sample:
        right = seed % 2
        sample = conversation(turns=(float(right), 0.0))
        ids = random_sample(6, seed=seed).tokens.copy()
        ids[3] = 6 - right
        return sample.model_copy(update={"tokens": ids, "group": str(seed)})

    fresh = [Batch(id=f"b{n}", samples=tuple(told(100 * n + i) for i in range(16))) for n in range(30)]
    old = [
        Batch(id=f"r{n}", parents=(f"b{n}",), samples=tuple(told(5000 + 64 * n + i) for i in range(32)))
        for n in range(30)
    ]
    critic = UtteranceCritic(
        model=tiny_model(tmp_path),
        steps=30,
        optimizer=AdamW(lr=1e-2),
        whiten=False,
        gamma=0.9,
        tau=0.3,
        checkpoints=Checkpoints(every=0),
    )
    with in_admission_order(0):
        found = kept(await outputs(critic.run(stream(fresh, Batch), stream(old, Batch))))
    assert found[0].parents == ("b0", "r0")
    last = [s for b in found[-5:] for s in b.samples]
    first_turn = {r: np.mean([s.advantages[2] for s in last if s.turns[0] == r]) for r in (0.0, 1.0)}
    assert first_turn[1.0] > 0.3
    assert first_turn[0.0] < -0.3
    assert abs(np.mean([s.advantages[5] for s in last])) < 0.15
    assert all(s.advantages[2] == s.advantages[3] and (s.advantages[~s.mask] == 0).all() for s in last)


@dataclass(frozen=True, kw_only=True)
class Threes(Environment):
    """Two turns; each is worth its share of threes, told when it has been said."""

    def reset(self, prompt: Prompt, *, seed: int) -> Episode:
        return _Threes(prompt.text)


class _Threes(Episode):
    def __init__(self, opening: str) -> None:
        self.opening, self._turns = opening, 0

    def step(self, text: str) -> Turn:
        self._turns += 1
        return Turn(text="more", reward=text.count("3") / 3, done=self._turns == 2)


def config(path: Path, **fields: Any) -> ArcherConfig:
    given = policy_gradient_fields(path)
    del given["reward"]
    given["sampling"] = {"max_new_tokens": 3}
    given |= {"environment": UserEnvironment(make=Threes), "replay": 128, "capacity": 256, "tau": 0.3}
    given |= {"critic_optimizer": AdamW(lr=1e-2), "steps": 16}
    return ArcherConfig(**(given | fields))


def test_archer_learns_a_task_of_two_turns_and_its_ledger_balances(tmp_path: Path) -> None:
    graph = archer(config(tmp_path))
    steps = steps_of(graph, tmp_path / "archer")
    # Two turns of three tokens by chance: 2/32. A policy that only says threes gets 2.
    assert steps[0]["reward"] < 0.2
    assert np.mean([s["reward"] for s in steps[-3:]]) > 0.5
    ledger = Ledger()
    for line in (tmp_path / "archer" / "ledger.jsonl").read_text().splitlines():
        ledger.apply(EVENT.validate_json(line))
    # Replayed up to sixteen times, and trained once.
    assert (ledger.trained, ledger.in_flight) == (16 * 8, ledger.admitted - 16 * 8 - ledger.dropped.total())
    assert max(s["staleness_max"] for s in steps) == 0
    summary = json.loads((tmp_path / "archer" / "summary.json").read_text())
    assert summary["counts"]["samples_replayed"] == 64 + 15 * 128


def test_archer_is_checked_and_comes_back_from_its_serialised_form(tmp_path: Path) -> None:
    spec = archer(config(tmp_path)).check()
    again = Graph.from_spec(type(spec).model_validate_json(spec.model_dump_json()))
    assert again.check().digest == spec.digest
    assert [str(v) for loss in graph_losses(again).values() for v in check_laws(loss)] == []
