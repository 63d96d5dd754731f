"""On-policy distillation: a teacher reads the student's own tokens (arXiv:2306.13649)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, model_validator
from pydantic.dataclasses import dataclass

from arriero.components.advantage import GroupAdvantage
from arriero.components.losses import Divergence, OnPolicyDistillation
from arriero.components.recipe import PolicyGradientConfig
from arriero.components.reference import ReferenceLogprobs
from arriero.engine.graph import Graph
from arriero.schemas.messages import Weights


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class DistillConfig(PolicyGradientConfig):
    """`teacher` has the vocabulary of `model`; the reward is only reported: what is learned is the teacher.

    divergence: `sampled` knows of the teacher what it says of the sampled tokens, from a process of its own;
    the others compare whole distributions, with the teacher beside the policy in the trainer.
    """

    teacher: str
    staleness: NonNegativeInt = 1
    divergence: Literal["forward", "reverse", "jsd", "sampled"] = "sampled"
    rho: PositiveFloat | None = None  # where the ratio of stale tokens is cut under `sampled`: 2
    beta: float | None = Field(default=None, gt=0, lt=1)  # the teacher's share in what jsd compares with: 0.5

    @model_validator(mode="after")
    def _all_read(self) -> Self:
        for key, reader in (("rho", "sampled"), ("beta", "jsd")):
            if self.divergence != reader and (value := getattr(self, key)) is not None:
                raise ValueError(f"{key}={value} isn't read by divergence={self.divergence}; leave it out")
        return self


def distill(cfg: DistillConfig) -> Graph:
    """The teacher says of every token how likely it finds it: a dense reward without a verifier."""
    g = Graph("distill")
    weights = g.loop(Weights, staleness=cfg.staleness)
    prompts = g.add(cfg.data, name="prompts")()
    rollouts = g.add(cfg.generator(), replicas=cfg.generators)(prompts, weights)
    scored = g.add(cfg.reward, name="reward", replicas=cfg.rewards)(rollouts)
    batcher = GroupAdvantage(
        groups=cfg.groups_per_step, drop_last=cfg.drop_last, baseline="none", rewards="reported"
    )
    batches = g.add(batcher, name="batch")(scored)
    if cfg.divergence == "sampled":
        teacher = ReferenceLogprobs(model=cfg.teacher, token_budget=cfg.token_budget)
        batches = g.add(teacher, name="teacher")(batches)
        trainer = cfg.trainer(OnPolicyDistillation(rho=cfg.rho or 2.0))
    else:
        trainer = cfg.trainer(Divergence(kind=cfg.divergence, beta=cfg.beta or 0.5), teacher=cfg.teacher)
    weights.close(g.add(trainer, ranks=cfg.ranks)(batches))
    return g
