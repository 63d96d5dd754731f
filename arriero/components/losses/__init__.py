"""Losses: what an optimizer step lowers. Importing them doesn't import torch.

As components' configuration, per trained token: AIPO, ImportanceWeighted (TIS, MIS, IcePop), CISPO,
ClippedPolicyGradient (PPO, GRPO, DAPO), DecoupledPPO, GSPO, GMPO, DPPO, M2PO, SAPO, DRO, Reinforce, AWR,
CrossEntropy, DPO, KTO, Divergence, OnPolicyDistillation, VMPO; around one of them: WithKL, WithEntropy,
OffPolicyMask; from a function: Custom. As functions: the rest.
"""

from arriero.components.losses.aggregation import Aggregation, sequence_weights
from arriero.components.losses.bounded import VMPO
from arriero.components.losses.clipped import ClippedPolicyGradient, DecoupledPPO
from arriero.components.losses.custom import Custom
from arriero.components.losses.distillation import (
    Divergence,
    OnPolicyDistillation,
    forward_kl,
    jensen_shannon,
    reverse_kl,
)
from arriero.components.losses.importance import (
    AIPO,
    CISPO,
    ImportanceWeight,
    ImportanceWeighted,
    of_mean_one,
)
from arriero.components.losses.likelihood import AWR, CrossEntropy, Reinforce
from arriero.components.losses.loss import (
    MAX_LOG_RATIO,
    Bounded,
    ClipLow,
    Comparing,
    DualClip,
    Facts,
    Loss,
    Need,
    facts,
    reference,
)
from arriero.components.losses.masking import OffPolicyMask
from arriero.components.losses.penalty import WithEntropy, WithKL, kl_estimate, kl_penalty
from arriero.components.losses.preference import DPO, KTO, bradley_terry_loss, dpo_loss, ipo_loss, kto_loss
from arriero.components.losses.sequence import GMPO, GSPO
from arriero.components.losses.trust_region import DPPO, DRO, M2PO, SAPO
from arriero.components.losses.value import value_loss
from arriero.components.losses.vmpo import VMPOLoss, vmpo_loss

__all__ = [
    "AIPO",
    "AWR",
    "CISPO",
    "DPO",
    "DPPO",
    "DRO",
    "GMPO",
    "GSPO",
    "KTO",
    "M2PO",
    "MAX_LOG_RATIO",
    "SAPO",
    "VMPO",
    "Aggregation",
    "Bounded",
    "ClipLow",
    "ClippedPolicyGradient",
    "Comparing",
    "CrossEntropy",
    "Custom",
    "DecoupledPPO",
    "Divergence",
    "DualClip",
    "Facts",
    "ImportanceWeight",
    "ImportanceWeighted",
    "Loss",
    "Need",
    "OffPolicyMask",
    "OnPolicyDistillation",
    "Reinforce",
    "VMPOLoss",
    "WithEntropy",
    "WithKL",
    "bradley_terry_loss",
    "dpo_loss",
    "facts",
    "forward_kl",
    "ipo_loss",
    "jensen_shannon",
    "kl_estimate",
    "kl_penalty",
    "kto_loss",
    "of_mean_one",
    "reference",
    "reverse_kl",
    "sequence_weights",
    "value_loss",
    "vmpo_loss",
]
