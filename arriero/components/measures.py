"""What a training step measures over its trained tokens, summed over micro-batches and ranks.

Every rank reduces the same keys, whatever its share holds: an empty share adds zeros.
"""

# pyright: reportUnknownMemberType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from arriero.components.losses.loss import MAX_LOG_RATIO

if TYPE_CHECKING:
    from torch import Tensor

    from arriero.components.packing import PackedTokens
    from arriero.schemas.messages import Sample

_SUMS = ("loss", "tokens", "entropy", "clipped", "mismatch", "ratio", "ratio_squared", "kl")
_FRESH = ("tokens", "mismatch", "beyond")
# A histogram from 2^-24 to 2^8 nats, eight bins to a factor of two: a percentile is known to 9 %.
_LOWEST, _HIGHEST, _PER_OCTAVE = -24, 8, 8


class Measures:
    """Sums and maxima in float64, kept on the device so that a step waits for it once.

    `off_policy`: whether every sample of the batch has behaviour log-probabilities, and so a ratio. `fresh`:
    the version of the weights in use, so that its tokens show how generator and trainer differ; None once an
    update has changed them. `bound`: nats, beyond which a fresh token is counted.
    """

    def __init__(
        self, device: torch.device, *, off_policy: bool, fresh: int | None = None, bound: float = 0.5
    ) -> None:
        self.off_policy = off_policy
        self._fresh, self._bound = fresh, bound
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._maxima = torch.zeros(3, dtype=torch.float64, device=device)
        bins = (_HIGHEST - _LOWEST) * _PER_OCTAVE
        self._fresh_sums = torch.zeros(len(_FRESH) + bins, dtype=torch.float64, device=device)

    def add(
        self, loss: Tensor, logprobs_T: Tensor, entropy_T: Tensor, tokens: PackedTokens, clipped_T: Tensor
    ) -> None:
        """Count one micro-batch; `loss` is its share of the step's loss."""
        if not len(logprobs_T):
            return
        log_ratio_T = torch.zeros_like(logprobs_T, dtype=torch.float64)
        if self.off_policy and tokens.behaviour_T is not None:
            log_ratio_T = logprobs_T.double() - tokens.behaviour_T.double()
        # Limited on both sides: a step whose every ratio is 0 or infinite still has measures.
        ratio_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        mismatch_T = log_ratio_T.abs()
        # Unbiased and never negative: r - 1 - log r, J. Schulman, "Approximating KL divergence" (2020), k3.
        kl_T = ratio_T - 1 - log_ratio_T
        per_token = (entropy_T, clipped_T, mismatch_T, ratio_T, ratio_T.square(), kl_T)
        self._sums += torch.stack(
            [loss.double(), loss.new_tensor(len(logprobs_T)).double(), *(x.double().sum() for x in per_token)]
        )
        fresh_T = mismatch_T[:0]
        if self.off_policy and self._fresh is not None and tokens.versions_T is not None:
            fresh_T = mismatch_T[tokens.versions_T == self._fresh]
        self._maxima = self._maxima.maximum(torch.stack([mismatch_T.max(), ratio_T.max(), _max(fresh_T)]))
        self._fresh_sums += self._count(fresh_T)

    def _count(self, fresh_T: Tensor) -> Tensor:
        """Number, sum and number beyond the bound of differences; how many lie in each bin."""
        octaves_T = fresh_T.clamp_min(2.0**_LOWEST).log2() - _LOWEST
        bins = len(self._fresh_sums) - len(_FRESH)
        bin_T = (octaves_T * _PER_OCTAVE).long().clamp_(0, bins - 1)
        ones_T = torch.ones_like(fresh_T)
        counts = torch.zeros_like(self._fresh_sums[len(_FRESH) :]).scatter_add_(0, bin_T, ones_T)
        own = torch.stack([ones_T.sum(), fresh_T.sum(), (fresh_T > self._bound).double().sum()])
        return torch.cat([own, counts])

    def totals(self, group: dist.ProcessGroup | None, *, digest: int) -> dict[str, float]:
        """Measures of the whole step, means over trained tokens; those of a ratio only where there is one.

        mismatch: |log pi - log mu| in nats; fresh_mismatch: the same of the tokens sampled from the weights
        in use, where staleness has no part in it, if there are any. kl: from behaviour to policy.
        effective_samples: the share of tokens that would weigh as much if all ratios were 1. RuntimeError if
        ranks disagree on `digest`.
        """
        sums = torch.cat([self._sums, self._fresh_sums])
        maxima = torch.cat([self._maxima, self._sums.new_tensor([digest, -digest])])
        if group is not None:
            dist.all_reduce(sums, group=group)
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        all_sums = _floats(sums)
        total = dict(zip(_SUMS, all_sums, strict=False))
        mismatch_max, ratio_max, fresh_max, largest, smallest = _floats(maxima)
        if largest != -smallest:
            raise RuntimeError("ranks were given different batches; every rank must step on the same one")
        tokens = total["tokens"]
        metrics = {"loss": total["loss"], "tokens": tokens, "entropy": total["entropy"] / tokens}
        if self.off_policy:
            metrics |= {
                "mismatch": total["mismatch"] / tokens,
                "mismatch_max": mismatch_max,
                "ratio": total["ratio"] / tokens,
                "ratio_max": ratio_max,
                "clipped": total["clipped"] / tokens,
                "effective_samples": total["ratio"] ** 2 / (tokens * total["ratio_squared"]),
                "kl": total["kl"] / tokens,
            }
            metrics |= _fresh(all_sums[len(_SUMS) :], fresh_max)
        return metrics


def _fresh(sums: Sequence[float], largest: float) -> dict[str, float]:
    """What `Measures` counted of fresh tokens; nothing if there were none."""
    tokens, mismatch, beyond = sums[: len(_FRESH)]
    if not tokens:
        return {}
    below = 0.0
    edge = largest
    for index, count in enumerate(sums[len(_FRESH) :]):
        below += count
        if below >= 0.99 * tokens:
            edge = 2.0 ** (_LOWEST + (index + 1) / _PER_OCTAVE)
            break
    return {
        "fresh_tokens": tokens,
        "fresh_mismatch": mismatch / tokens,
        "fresh_mismatch_p99": min(edge, largest),
        "fresh_mismatch_max": largest,
        "fresh_mismatch_share": beyond / tokens,
    }


def over_updates(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of the updates of one step: largest of what ends in `_max`, sum of tokens, mean of the rest.

    What only the first update has, the mismatch of fresh tokens, is as it says.
    """
    if len(metrics) == 1:
        return dict(metrics[0])
    together = {key: [m[key] for m in metrics if key in m] for key in metrics[0]}
    return {
        key: max(values)
        if key.endswith("_max")
        else sum(values)
        if key == "tokens"
        else sum(values) / len(values)
        for key, values in together.items()
    }


def reward_spread(samples: Sequence[Sample]) -> float:
    """Standard deviation of the rewards of a prompt's group, mean over groups; of all, if each has one.

    Samples without a trained token or without a verdict don't count; 0 without any.
    """
    groups: dict[str, list[float]] = {}
    for s in samples:
        if s.mask.any() and s.judged:
            groups.setdefault(s.group, []).append(s.reward)
    apart = [g for g in groups.values() if len(g) > 1] or [[r for g in groups.values() for r in g]]
    return fmean(pstdev(g) for g in apart if g) if groups else 0.0


def _max(values: Tensor) -> Tensor:
    return values.max() if len(values) else values.new_zeros(())


def _floats(values: Tensor) -> list[float]:
    return [float(x) for x in values.cpu()]
