"""Responses that were liked or not, each by itself: read, balanced, mismatched, and learned from."""

# pyright: reportUnknownMemberType=false
# torch and transformers annotate only a part of what is called here.

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from arriero.components.forward import PolicyForward
from arriero.components.labelled import Labelled, LabelledBatch, LabelledSource
from arriero.components.losses import DPO, KTO
from arriero.components.optimizer import SGD, AdamW
from arriero.components.policy import load_policy, sample_logprobs
from arriero.components.reference import ReferenceLogprobs
from arriero.components.sharding import whole
from arriero.components.trainer import Trainer
from arriero.components.training import TrainState
from arriero.components.training_options import TrainingOptions
from arriero.engine.codec import decode, encode
from arriero.engine.errors import UserError
from arriero.engine.graph import Graph
from arriero.pipelines.kto import KTOConfig, kto
from arriero.schemas.messages import Batch
from tests.drive import Alone, dropped, kept, outputs, stream
from tests.inline_runs import steps_of, tiny_model
from tests.rank_runs import run_ranks
from tests.tiny_models import tiny_llama

torch.set_num_threads(1)


def write(path: Path, rows: Sequence[Mapping[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


async def test_a_row_is_a_judged_response_and_a_pair_two(tmp_path: Path) -> None:
    rows: list[Mapping[str, object]] = [
        {"prompt": "a", "response": "b", "label": True},
        {"prompt": "a", "response": "c", "label": 0},
        {"prompt": "d", "response": "e", "label": "False"},
        {"prompt": "f", "chosen": "g", "rejected": "h"},
        {"prompt": "f", "chosen": "g", "rejected": "g"},
    ]
    source = LabelledSource(path=write(tmp_path / "rows.jsonl", rows), epochs=1, shuffle=False)
    found = kept(await outputs(source.run()))
    assert [(j.prompt, j.response, j.liked) for j in found] == [
        ("a", "b", True), ("a", "c", False), ("d", "e", False), ("f", "g", True), ("f", "h", False),
    ]  # fmt: skip
    assert [j.id for j in found] == ["e0-r0", "e0-r1", "e0-r2", "e0-r3-0", "e0-r3-1"]
    assert [(j.epoch, j.row) for j in found] == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 3)]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "response": "b", "label": 0.5}, "field 'label' is 0.5; true or false is needed"),
        ({"prompt": "a", "response": "b", "label": None}, "field 'label' is None"),
        ({"prompt": "a", "response": "b", "labels": True}, "did you mean label_field='labels'"),
        ({"prompt": "a", "label": True}, "no field 'response'"),
    ],
)
async def test_a_row_that_says_no_such_thing_is_refused(
    row: Mapping[str, object], said: str, tmp_path: Path
) -> None:
    source = LabelledSource(path=write(tmp_path / "rows.jsonl", [row]), epochs=1)
    with pytest.raises(UserError, match=said):
        await outputs(source.run())


def judged(*rows: tuple[str, str, bool]) -> list[Labelled]:
    return [
        Labelled(id=f"j{i}", prompt=prompt, response=response, liked=liked)
        for i, (prompt, response, liked) in enumerate(rows)
    ]


ROWS = judged(("1=", "1", True), ("1=", "22", False), ("2=", "3", False), ("4=", "45", False))


async def test_both_kinds_weigh_the_same_and_each_prompt_gets_the_response_of_another(tmp_path: Path) -> None:
    component = LabelledBatch(model=tiny_model(tmp_path), examples=4, max_length=9)
    (batch,) = kept(await outputs(component.run(stream(ROWS, Labelled))))
    own, mismatched = batch.samples[:4], batch.samples[4:]
    # One of four was liked: it weighs as much as the three others, all of them 1 on average.
    assert [float(s.advantages[-1]) for s in own] == pytest.approx([2, -2 / 3, -2 / 3, -2 / 3])
    text = [[int(t) - 4 for t in s.tokens[:-1]] for s in mismatched]  # ids of digits begin at 4
    assert [(row[0], row[2:]) for row in text] == [(1, [3]), (1, [3]), (2, [4, 5]), (4, [1])]
    assert [s.mismatched for s in batch.samples] == [False] * 4 + [True] * 4
    assert [s.group for s in mismatched] == ["j0", "j1", "j2", "j3"]
    assert batch.parents == ("j0", "j1", "j2", "j3")
    assert batch.trained_tokens == 2 + 3 + 2 + 3  # with the end of sequence
    plain = LabelledBatch(model=component.model, examples=4, max_length=9, balance=False, mismatched=False)
    (batch,) = kept(await outputs(plain.run(stream(ROWS, Labelled))))
    assert [float(s.advantages[-1]) for s in batch.samples] == [1, -1, -1, -1]


