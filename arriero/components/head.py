"""Log-probabilities and entropies of chosen tokens, from hidden states, a chunk of the logits at a time.

    hidden [T, H] -> for each chunk: logits [C, V] -> log-probability and entropy [C], and the logits are gone

The tensor [T, V] of all logits is never whole, forward or backward: backward makes each chunk anew, the last
one first, which is still there. So nothing is computed twice where one chunk is enough.

Shape suffixes: T = tokens, C = tokens of a chunk, V = vocabulary, H = hidden.
"""

# pyright: reportUnknownMemberType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """How logits are computed: `chunk_mb` of them at a time, as products in `dtype`.

    The softmax is float32, or float64 where the products are. `entropy_gradient`: whether it has one.
    """

    chunk_mb: int = 128
    dtype: torch.dtype | None = None
    entropy_gradient: bool = False

    def chunk(self, vocabulary: int) -> int:
        """Tokens of a chunk; at least one."""
        return max(1, (self.chunk_mb << 20) // (4 * vocabulary))

    def __call__(
        self, hidden_TH: Tensor, linear: torch.nn.Linear, targets_T: Tensor, temperatures_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of `targets_T` and entropy, nats [T], of softmax(linear(hidden) / temperature)."""
        untyped: Any = _LogProbs  # `apply` of a Function isn't typed
        logprobs_T, entropy_T = untyped.apply(
            hidden_TH, linear.weight, linear.bias, targets_T, temperatures_T, self
        )
        return logprobs_T, entropy_T


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        temperatures_T: Tensor,
        head: Head,
    ) -> tuple[Tensor, Tensor]:
        dtype = head.dtype or weight_VH.dtype
        tokens, size = len(hidden_TH), head.chunk(len(weight_VH))
        chunks = [slice(i, min(i + size, tokens)) for i in range(0, tokens, size)]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        logprobs_T, entropy_T = (hidden_TH.new_zeros(tokens, dtype=wide) for _ in range(2))
        weight = weight_VH.to(dtype)
        log_CV: Tensor | None = None
        with torch.autocast(hidden_TH.device.type, enabled=False):
            for c in chunks:
                del log_CV
                log_CV = _log_softmax(hidden_TH[c].to(dtype), weight, bias_V, temperatures_T[c], wide)
                logprobs_T[c] = log_CV.gather(1, targets_T[c, None])[:, 0]
                entropy_T[c] = -torch.linalg.vecdot(log_CV.exp(), log_CV)
        ctx.save_for_backward(hidden_TH, weight_VH, bias_V, targets_T, temperatures_T, entropy_T, log_CV)
        ctx.head, ctx.chunks = head, chunks
        if not head.entropy_gradient:
            ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        by_logprobs_T, by_entropy_T = grad_outputs
        hidden_TH, weight_VH, bias_V, targets_T, temperatures_T, entropy_T, log_CV = ctx.saved_tensors
        head: Head = ctx.head
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        dtype, wide = head.dtype or weight_VH.dtype, entropy_T.dtype
        weight = weight_VH.to(dtype)
        by_hidden_TH = torch.zeros_like(hidden_TH) if to_hidden else None
        by_weight_VH = torch.zeros_like(weight_VH, dtype=wide) if to_weight else None
        by_bias_V = torch.zeros_like(bias_V, dtype=wide) if to_bias else None
        with torch.autocast(hidden_TH.device.type, enabled=False):
            for c in reversed(ctx.chunks):
                hidden = hidden_TH[c].to(dtype)
                if log_CV is None:
                    log_CV = _log_softmax(hidden, weight, bias_V, temperatures_T[c], wide)
                by_logits_CV = _by_logits(
                    log_CV, targets_T[c], by_logprobs_T[c],
                    (by_entropy_T[c], entropy_T[c]) if head.entropy_gradient else None,
                )  # fmt: skip
                log_CV = None
                by_logits_CV /= temperatures_T[c, None]
                if by_bias_V is not None:
                    by_bias_V += by_logits_CV.sum(0)
                by_logits_CV = by_logits_CV.to(dtype)
                if by_hidden_TH is not None:
                    by_hidden_TH[c] = by_logits_CV @ weight
                if by_weight_VH is not None and dtype == wide:
                    by_weight_VH.addmm_(by_logits_CV.T, hidden)
                elif by_weight_VH is not None:
                    by_weight_VH += by_logits_CV.T @ hidden
        return (
            by_hidden_TH,
            None if by_weight_VH is None else by_weight_VH.to(weight_VH.dtype),
            None if by_bias_V is None or bias_V is None else by_bias_V.to(bias_V.dtype),
            None,
            None,
            None,
        )


def _log_softmax(
    hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperatures_C: Tensor, wide: torch.dtype
) -> Tensor:
    """[C, V] in `wide`, of the logits divided by the temperatures."""
    logits_CV = (hidden_CH @ weight_VH.T).to(wide)
    if bias_V is not None:
        logits_CV += bias_V
    logits_CV /= temperatures_C[:, None]
    return logits_CV.sub_(logits_CV.logsumexp(-1, keepdim=True))


def _by_logits(
    log_CV: Tensor, targets_C: Tensor, by_logprobs_C: Tensor, by_entropy: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Gradient [C, V] by the scaled logits; `by_entropy`: the gradient by the entropy, and the entropy.

    d log p_t / d z = 1_t - p, and d H / d z = -p (log p + H).
    """
    p_CV = log_CV.exp()
    if by_entropy is None:
        by_CV = p_CV.mul_(-by_logprobs_C[:, None])
    else:
        by_entropy_C, entropy_C = by_entropy
        factor_CV = log_CV.add_(entropy_C[:, None]).mul_(by_entropy_C[:, None]).add_(by_logprobs_C[:, None])
        by_CV = p_CV.mul_(factor_CV).neg_()
    return by_CV.scatter_add_(1, targets_C[:, None], by_logprobs_C[:, None])
