"""Pairs of responses: read, packed so that a pair stays together, and learned from."""

# pyright: reportUnknownMemberType=false
# torch and transformers annotate only a part of what is called here.

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch

from arriero.components.forward import PolicyForward
from arriero.components.labelled import LabelledSource
from arriero.components.optimizer import AdamW
from arriero.components.policy import load_policy, sample_logprobs
from arriero.components.preferences import Preference, PreferenceBatch, PreferenceSource
from arriero.engine.graph import Graph
from arriero.pipelines.dpo import DPOConfig, dpo
from arriero.pipelines.kto import KTOConfig, kto
from arriero.schemas.messages import Batch
from tests.drive import dropped, kept, outputs, stream
from tests.inline_runs import steps_of, tiny_model

torch.set_num_threads(1)


def write_pairs(path: Path, numbers: range) -> Path:
    """The chosen response is a three, the rejected one another digit."""
    rows = ({"prompt": f"{n}=", "chosen": "3", "rejected": "012456789"[n % 9]} for n in numbers)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


async def test_a_pair_is_two_samples_side_by_side(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    pairs = [Preference(id=f"p{i}", prompt="1+1=", chosen="2", rejected="345") for i in range(3)]
    component = PreferenceBatch(model=model, pairs=2, max_length=8)
    first, last = kept(await outputs(component.run(stream(pairs, Preference))))
    assert [len(b.samples) for b in (first, last)] == [4, 2]
    chosen, rejected = first.samples[:2]
    # Prompt of four characters, then the response and the end of sequence (id 2).
    assert [len(s.tokens) for s in (chosen, rejected)] == [6, 8]
    assert chosen.mask.tolist() == [False] * 4 + [True] * 2
    assert rejected.advantages.tolist() == [0.0] * 4 + [-1.0] * 4
    assert (chosen.tokens[-1], chosen.group, rejected.group) == (2, "p0", "p0")
    short = PreferenceBatch(model=model, pairs=2, max_length=7)
    assert [d.reason for d in dropped(await outputs(short.run(stream(pairs, Preference))))] == [
        "too_long"
    ] * 3


async def test_a_pair_of_equal_responses_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": "a", "chosen": "b", "rejected": r} for r in ("b", "c")]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    found = kept(await outputs(PreferenceSource(path=str(path), epochs=1).run()))
    assert [(p.chosen, p.rejected) for p in found] == [("b", "c")]


async def margins(model: str, reference: str, data: Path) -> npt.NDArray[np.float64]:
    """log(pi/ref) of the chosen minus that of the rejected response, per pair."""
    batcher = PreferenceBatch(model=reference, pairs=100, max_length=64)
    source = PreferenceSource(path=str(data), epochs=1, shuffle=False)
    (batch,) = kept(await outputs(batcher.run(stream(kept(await outputs(source.run())), Preference))))
    assert isinstance(batch, Batch)
    sums = [
        np.array(
            [
                lp.sum()
                for lp in sample_logprobs(PolicyForward(load_policy(m)[0]), batch.samples, token_budget=4096)
            ]
        )
        for m in (model, reference)
    ]
    ratio_S = sums[0] - sums[1]
    return np.asarray(ratio_S[0::2] - ratio_S[1::2], dtype=np.float64)


@pytest.mark.parametrize(("kind", "beta", "before"), [("sigmoid", 0.1, math.log(2)), ("square", 0.5, 1.0)])
def test_dpo_learns_which_response_is_chosen_also_on_prompts_it_has_not_seen(
    kind: Literal["sigmoid", "square"], beta: float, before: float, tmp_path: Path
) -> None:
    model = tiny_model(tmp_path / "tiny")
    train = write_pairs(tmp_path / "train.jsonl", range(0, 100, 3))
    held_out = write_pairs(tmp_path / "held_out.jsonl", range(1, 100, 3))
    config = DPOConfig(
        model=model,
        data=PreferenceSource(path=str(train)),
        kind=kind,
        beta=beta,
        steps=25,
        pairs_per_step=16,
        optimizer=AdamW(lr=5e-3),
    )
    steps = steps_of(dpo(config), tmp_path / "run")
    # Before the first update the policy is its reference: log 2, or the square of the target 1 / (2 beta).
    assert steps[0]["loss"] == pytest.approx(before, abs=1e-5)
    assert steps[-1]["loss"] < 0.5 * before
    margin = asyncio.run(margins(str(tmp_path / "run" / "model"), model, held_out))
    assert (margin > 0).mean() > 0.9


def test_kto_learns_which_response_is_liked_also_on_prompts_it_has_not_seen(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny")
    train = write_pairs(tmp_path / "train.jsonl", range(0, 100, 3))
    held_out = write_pairs(tmp_path / "held_out.jsonl", range(1, 100, 3))
    config = KTOConfig(
        model=model,
        data=LabelledSource(path=str(train)),
        steps=25,
        examples_per_step=32,
        optimizer=AdamW(lr=5e-3),
    )
    graph = kto(config)
    spec = graph.check()
    assert Graph.from_spec(spec).check().digest == spec.digest
    steps = steps_of(graph, tmp_path / "run")
    # Before the first update the policy is its reference: 1 - sigmoid(0) for each.
    assert steps[0]["loss"] == pytest.approx(0.5, abs=1e-5)
    assert steps[-1]["loss"] < 0.35
    margin = asyncio.run(margins(str(tmp_path / "run" / "model"), model, held_out))
    assert (margin > 0).mean() > 0.9
