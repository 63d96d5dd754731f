"""What a training step measures over its trained tokens, summed over micro-batches and ranks.

Every rank reduces the same keys, whatever its share holds: an empty share adds zeros.
"""

# pyright: reportUnknownMemberType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor

    from arriero.components.packing import PackedTokens

_SUMS = ("loss", "tokens", "entropy", "clipped", "mismatch", "ratio", "ratio_squared", "kl")


class Measures:
    """Sums and maxima in float64, kept on the device so that a step waits for it once.

    `off_policy`: whether every sample of the batch has behaviour log-probabilities, and so a ratio.
    """

    def __init__(self, device: torch.device, *, off_policy: bool) -> None:
        self.off_policy = off_policy
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._maxima = torch.zeros(2, dtype=torch.float64, device=device)

    def add(
        self, loss: Tensor, logprobs_T: Tensor, entropy_T: Tensor, tokens: PackedTokens, clipped_T: Tensor
    ) -> None:
        """Count one micro-batch; `loss` is its share of the step's loss."""
        if not len(logprobs_T):
            return
        log_ratio_T = torch.zeros_like(logprobs_T, dtype=torch.float64)
        if self.off_policy and tokens.behaviour_T is not None:
            log_ratio_T = logprobs_T.double() - tokens.behaviour_T.double()
        ratio_T, mismatch_T = log_ratio_T.exp(), log_ratio_T.abs()
        # Unbiased and never negative: r - 1 - log r, J. Schulman, "Approximating KL divergence" (2020), k3.
        kl_T = ratio_T - 1 - log_ratio_T
        per_token = (entropy_T, clipped_T, mismatch_T, ratio_T, ratio_T.square(), kl_T)
        self._sums += torch.stack(
            [loss.double(), loss.new_tensor(len(logprobs_T)).double(), *(x.double().sum() for x in per_token)]
        )
        self._maxima = self._maxima.maximum(torch.stack([mismatch_T.max(), ratio_T.max()]))

    def totals(self, group: dist.ProcessGroup | None, *, digest: int) -> dict[str, float]:
        """Measures of the whole step, means over trained tokens; those of a ratio only where there is one.

        mismatch: |log pi - log mu| in nats. kl: from behaviour to policy. effective_samples: the share of
        tokens that would weigh as much if all ratios were 1. RuntimeError if ranks disagree on `digest`.
        """
        sums, maxima = self._sums, torch.cat([self._maxima, self._sums.new_tensor([digest, -digest])])
        if group is not None:
            dist.all_reduce(sums, group=group)
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        total = dict(zip(_SUMS, _floats(sums), strict=True))
        mismatch_max, ratio_max, largest, smallest = _floats(maxima)
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
        return metrics


def over_updates(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of the updates of one step: largest of what ends in `_max`, sum of tokens, mean of the rest."""
    if len(metrics) == 1:
        return dict(metrics[0])
    together = {key: [m[key] for m in metrics] for key in metrics[0]}
    return {
        key: max(values)
        if key.endswith("_max")
        else sum(values)
        if key == "tokens"
        else sum(values) / len(values)
        for key, values in together.items()
    }


def _floats(values: Tensor) -> list[float]:
    return [float(x) for x in values.cpu()]
