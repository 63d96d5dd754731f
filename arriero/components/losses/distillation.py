"""Learning from a teacher's distribution, and from its log-probabilities of sampled tokens.

Shape suffix: T = trained tokens, V = vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveFloat
from pydantic.dataclasses import dataclass

from arriero.components.losses.loss import Need, Unclipped, full_precision, log_ratio, ratio, reference
from arriero.components.losses.penalty import kl_penalty

if TYPE_CHECKING:
    from torch import Tensor

    from arriero.components.packing import PackedTokens


_LEAST = -1e4  # nats; what a model excludes has -inf


def forward_kl(student_logits_TV: Tensor, teacher_logits_TV: Tensor) -> Tensor:
    """KL(teacher, student) [T] in nats: the student covers all that the teacher does. arXiv:1503.02531."""
    teacher_TV = teacher_logits_TV.log_softmax(-1)
    return _kl(teacher_TV, student_logits_TV.log_softmax(-1))


def reverse_kl(student_logits_TV: Tensor, teacher_logits_TV: Tensor) -> Tensor:
    """KL(student, teacher) [T] in nats: the student keeps to what the teacher does. arXiv:2306.08543."""
    return _kl(student_logits_TV.log_softmax(-1), teacher_logits_TV.log_softmax(-1))


def jensen_shannon(student_logits_TV: Tensor, teacher_logits_TV: Tensor, *, beta: float = 0.5) -> Tensor:
    """`beta KL(teacher, m) + (1 - beta) KL(student, m)` [T] with m = beta teacher + (1 - beta) student.

    At most log 2 for beta = 1/2. ValueError unless 0 < beta < 1. Source: arXiv:2306.13649.
    """
    if not 0 < beta < 1:
        raise ValueError(f"beta={beta} must lie between 0 and 1; the ends are forward_kl and reverse_kl")
    student_TV, teacher_TV = student_logits_TV.log_softmax(-1), teacher_logits_TV.log_softmax(-1)
    weight = student_TV.new_tensor([beta, 1 - beta]).log()
    mixture_TV = (_held(teacher_TV) + weight[0]).logaddexp(_held(student_TV) + weight[1])
    return beta * _kl(teacher_TV, mixture_TV) + (1 - beta) * _kl(student_TV, mixture_TV)


def _kl(p_TV: Tensor, q_TV: Tensor) -> Tensor:
    return (p_TV.exp() * (_held(p_TV) - _held(q_TV))).sum(-1)


def _held(x_TV: Tensor) -> Tensor:
    """Log-probabilities, finite where a token has none: 0 * -inf is NaN, and so are its gradients."""
    return x_TV.clamp_min(_LEAST)


@dataclass(frozen=True, kw_only=True)
class OnPolicyDistillation:
    """KL(student, teacher) on the student's own tokens: the gradient of `-w * log(teacher/pi) * log pi`.

    The reference log-probabilities of the samples are the teacher's; rewards and advantages aren't read. w is
    the ratio of student to behaviour, at most `rho`. The value of a token is w * log(pi/teacher).
    Source: arXiv:2306.13649, and K. Lu, "On-policy distillation" (2025).
    """

    rho: PositiveFloat = 2.0
    needs_behaviour: ClassVar[bool] = True
    ratio_control: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = frozenset({"reference"})
    policy_gradient: ClassVar[bool] = False

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        full_precision(logprobs_T)
        weight_T = ratio(log_ratio(logprobs_T, tokens).detach()).clamp(max=self.rho)
        return kl_penalty(logprobs_T, reference(tokens), "k1", weight_T=weight_T)

    def clipped(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        return ratio(log_ratio(logprobs_T, tokens)) > self.rho


@dataclass(frozen=True, kw_only=True)
class Divergence(Unclipped):
    """How far the policy's whole distribution is from the teacher's, at each trained token.

    kind: `forward`, `reverse` or `jsd` (with `beta`), as the functions say. Who sampled the tokens says where
    the two are compared and not what comes out, so no ratio is needed on data of any age. Source: generalised
    knowledge distillation, arXiv:2306.13649.
    """

    kind: Literal["forward", "reverse", "jsd"] = "reverse"
    beta: float = Field(default=0.5, gt=0, lt=1)
    needs_behaviour: ClassVar[bool] = False
    ratio_control: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = frozenset({"divergence"})
    policy_gradient: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.kind != "jsd" and self.beta != 0.5:
            raise ValueError(f"beta={self.beta} isn't read by kind={self.kind!r}; it mixes what jsd compares")

    def between(self, student_logits_TV: Tensor, teacher_logits_TV: Tensor) -> Tensor:
        if self.kind == "jsd":
            return jensen_shannon(student_logits_TV, teacher_logits_TV, beta=self.beta)
        kl = forward_kl if self.kind == "forward" else reverse_kl
        return kl(student_logits_TV, teacher_logits_TV)

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        if tokens.divergence_T is None:
            raise ValueError("this loss needs the divergence from a teacher, which the trainer computes")
        full_precision(tokens.divergence_T)
        return tokens.divergence_T
