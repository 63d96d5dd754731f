"""Log-probabilities in chunks are those of all logits at once, gradients too."""

# pyright: reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch and transformers annotate only a part of what is called here.

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from arriero.components.head import Head

torch.set_num_threads(1)


def head_and_back(head: Head, *, bias: bool, dtype: torch.dtype) -> list[Tensor]:
    hidden_TH, linear, targets_T, temperatures_T, upstream = head_case(bias=bias, dtype=dtype)
    logprobs_T, entropy_T = head(hidden_TH, linear, targets_T, temperatures_T)
    return outcome(logprobs_T, entropy_T, upstream, [hidden_TH, *linear.parameters()])


def head_case(
    *, bias: bool, dtype: torch.dtype
) -> tuple[Tensor, torch.nn.Linear, Tensor, Tensor, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(37, 16, generator=generator).to(dtype).requires_grad_()
    linear = torch.nn.Linear(16, 50, bias=bias).to(dtype)
    with torch.no_grad():
        for p in linear.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    targets_T = torch.randint(0, 50, (37,), generator=generator)
    temperatures_T = 0.5 + torch.rand(37, generator=generator)
    upstream = (torch.randn(37, generator=generator), torch.randn(37, generator=generator))
    return hidden_TH, linear, targets_T, temperatures_T, upstream


def outcome(
    logprobs_T: Tensor, entropy_T: Tensor, upstream: tuple[Tensor, Tensor], inputs: list[Tensor]
) -> list[Tensor]:
    total = (upstream[0] * logprobs_T + upstream[1] * entropy_T).sum()
    return [logprobs_T.detach(), entropy_T.detach(), *torch.autograd.grad(total, inputs)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Small(Head):
    """Five tokens at a time."""

    def chunk(self, vocabulary: int) -> int:
        return 5


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-5)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [Head, Small])
def test_chunks_have_the_values_and_gradients_of_all_logits_at_once(
    kind: type[Head], bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    hidden_TH, linear, targets_T, temperatures_T, upstream = head_case(bias=bias, dtype=dtype)
    log_TV = (linear(hidden_TH) / temperatures_T[:, None]).log_softmax(-1)
    entropy_T = -(log_TV.exp() * log_TV).sum(-1)
    logprobs_T = log_TV.gather(1, targets_T[:, None])[:, 0]
    expected = outcome(logprobs_T, entropy_T, upstream, [hidden_TH, *linear.parameters()])
    found = head_and_back(kind(entropy_gradient=True), bias=bias, dtype=dtype)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).abs().max() < tolerance


def test_no_token_costs_nothing_and_still_has_a_gradient() -> None:
    hidden_TH = torch.zeros(0, 16, requires_grad=True)
    linear = torch.nn.Linear(16, 50)
    logprobs_T, _ = Head()(hidden_TH, linear, torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    torch.autograd.backward(logprobs_T.sum())
    assert linear.weight.grad is not None
    assert not linear.weight.grad.any()


def test_the_logits_of_a_long_batch_are_never_whole() -> None:
    # 4096 tokens of 128 K words are 2 GB in float32; benchmarks/logprobs.py measures the peak.
    assert Head(chunk_mb=128).chunk(128_256) == 261
    assert Head(chunk_mb=1).chunk(10**9) == 1


def test_products_in_bfloat16_leave_a_softmax_in_float32() -> None:
    found = head_and_back(Head(dtype=torch.bfloat16, entropy_gradient=True), bias=False, dtype=torch.float32)
    exact = head_and_back(Head(entropy_gradient=True), bias=False, dtype=torch.float32)
    assert {t.dtype for t in found} == {torch.float32}
    gaps = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, exact, strict=True)]
    assert all(1e-5 < gap < 0.05 for gap in gaps)
