"""Distillation from a teacher's whole distribution: gradients against plain autograd, and what is refused."""

# pyright: reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch and transformers annotate only a part of what is called here.

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import PreTrainedModel

from arriero.components.comparing import Taught, divergence
from arriero.components.head import Head
from arriero.components.losses import AIPO, Divergence
from arriero.components.optimizer import SGD
from arriero.components.packing import Layout
from arriero.components.placement import DevicePlacement
from arriero.components.rewards import Function
from arriero.components.sharding import whole
from arriero.components.trainer import Trainer
from arriero.components.training import TrainState
from arriero.components.training_options import TrainingOptions
from arriero.engine.graph import Graph
from arriero.launchers.cli import main
from arriero.pipelines.aipo import AIPOConfig, aipo
from arriero.pipelines.distill import DistillConfig, distill
from arriero.schemas.messages import Prompt, Rollout, Sample
from tests.batches import random_batch
from tests.drive import Alone
from tests.inline_runs import peaked_model, policy_gradient_fields, saved, steps_of
from tests.rank_runs import run_ranks
from tests.tiny_models import tiny_llama

torch.set_num_threads(1)

Kind = Literal["forward", "reverse", "jsd"]
KINDS: list[Kind] = ["forward", "reverse", "jsd"]


def by_torch(kind: Kind, student_TV: Tensor, teacher_TV: Tensor) -> Tensor:
    """The divergence [T] by `kl_div`; jsd with a quarter of the teacher."""

    def kl(p_TV: Tensor, q_TV: Tensor) -> Tensor:
        return kl_div(q_TV, p_TV, reduction="none", log_target=True).sum(-1)

    student_TV, teacher_TV = student_TV.log_softmax(-1), teacher_TV.log_softmax(-1)
    if kind == "forward":
        return kl(teacher_TV, student_TV)
    if kind == "reverse":
        return kl(student_TV, teacher_TV)
    mixture_TV = (0.25 * teacher_TV.exp() + 0.75 * student_TV.exp()).log()
    return 0.25 * kl(teacher_TV, mixture_TV) + 0.75 * kl(student_TV, mixture_TV)


def loss_of(kind: Kind) -> Divergence:
    return Divergence(kind=kind, beta=0.25 if kind == "jsd" else 0.5)


def teacher_model() -> PreTrainedModel:
    return tiny_llama(seed=5, scale=8.0, hidden=24)


def taught(
    kind: Kind, *, options: TrainingOptions | None = None, group: dist.ProcessGroup | None = None
) -> TrainState:
    return TrainState(
        tiny_llama(scale=5.0), loss=loss_of(kind), optimizer=SGD(lr=1.0, max_grad_norm=1e9), steps=10,
        token_budget=24, options=options or TrainingOptions(), teacher=teacher_model(), group=group,
    )  # fmt: skip


def logits(model: PreTrainedModel, sample: Sample) -> Tensor:
    """Of the trained tokens [T, V], over the temperature, by a forward pass of this sample alone."""
    found_LV: Tensor = model(input_ids=torch.tensor([sample.tokens.tolist()])).logits[0]
    return found_LV[:-1][torch.tensor(sample.mask[1:].tolist())] / sample.temperature


BATCH = random_batch([9, 4, 14, 7], prompt=2, temperature=0.7)


def plainly(kind: Kind) -> tuple[float, dict[str, Tensor]]:
    """Loss of the batch and the weights after a step of plain descent along its gradient."""
    model, teacher = tiny_llama(scale=5.0), teacher_model()
    with torch.no_grad():
        said = [logits(teacher, s) for s in BATCH.samples]
    mean = torch.cat(
        [by_torch(kind, logits(model, s), t) for s, t in zip(BATCH.samples, said, strict=True)]
    ).mean()
    torch.autograd.backward(mean)
    with torch.no_grad():
        after = {n: p - p.grad for n, p in model.named_parameters() if p.grad is not None}
    return mean.item(), after


def assert_as_plain(state: TrainState, kind: Kind) -> None:
    loss, after = plainly(kind)
    metrics = state.step(BATCH)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    found = {name: whole(p) for name, p in state.state_dict_for_weights().items()}
    for name, expected in after.items():
        assert (found[name] - expected).abs().max() < 1e-5, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prefix"])
def test_a_step_is_that_of_plain_autograd_on_all_logits(kind: Kind, layout: Layout) -> None:
    assert_as_plain(taught(kind, options=TrainingOptions(packing=layout)), kind)


def on_a_rank(rank: int, directory: Path) -> None:
    for shards in (1, 2):
        state = taught("jsd", options=TrainingOptions(shards=shards), group=dist.group.WORLD)
        assert_as_plain(state, "jsd")


def test_a_teacher_is_split_as_the_policy_is(tmp_path: Path) -> None:
    run_ranks(on_a_rank, tmp_path, ranks=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Small(Head):
    """Five tokens at a time."""

    def chunk(self, vocabulary: int) -> int:
        return 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [0, 17])
