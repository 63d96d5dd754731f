"""V-MPO: a policy improvement by weighing the best half of the samples, with a learned temperature.

Shape suffix: N = samples. Source: arXiv:1909.12238.
"""

# ruff: noqa: N815
# Shapes are suffixes of names, of fields too.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class VMPOLoss:
    """The parts of the loss; minimise `policy_N.sum() + temperature + kl_N.mean() + multiplier_N.mean()`.

    `policy_N` carries the gradient of the policy, `temperature` that of the temperature, `kl_N` that of the
    policy through its divergence, `multiplier_N` that of the multiplier. `weights_N` sum to 1.
    """

    weights_N: Tensor
    policy_N: Tensor
    temperature: Tensor
    kl_N: Tensor
    multiplier_N: Tensor


def vmpo_loss(
    logprobs_N: Tensor,
    advantages_N: Tensor,
    kl_N: Tensor,
    *,
    temperature: Tensor,
    multiplier: Tensor,
    eps_temperature: float,
    eps_kl: float,
    top_fraction: float = 0.5,
) -> VMPOLoss:
    """The loss over one batch; `temperature` and `multiplier` are positive scalars that are learned too.

    The samples with the `top_fraction` largest advantages get weights softmax(A / temperature), the others 0;
    `eps_temperature` bounds how far these weights are from equal ones, `eps_kl` how far the policy moves.
    ValueError if no sample is left.
    """
    kept = round(top_fraction * len(advantages_N))
    if kept < 1:
        raise ValueError(f"top_fraction={top_fraction} of {len(advantages_N)} samples leaves none")
    scaled_N = advantages_N.detach() / temperature
    best_N = advantages_N.new_zeros(len(advantages_N)).bool()
    best_N[advantages_N.argsort(descending=True, stable=True)[:kept]] = True
    kept_N = scaled_N.masked_fill(~best_N, float("-inf"))
    weights_N = kept_N.softmax(0).detach()
    log_mean = kept_N.logsumexp(0) - scaled_N.new_tensor(float(kept)).log()
    return VMPOLoss(
        weights_N=weights_N,
        policy_N=-weights_N * logprobs_N,
        temperature=temperature * (eps_temperature + log_mean),
        kl_N=multiplier.detach() * kl_N,
        multiplier_N=multiplier * (eps_kl - kl_N.detach()),
    )
