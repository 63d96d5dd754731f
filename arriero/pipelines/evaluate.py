"""Evaluation: how many held-out prompts a model gets right; what `arriero eval` runs."""

from __future__ import annotations

from arriero.components.evaluation_recipe import EvaluateConfig
from arriero.components.fixed_weights import FixedWeights, HeldOutSource
from arriero.engine.graph import Graph
from arriero.schemas.messages import Weights


def evaluate(cfg: EvaluateConfig) -> Graph:
    """The graph of a training run without training."""
    g = Graph("evaluate")
    weights = g.loop(Weights, staleness=0)
    held_out = HeldOutSource.of(cfg.data, cfg.environment or cfg.reward)
    prompts = g.add(held_out, name="prompts")()
    if cfg.environment is not None:
        scored = g.add(cfg.episodes(cfg.environment), replicas=cfg.generators)(prompts, weights)
    else:
        rollouts = g.add(cfg.generator(), replicas=cfg.generators)(prompts, weights)
        scored = g.add(cfg.reward, name="reward", replicas=cfg.rewards)(rollouts)
    weights.close(g.add(FixedWeights(model=cfg.model), name="weights")(scored))
    return g