def test_chunks_have_the_divergence_and_gradient_of_all_logits_at_once(kind: Kind, tokens: int) -> None:
    torch.manual_seed(0)
    hidden_TH = torch.randn(tokens, 8, requires_grad=True)
    student, teacher = torch.nn.Linear(8, 30), torch.nn.Linear(6, 30, bias=False)
    hidden_TG, temperatures_T, upstream_T = (
        torch.randn(tokens, 6),
        0.5 + torch.rand(tokens),
        torch.randn(tokens),
    )
    between = loss_of(kind).between
    found_T = divergence(
        Small(),
        hidden_TH,
        student,
        temperatures_T,
        Taught(hidden_TG=hidden_TG, linear=teacher, between=between),
    )
    inputs: list[Tensor] = [hidden_TH, *student.parameters()]
    found = torch.autograd.grad((upstream_T * found_T).sum(), inputs)
    scale_T = temperatures_T[:, None]
    plain_T = by_torch(kind, student(hidden_TH) / scale_T, (teacher(hidden_TG) / scale_T).detach())
    expected = torch.autograd.grad((upstream_T * plain_T).sum(), inputs)
    assert torch.allclose(found_T, plain_T, atol=1e-6)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)
    assert teacher.weight.grad is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wider", ["policy", "teacher"])
def test_what_fills_up_the_wider_of_two_heads_is_not_compared(kind: Kind, wider: str) -> None:
    # Qwen2.5 has heads of 151936 and of 152064 rows for the same tokens.
    torch.manual_seed(0)
    hidden_TH, hidden_TG = torch.randn(9, 8, requires_grad=True), torch.randn(9, 6)
    student = torch.nn.Linear(8, 33 if wider == "policy" else 30)
    teacher = torch.nn.Linear(6, 33 if wider == "teacher" else 30, bias=False)
    one_T, between = torch.ones(9), loss_of(kind).between
    taught = Taught(hidden_TG=hidden_TG, linear=teacher, between=between)
    found_T = divergence(Small(), hidden_TH, student, one_T, taught)
    plain_T = by_torch(kind, student(hidden_TH)[:, :30], teacher(hidden_TG)[:, :30].detach())
    assert torch.allclose(found_T, plain_T, atol=1e-6)
    by_weight, expected = (torch.autograd.grad(v.sum(), student.weight)[0] for v in (found_T, plain_T))
    assert torch.allclose(by_weight, expected, atol=1e-5)
    assert not by_weight[30:].any()


STUDENT = [[1.0, -0.5, 2.0, 0.25], [0.0, 1.5, -1.0, 0.5]]
TEACHER = [[0.5, 1.0, -1.0, 2.0], [3.0, 0.0, 0.5, -2.0]]