async def test_what_is_too_long_is_dropped_and_not_mismatched_either(tmp_path: Path) -> None:
    component = LabelledBatch(model=tiny_model(tmp_path), examples=9, max_length=5)
    rows = judged(("1=", "12", True), ("123=", "1", False), ("1=", "123", True))
    found = await outputs(component.run(stream(rows, Labelled)))
    assert [(d.parent, d.reason) for d in dropped(found)] == [("j1", "too_long"), ("j2", "too_long")]
    (batch,) = kept(found)
    assert [s.mismatched for s in batch.samples] == [False]  # and there is no other prompt left
    (long, *_) = kept(
        await outputs(
            LabelledBatch(model=component.model, examples=2, max_length=6).run(
                stream(judged(("1=", "123", True), ("123=", "1", False)), Labelled)
            )
        )
    )
    # "123=" with "123" and the end would be eight tokens.
    assert [(s.group, s.mismatched) for s in long.samples] == [("j0", False), ("j1", False), ("j0", True)]


def state(*, budget: int = 4096, group: dist.ProcessGroup | None = None, shards: int = 1) -> TrainState:
    return TrainState(
        tiny_llama(scale=5.0), loss=KTO(beta=0.5), optimizer=SGD(lr=1.0, max_grad_norm=1e9), steps=10,
        token_budget=budget, aggregation="sequence_mean", options=TrainingOptions(shards=shards), group=group,
    )  # fmt: skip


def read_batch(path: Path) -> Batch:
    """`ROWS`, read by another model than the one that is trained."""
    component = LabelledBatch(model=tiny_model(path), examples=4, max_length=9)

    async def made() -> Batch:
        (batch,) = kept(await outputs(component.run(stream(ROWS, Labelled))))
        reader = ReferenceLogprobs(model=component.model)
        (read,) = kept(await outputs(reader.run(stream([batch.model_copy(update={"id": "b"})], Batch))))
        return read

    return asyncio.run(made())


def by_hand(batch: Batch) -> tuple[float, float]:
    """The paper's loss of the batch and its z0, with the policy of `state`, one response at a time."""
    said = sample_logprobs(PolicyForward(tiny_llama(scale=5.0)), batch.samples, token_budget=4096)
    ratios = [
        float((logprobs.astype(np.float64) - s.reference[s.mask]).sum())
        for s, logprobs in zip(batch.samples, said, strict=True)
        if s.reference is not None
    ]
    z0 = max(0.0, sum(ratios[4:]) / 4)
    losses = [
        weight * (1 - 1 / (1 + math.exp(-0.5 * sign * (ratio - z0))))
        for weight, sign, ratio in zip((2, 2 / 3, 2 / 3, 2 / 3), (1, -1, -1, -1), ratios, strict=False)
    ]
    return sum(losses) / 4, z0


def check_step(trained: TrainState, batch: Batch) -> dict[str, torch.Tensor]:
    loss, z0 = by_hand(batch)
    assert z0 > 0.01
    metrics = trained.step(batch)
    assert metrics["kl_baseline"] == pytest.approx(z0, rel=1e-4)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["tokens"] == 10
    return {name: whole(p) for name, p in trained.state_dict_for_weights().items()}


def positive(batch: Batch) -> Batch:
    """With references that make the estimate positive, whatever the models say."""
    samples = tuple(
        s.model_copy(update={"reference": s.reference - np.float32(3.0)})
        for s in batch.samples
        if s.reference is not None
    )
    return batch.model_copy(update={"samples": samples})


