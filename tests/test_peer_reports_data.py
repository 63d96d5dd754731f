"""Faults that users of comparable systems reported of rewards, tokenizers and data, on our own code."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from arriero.components.advantage import GroupAdvantage
from arriero.components.prompts import PromptSource
from arriero.components.rewards import Math, MultipleChoice
from arriero.components.supervised import SupervisedBatch
from arriero.engine.errors import UserError
from arriero.engine.graph import Graph
from arriero.engine.nats_server import NatsServer, start_server
from arriero.launchers.cli import main
from arriero.launchers.launch import inline
from arriero.launchers.options import LaunchOptions
from arriero.launchers.rundir import create
from arriero.schemas.messages import Batch, Dropped, Example, Weights
from arriero.schemas.run import RunOptions
from tests.drive import outputs, stream
from tests.inline_runs import peaked_model
from tests.tiny_models import EOS, tiny_llama, tiny_tokenizer
from tests.toys import ToyGenerator, ToyReward, ToyTrainer
from tests.verdicts import outcome


def rows(path: Path, count: int) -> str:
    path.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(count)))
    return str(path)


def ran(
    source: PromptSource, folder: Path, *, groups: int, steps: int, replicas: int = 1, drop_last: bool = False
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Summary and ledger of a run of toys on real data."""
    g = Graph("toy")
    weights = g.loop(Weights, staleness=1)
    prompts = g.add(source, name="prompts")()
    rollouts = g.add(ToyGenerator(), name="generator", replicas=replicas)(prompts, weights)
    scored = g.add(ToyReward(), name="reward", replicas=replicas)(rollouts)
    batches = g.add(GroupAdvantage(groups=groups, drop_last=drop_last), name="advantage")(scored)
    weights.close(g.add(ToyTrainer(steps=steps), name="trainer")(batches))
    run = create(folder)
    options = RunOptions(run_id=folder.name, wait_bound_s=60, heartbeat_s=0.2)
    assert inline(g.check(), options, run, LaunchOptions(quiet=True)) == 0
    events = [json.loads(line) for line in run.ledger.read_text().splitlines()]
    return json.loads(run.summary.read_text()), events


@pytest.mark.parametrize(("steps", "epochs", "made"), [(10, 2, 8), (3, 2, 3), (10, 1, 4)])
def test_a_run_takes_as_many_steps_as_asked_or_as_the_data_is_enough_for(
    tmp_path: Path, steps: int, epochs: int, made: int
) -> None:
    """NeMo-RL #2899, #2917, #3248: the run hung at the end of an epoch."""
    source = PromptSource(path=rows(tmp_path / "d.jsonl", 8), epochs=epochs)
    summary, _ = ran(source, tmp_path / "run", groups=2, steps=steps)
    assert (summary["state"], summary["steps"]) == ("finished", made)


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_last_incomplete_batch_is_trained_or_dropped_as_configured_and_counted(
    tmp_path: Path, drop_last: bool
) -> None:
    """OpenRLHF #1300: the last part of a batch was never trained."""
    source = PromptSource(path=rows(tmp_path / "d.jsonl", 10), epochs=1)
    summary, events = ran(source, tmp_path / "run", groups=4, steps=9, drop_last=drop_last)
    sizes = [len(e["origins"]) for e in events if e["kind"] == "trained"]
    assert sizes == ([4, 4] if drop_last else [4, 4, 2])
    assert summary["groups_trained"] == sum(sizes)
    assert summary["groups_dropped"] == ({"filtered": 2} if drop_last else {})


def test_every_held_out_prompt_is_evaluated_once_however_many_replicas_there_are(tmp_path: Path) -> None:
    """AReaL #356: each of four ranks evaluated the whole set."""
    source = PromptSource(path=rows(tmp_path / "d.jsonl", 40), held_out=32, eval_every=0)
    summary, events = ran(source, tmp_path / "run", groups=2, steps=2, replicas=4)
    evaluated = Counter(e["id"] for e in events if e["kind"] == "evaluated")
    assert evaluated == {f"eval-r{row}@{version}": 1 for row in range(8, 40) for version in (0, 2)}
    assert [r["prompts"] for r in summary["evaluations"]] == [32, 32]


@pytest.mark.parametrize(
    ("gold", "said", "want"),
    [
        (r"\frac{3}{4}", r"\boxed{0.75}", "ok"),
        ("2", r"\boxed{\sqrt", "wrong"),
        ("2", r"it is \sqrt", "wrong"),
        ("2", r"\boxed{\sqrt}", "wrong"),
    ],
)
def test_latex_that_ends_in_the_middle_is_wrong_and_a_decimal_is_its_fraction(
    gold: str, said: str, want: str
) -> None:
    """tinker-cookbook #643: an IndexError, and 0.75 wasn't 3/4."""
    assert outcome(Math(), gold, said) == want