@pytest.mark.parametrize(
    ("kind", "beta", "value", "gradient"),
    [
        ("forward", 0.5, [2.0789649214, 2.2782350158], [0.1313574527, -0.2200077031]),
        ("jsd", 0.1, [0.1714301098, 0.1886882495], [0.0053502098, -0.0156200163]),
        ("jsd", 0.5, [0.4431580843, 0.4945446945], [-0.0140768273, -0.0291247149]),
        ("reverse", 0.5, [3.1204581145, 3.6174056320], [-0.6063763249, -0.1561546781]),
    ],
)  # fmt: skip
def test_divergences_have_the_numbers_of_trl(
    kind: Kind, beta: float, value: list[float], gradient: list[float]
) -> None:
    # `GKDTrainer.generalized_jsd_loss` of TRL 1.16 at temperature 0.7, beta 0 for forward and 1 for reverse.
    student_TV = torch.tensor(STUDENT, dtype=torch.float64, requires_grad=True)
    teacher_TV = torch.tensor(TEACHER, dtype=torch.float64)
    found_T = Divergence(kind=kind, beta=beta).between(student_TV / 0.7, teacher_TV / 0.7)
    (by_student_TV,) = torch.autograd.grad(found_T.sum(), student_TV)
    assert found_T.tolist() == pytest.approx(value, abs=2e-10)
    assert by_student_TV[0, :2].tolist() == pytest.approx(gradient, abs=2e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_both_exclude_changes_nothing(kind: Kind) -> None:
    def both(student: list[float], teacher: list[float]) -> tuple[float, list[float]]:
        student_TV = torch.tensor([student], requires_grad=True)
        found_T = loss_of(kind).between(student_TV, torch.tensor([teacher]))
        torch.autograd.backward(found_T.sum())
        assert student_TV.grad is not None
        return found_T.item(), student_TV.grad[0].tolist()

    value, gradient = both([1.0, 0.5, -math.inf], [0.2, 0.1, -math.inf])
    expected, by_two = both([1.0, 0.5], [0.2, 0.1])
    assert value == pytest.approx(expected, abs=1e-6)
    assert gradient == pytest.approx([*by_two, 0.0], abs=1e-6)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that has learned to say three."""
    path = tmp_path_factory.mktemp("trained")
    assert steps_of(aipo(AIPOConfig(**policy_gradient_fields(path))), path / "run")[-1]["reward"] > 0.5
    return str(path / "run" / "model")


@pytest.mark.parametrize("kind", KINDS)
def test_the_divergence_from_the_teacher_falls(kind: Kind, trained: str, tmp_path: Path) -> None:
    fields = policy_gradient_fields(tmp_path, samples=4, slots=32)
    graph = distill(DistillConfig(**fields, teacher=trained, divergence=kind))
    spec = graph.check()
    assert Graph.from_spec(spec).check().digest == spec.digest
    steps = steps_of(graph, tmp_path / "run")
    assert np.mean([s["loss"] for s in steps[-3:]]) < 0.3 * steps[0]["loss"]
    assert steps[-1]["reward"] > steps[0]["reward"] + 0.3  # what the teacher has learned, and nobody told it


def silent(prompt: Prompt, rollout: Rollout) -> float:
    """A reward that fails for each second response."""
    if rollout.seed % 2:
        raise ZeroDivisionError("no verdict")
    return 1.0


def test_a_response_without_a_verdict_is_learned_from_all_the_same(trained: str, tmp_path: Path) -> None:
    fields = policy_gradient_fields(tmp_path, samples=4, slots=32, steps=2)
    judged = steps_of(distill(DistillConfig(**fields, teacher=trained)), tmp_path / "judged")
    fields["reward"] = Function(function=silent, isolate=False)
    steps = steps_of(distill(DistillConfig(**fields, teacher=trained)), tmp_path / "silent")
    assert [(s["tokens"], s["loss"]) for s in steps] == [(s["tokens"], s["loss"]) for s in judged]
    assert [s["reward"] for s in steps] == [1.0, 1.0]  # of those that were judged


def command(path: Path, *words: str) -> list[str]:
    policy_gradient_fields(path)
    given = [
        "--model",
        str(path / "tiny"),
        "--data",
        str(path / "sums.jsonl"),
        "--sampling.max-new-tokens",
        "5",
    ]
    return ["check", "distill", *given, *words]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--divergence", "forward", "--rho", "3"), "rho=3.0 isn't read by divergence=forward; leave it out"),
        (("--divergence", "reverse", "--beta", "0.1"), "beta=0.1 isn't read by divergence=reverse"),
        (("--beta", "0.1"), "beta=0.1 isn't read by divergence=sampled; leave it out"),
    ],
)
def test_an_option_that_a_divergence_does_not_read_is_refused(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path, "--teacher", peaked_model(tmp_path / "teacher"), *words)) != 0
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("kind", [*KINDS, "sampled"])
def test_a_teacher_of_another_vocabulary_is_refused(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = saved(tiny_llama(vocab_size=40), tmp_path / "other", vocab_size=40)
    assert main(command(tmp_path, "--teacher", other, "--divergence", kind)) != 0
    assert f"{other} has 40 tokens and {tmp_path / 'tiny'} 32" in capsys.readouterr().err


def problems(**fields: Any) -> list[str]:
    return list(Trainer(steps=1, **fields).problems(Alone()))


def test_a_teacher_goes_with_a_loss_that_compares_and_with_nothing_else(tmp_path: Path) -> None:
    policy, teacher = peaked_model(tmp_path / "policy"), peaked_model(tmp_path / "teacher")
    narrow = saved(tiny_llama(vocab_size=24), tmp_path / "narrow")  # the same tokenizer, a smaller head
    wide = saved(tiny_llama(vocab_size=40), tmp_path / "wide")
    assert problems(model=policy, loss=Divergence(), teacher=teacher) == []
    (lacks,) = problems(model=policy, loss=Divergence())
    assert lacks == "Divergence compares with a teacher, but there is none; set teacher"
    unread = [p for p in problems(model=policy, loss=AIPO(), teacher=teacher) if "teacher" in p]
    assert unread == [f"teacher={teacher} isn't read by AIPO; leave it out"]
    (smaller,) = problems(model=policy, loss=Divergence(), teacher=narrow)
    assert f"{narrow} has vocab_size 24 and {policy} 32, tokens up to 31" in smaller
    assert problems(model=policy, loss=Divergence(), teacher=wide) == []
    turns = DevicePlacement(devices="turns")
    found = problems(model=policy, loss=Divergence(), teacher=teacher, placement=turns)
    assert any("memory of a teacher" in p for p in found)


def test_a_beta_without_a_mixture_is_refused() -> None:
    with pytest.raises(ValueError, match=r"beta=0\.1 isn't read by kind='forward'"):
        Divergence(kind="forward", beta=0.1)
