"""Each marked line holds one mistake; mypy and pyright must report every one of them and nothing else.

The project's own lint leaves this file out; `test_typing.py` checks it. Never imported.
"""

from __future__ import annotations

from arriero.components.advantage import GroupAdvantage
from arriero.components.generator import Generator
from arriero.components.losses import AIPO
from arriero.components.prompts import PromptSource
from arriero.components.rewards import ExactMatch
from arriero.components.trainer import Trainer
from arriero.engine.graph import Graph, each
from arriero.schemas.messages import Batch, Outcome, RolloutGroup, Score, ScoredGroup, Weights


def exact_match(group: RolloutGroup) -> ScoredGroup:
    """The first rollout is right."""
    scores = tuple(Score(value=1.0, outcome=Outcome.OK) for _ in group.rollouts)
    return ScoredGroup(group=group, scores=scores)


def clipped(batch: Batch) -> float:
    """Neither a loss nor a component."""
    return float(len(batch.samples))


g = Graph("wrong")
weights = g.loop(Weights, staleness=0)
prompts = g.add(PromptSource(path=""))()
rollouts = g.add(Generator(model=""))(prompts, weights)
scored = g.add(each(exact_match))(rollouts)
batches = g.add(GroupAdvantage(groups=2))(scored)

g.add(Generator(model=""))(rollouts, weights)  # E1 wrong record type on a port
g.add(Generator(model=""))(prompts=rollouts, weights=weights)  # E1 the same by name
g.add(Generator(model=""))(weights, prompts)  # E1 two streams the wrong way round
g.add(ExactMatch())(prompts)  # E1 for a component that is a function of one record
g.add(Generator(model=""))(prompts)  # E2 an input is missing
g.add(Generator(model=""))(weights=weights)  # E2 the other one
g.add(Generator(model=""))()  # E2 both
g.add(Generator(model=""))(prompts, weights, prompts)  # E3 one input too many
g.add(PromptSource(path=""))(prompts)  # E3 for a source
g.add(Generator(model=""))(prompts, weights, prompts=prompts)  # E3 an input twice
g.add(Generator(model=""))(prompts=prompts, weight=weights)  # E4 no such port
g.add(Generator(model=""))(prompts, weight=weights)  # E4 the same, partly by position
g.add(each(exact_match))(prompts)  # E5 wrong record type for a lifted function
g.add(each(exact_match))(records=prompts)  # E5 the same by name
g.add(each(clipped))(batches)  # E5 a lifted function that gives no record
weights.close(batches)  # E6 the loop is closed by the wrong type
weights.close(g.add(GroupAdvantage(groups=2))(scored))  # E6 the same in one expression
Trainer(model="", loss=exact_match, steps=1)  # E7 a loss with the wrong signature
Trainer(model="", loss=AIPO, steps=1)  # E7 a class where a loss is needed
PromptSource(path="", epoch=2)  # E8 unknown config field
GroupAdvantage(2)  # E8 config fields have names
GroupAdvantage()  # E8 a required config field is missing
GroupAdvantage(groups=2, baseline="median")  # E8 no such value
g.add(clipped)  # E9 not a component
g.add(Generator)(prompts, weights)  # E9 a class where an instance is needed
g.loop(Weights)  # E10 a loop without a bound
g.loop(int, staleness=1)  # E10 a loop without versions

weights.close(g.add(Trainer(model="", loss=AIPO(), steps=1))(batches))
