"""On-policy distillation: a teacher reads the student's own tokens (arXiv:2306.13649)."""

from __future__ import annotations

from pydantic import ConfigDict, NonNegativeInt, PositiveFloat
from pydantic.dataclasses import dataclass

from arriero.components.advantage import GroupAdvantage
from arriero.components.losses import OnPolicyDistillation
from arriero.components.recipe import PolicyGradientConfig
from arriero.components.reference import ReferenceLogprobs
from arriero.engine.graph import Graph
from arriero.schemas.messages import Weights


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class DistillConfig(PolicyGradientConfig):
    """`teacher` has the vocabulary of `model`; the ratio of stale tokens is truncated at `rho`.

    The reward is only reported: what is learned is the teacher.
    """

    teacher: str
    staleness: NonNegativeInt = 1
    rho: PositiveFloat = 2.0


def distill(cfg: DistillConfig) -> Graph:
    """The teacher says of every token how likely it finds it: a dense reward without a verifier."""
    g = Graph("distill")
    weights = g.loop(Weights, staleness=cfg.staleness)
    prompts = g.add(cfg.data, name="prompts")()
    rollouts = g.add(cfg.generator(), replicas=cfg.generators)(prompts, weights)
    scored = g.add(cfg.reward, name="reward", replicas=cfg.rewards)(rollouts)
    batches = g.add(
        GroupAdvantage(groups=cfg.groups_per_step, drop_last=cfg.drop_last, baseline="none"), name="batch"
    )(scored)
    teacher = ReferenceLogprobs(model=cfg.teacher, token_budget=cfg.token_budget)
    read = g.add(teacher, name="teacher")(batches)
    weights.close(g.add(cfg.trainer(OnPolicyDistillation(rho=cfg.rho)), ranks=cfg.ranks)(read))
    return g