def test_a_question_without_an_answer_chooses_nothing() -> None:
    """tinker-cookbook #643: an unanswered question counted as A."""
    for text in ("", "I don't know.", "The options are many."):
        assert outcome(MultipleChoice(), "A", text) == "wrong"


async def test_an_end_of_sequence_that_is_also_the_padding_is_trained_on(tmp_path: Path) -> None:
    """ROLL 1f9d2171: where both were one token, the mask ended too early."""
    tokenizer: Any = tiny_tokenizer(64)
    tokenizer.pad_token = tokenizer.eos_token
    parts: tuple[Any, Any] = (tiny_llama(vocab_size=64), tokenizer)
    for part in parts:
        part.save_pretrained(tmp_path)
    batcher = SupervisedBatch(model=str(tmp_path), examples=2, max_length=64)
    examples = [Example(id="a", prompt="1", response="2<eos>3"), Example(id="b", prompt="1", response="2")]
    (batch,) = await outputs(batcher.run(stream(examples, Example)))
    assert isinstance(batch, Batch)
    first = batch.samples[0]
    assert first.tokens.tolist().count(EOS) == 2
    assert first.tokens[first.mask].tolist()[-1] == EOS
    assert [int(s.mask.sum()) for s in batch.samples] == [4, 2]


async def test_an_example_that_is_too_long_is_dropped_and_counted_never_cut(tmp_path: Path) -> None:
    """prime-rl #1986: the tokenizer cut prompts on the left and said nothing."""
    tokenizer: Any = tiny_tokenizer(64)
    tokenizer.truncation_side, tokenizer.model_max_length = "left", 4
    parts: tuple[Any, Any] = (tiny_llama(vocab_size=64), tokenizer)
    for part in parts:
        part.save_pretrained(tmp_path)
    batcher = SupervisedBatch(model=str(tmp_path), examples=1, max_length=8)
    examples = [Example(id="a", prompt="1" * 20, response="2"), Example(id="b", prompt="12345", response="6")]
    long, batch = await outputs(batcher.run(stream(examples, Example)))
    assert isinstance(long, Dropped)
    assert (long.parent, long.reason, long.detail) == ("a", "too_long", "22 tokens, max_length is 8")
    assert isinstance(batch, Batch)
    assert len(batch.samples[0].tokens) == 7


def test_a_prompt_that_is_too_long_is_counted_and_the_rest_is_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """prime-rl #1986, SkyRL #1317: prompts were cut, and the limit of an evaluation wasn't kept."""
    model, data = peaked_model(tmp_path / "model"), tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("1+1=", "1" * 600, "2+2=")))
    words = ["eval", model, "--data", str(data), "--reward", "contains", "--reward.text", "3", "--inline"]
    words += ["--sampling.max-new-tokens", "7", "--json", "--run-dir", str(tmp_path / "run")]
    assert main(words) == 0
    (report,) = json.loads(capsys.readouterr().out)["reports"]
    assert (report["prompts"], report["missing"]) == (2, 1)
    events = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    lengths = [n for e in events if e["kind"] == "evaluated" for n in e["lengths"]]
    assert max(lengths) <= 7
    (dropped,) = [e for e in events if e["kind"] == "dropped"]
    assert dropped["reason"] == "too_long"


async def test_a_misspelt_key_of_the_data_is_refused_with_the_one_that_was_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NeMo-RL #3271: `**kwargs` swallowed a misspelt `subset`."""
    path = rows(tmp_path / "d.jsonl", 2)
    assert main(["check", "grpo", "--model", "m", "--data", path, "--data.held-uot", "1"]) == 2
    assert "unknown key data.held_uot (command line); did you mean data.held_out?" in capsys.readouterr().err
    (tmp_path / "a.jsonl").write_text('{"prompt": "p", "answer": "1"}\n' * 2)
    source = PromptSource(path=str(tmp_path / "a.jsonl"), answer_field="answr", held_out=1)
    with pytest.raises(UserError, match=r"no field 'answr'; .* did you mean answer_field='answer'"):
        await source.evaluation()


def test_sixteen_servers_at_once_each_have_a_port_of_their_own(folder: Path) -> None:
    """NeMo-RL #3103: replicas chose the same port."""
    servers = list[NatsServer]()
    try:
        servers += [start_server(folder / str(k)) for k in range(16)]
        assert len({s.port for s in servers}) == 16
        assert all(s.process.poll() is None for s in servers)
    finally:
        for server in servers:
            server.stop()