@pytest.mark.parametrize("budget", [4096, 1])
def test_a_step_is_the_papers_however_it_is_cut(budget: int, tmp_path: Path) -> None:
    batch = positive(read_batch(tmp_path))
    after = check_step(state(budget=budget), batch)
    expected = check_step(state(), batch)
    for name, tensor in expected.items():
        assert (after[name] - tensor).abs().max() < 1e-5, name


def test_an_estimate_below_zero_counts_as_zero(tmp_path: Path) -> None:
    batch = read_batch(tmp_path)
    far = tuple(
        s.model_copy(update={"reference": np.where(s.mask, np.float32(-0.01), np.float32(np.nan))})
        for s in batch.samples
    )
    assert state().step(batch.model_copy(update={"samples": far}))["kl_baseline"] == 0.0


def on_a_rank(rank: int, directory: Path) -> None:
    batch = decode((directory / "batch").read_bytes(), Batch)
    for shards in (1, 2):
        check_step(state(group=dist.group.WORLD, shards=shards), batch)


def test_ranks_and_shards_have_one_estimate(tmp_path: Path) -> None:
    (tmp_path / "batch").write_bytes(encode(positive(read_batch(tmp_path / "tiny"))))
    run_ranks(on_a_rank, tmp_path, ranks=2)


def test_a_mismatched_response_without_a_use_or_a_use_without_one_is_refused(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny")
    makes = LabelledBatch(model=model, examples=4, max_length=9)
    reads = ReferenceLogprobs(model=model)

    def said(loss: KTO | DPO, *around: object) -> list[str]:
        trainer = Trainer(model=model, loss=loss, steps=1, aggregation="sequence_mean")
        return list(trainer.problems(Alone(reads, *around)))

    assert said(KTO(), makes) == said(KTO(kl=0.0)) == []
    (lacks,) = said(KTO())
    assert lacks == "KTO reads mismatched responses, but nothing upstream makes them; set its kl"
    (unread,) = said(KTO(kl=0.5), makes)
    assert unread == "mismatched responses aren't read by KTO; set mismatched=false"
    (alone,) = LabelledBatch(model=model, examples=1, max_length=9).problems(Alone())
    assert "a batch of 1 response has no other" in alone
    odd = TrainState(tiny_llama(), loss=DPO(), optimizer=SGD(), steps=1)
    with pytest.raises(ValueError, match="4 responses are mismatched, which DPO doesn't read"):
        odd.step(read_batch(tmp_path / "other"))


def test_kto_learns_from_few_liked_responses_among_many_that_werent(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny")
    # One answer in five is a three and liked.
    rows = [
        {"prompt": f"{n}=", "response": "3" if n % 5 == 0 else "012456789"[n % 9], "label": n % 5 == 0}
        for n in range(100)
    ]
    data = LabelledSource(path=write(tmp_path / "rows.jsonl", rows))
    config = KTOConfig(
        model=model, data=data, steps=25, examples_per_step=20, optimizer=AdamW(lr=5e-3), beta=0.2
    )
    graph = kto(config)
    spec = graph.check()
    assert Graph.from_spec(spec).check().digest == spec.digest
    steps = steps_of(graph, tmp_path / "run")
    # Before the first update the policy is its reference: 1 - sigmoid(0) for each, and no divergence.
    assert steps[0]["loss"] == pytest.approx(0.5, abs=1e-5)
    assert steps[0]["kl_baseline"] == pytest.approx(0, abs=1e-5)
    assert steps[-1]["loss"] < 0.35

    def three(path: str) -> float:
        """Mean probability of a three as the answer to prompts that weren't trained on."""
        loaded, tokenizer = load_policy(path)
        ids = [tokenizer.encode(f"{n}=") for n in range(200, 220)]
        three_id = tokenizer.convert_tokens_to_ids("3")
        with torch.no_grad():
            logits = loaded(input_ids=torch.tensor(ids)).logits[:, -1]
        return float(logits.softmax(-1)[:, three_id].mean())

    assert three(str(tmp_path / "run" / "model")) > 3 * three(model)
