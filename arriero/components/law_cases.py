"""Small random batches for the laws of losses, and what a loss gives for one, however it is cut."""

# pyright: reportUnknownMemberType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from arriero.components.losses import Loss, sequence_weights
from arriero.components.packing import Layout, PackedTokens, pack
from arriero.schemas.messages import Sample

if TYPE_CHECKING:
    from torch import Tensor

Doubles = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Samples, and log-probabilities of the policy and of that before the update, NaN off the mask."""

    samples: tuple[Sample, ...]
    policy: tuple[Doubles, ...]
    proximal: tuple[Doubles, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Loss of the whole batch; gradient with respect to the policy and what was clipped, [L] per sample."""

    loss: float
    gradient: tuple[Doubles, ...]
    clipped: tuple[npt.NDArray[np.bool_], ...]


def random_case(lengths: Sequence[int], *, shift: float = 0.3, advantage: float = 1.0, seed: int = 0) -> Case:
    """Sequences of these lengths, of two turns each, `shift` nats from the behaviour policy on average.

    Advantages have the size `advantage`, one per sequence, in turns positive and negative.
    """
    rng = np.random.default_rng(seed)
    samples: list[Sample] = []
    policy: list[Doubles] = []
    proximal: list[Doubles] = []
    for i, length in enumerate(lengths):
        mask = np.arange(length) >= 2
        mask[3::5] = False  # an observation between two turns
        behaviour = np.where(mask, -np.abs(rng.normal(1.5, 0.8 + shift / 2, length)), np.nan).astype(
            np.float32
        )
        moved = [np.where(mask, behaviour + shift * rng.normal(size=length), np.nan) for _ in range(2)]
        sign = 1 - 2 * (i % 2)
        samples.append(Sample(
            group=f"g{i}", tokens=rng.integers(0, 9, length).astype(np.int32), mask=mask, logprobs=behaviour,
            advantages=np.full(length, sign * advantage * rng.uniform(0.5, 1.5), np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            reference=np.where(mask, behaviour + shift * rng.normal(size=length), np.nan).astype(np.float32),
        ))  # fmt: skip
        policy.append(np.minimum(moved[0], -1e-3))
        proximal.append(np.minimum(moved[1], -1e-3))
    return Case(samples=tuple(samples), policy=tuple(policy), proximal=tuple(proximal))


def outcome(
    loss: Loss,
    case: Case,
    micros: Sequence[Sequence[int]],
    *,
    layout: Layout = "padded",
    dtype: torch.dtype = torch.float64,
) -> Outcome:
    """What `loss` gives for the micro-batches `micros` of sample indices, their sum; the mean over tokens."""
    counts = np.array([s.mask.sum() for s in case.samples], dtype=np.int64)
    weights = sequence_weights(counts, "token_mean") if counts.any() else np.zeros(len(counts))
    policy = [torch.from_numpy(p).to(dtype, copy=True).requires_grad_() for p in case.policy]
    clipped = [np.zeros(len(s.mask), np.bool_) for s in case.samples]
    total = torch.zeros((), dtype=torch.float64)
    for micro in micros:
        tokens, logprobs_T = tokens_of(case, micro, weights, layout, policy)
        total = total + (loss(logprobs_T, tokens) * tokens.weights_T).sum()
        limited_T = loss.clipped(logprobs_T.detach(), tokens).numpy()
        ends = np.cumsum([0, *(counts[i] for i in micro)])
        for i, begin, end in zip(micro, ends[:-1], ends[1:], strict=True):
            clipped[i][case.samples[i].mask] = limited_T[begin:end]
    if total.requires_grad:
        torch.autograd.backward(total)
    gradient = tuple(np.zeros(len(p)) if p.grad is None else p.grad.double().numpy() for p in policy)
    return Outcome(loss=total.item(), gradient=gradient, clipped=tuple(clipped))


def tokens_of(
    case: Case, micro: Sequence[int], weights: Doubles, layout: Layout, policy: list[Tensor]
) -> tuple[PackedTokens, Tensor]:
    """The packed tokens in the dtype of `policy`, and its log-probabilities of them."""
    dtype = policy[0].dtype

    def trained(arrays: Sequence[Tensor]) -> Tensor:
        picked = [arrays[i][torch.from_numpy(case.samples[i].mask.copy())] for i in micro]
        return torch.cat(picked) if picked else torch.zeros(0, dtype=dtype)

    packed = pack(case.samples, micro, weights, layout=layout).tokens
    logprobs_T = trained(policy)
    converted: dict[str, Any] = {
        f.name: value.to(dtype)
        for f in dataclasses.fields(packed)
        if isinstance(value := getattr(packed, f.name), torch.Tensor) and value.is_floating_point()
    }
    proximal_T = trained([torch.from_numpy(p).to(dtype) for p in case.proximal])
    converted |= {
        "proximal_T": proximal_T, "entropy_T": 1.0 - proximal_T, "multiplier": 1.0,
        "kl_baseline": 0.2,
        "divergence_T": (logprobs_T - proximal_T).square(),
    }  # fmt: skip
    return dataclasses.replace(packed, **converted), logprobs_T


def untrained(sample: Sample) -> Sample:
    """`sample` with nothing to train on."""
    length = len(sample.mask)
    nothing = np.full(length, np.nan, np.float32)
    return Sample(
        group=sample.group, tokens=sample.tokens, mask=np.zeros(length, np.bool_), logprobs=nothing,
        advantages=sample.advantages, versions=np.full(length, -1, np.int32), reference=nothing,
    )  # fmt: skip


def fresh(case: Case) -> Case:
    """The same, sampled by the policy itself and with it as reference."""
    policy = tuple(p.astype(np.float32) for p in case.policy)
    samples = tuple(
        s.model_copy(update={"logprobs": p.copy(), "reference": p.copy()})
        for s, p in zip(case.samples, policy, strict=True)
    )
    same = tuple(p.astype(np.float64) for p in policy)
    return Case(samples=samples, policy=same, proximal=same)
