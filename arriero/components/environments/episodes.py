"""`Episodes`: a generator whose rollouts are conversations with an environment, which also rewards them.

    prompt -> reset -> opening -> turn of the policy -> step -> observation -> turn ... -> scored group

As a generator it never waits for the trainer, nor for an environment: episodes whose environment works leave
their rows of the engine to others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import ConfigDict, PositiveFloat, PositiveInt, SkipValidation
from pydantic.dataclasses import dataclass

from arriero.components.compute import ComputeThread
from arriero.components.environments.environment import Environment
from arriero.components.evaluation_lane import EvaluationLane, beside
from arriero.components.generator import Generator
from arriero.components.rollout_loop import continuously, one_by_one
from arriero.components.sampling import Sampling
from arriero.components.stragglers import Stragglers
from arriero.components.weight_intake import WeightIntake
from arriero.engine.graph import GraphView
from arriero.engine.runtime.context import Context, current
from arriero.engine.stream import Stream
from arriero.schemas.messages import Dropped, Prompt, ScoredGroup, Weights

if TYPE_CHECKING:
    from arriero.components.environments.episode_decoding import EpisodeDecoding


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", arbitrary_types_allowed=True))
class Episodes:
    """Groups of `generator.samples` episodes of `environment` for each prompt, with their scores.

    `generator.sampling.max_new_tokens` bounds a turn. An episode ends when its environment says so, or is cut
    off after `turns` turns of the policy or `tokens` tokens (None: the context), with the rewards it has by
    then. What raises in the environment makes an episode with outcome `error`; one that takes longer than
    `seconds`, decoding included, has outcome `timeout`. Neither has a verdict, and `GroupAdvantage` leaves
    both out. An opening that leaves no room for a turn drops its prompt as too long.

    Without `generator.chat.template` an observation is written as `observation` says; with one it is a
    message of the user, or of a tool.
    """

    generator: Generator
    environment: SkipValidation[Environment]
    turns: PositiveInt = 8
    tokens: PositiveInt | None = None
    seconds: PositiveFloat = 120.0
    observation: str = "\n{text}\n"
    computes: ClassVar[bool] = True

    @property
    def samples(self) -> int:
        return self.generator.samples

    @property
    def sampling(self) -> Sampling:
        return self.generator.sampling

    def want(self) -> int:
        return self.generator.want()

    def problems(self, view: GraphView) -> Iterable[str]:
        yield from self.generator.problems(view)
        yield from self.environment.problems()
        if self.generator.stragglers != Stragglers():
            yield f"{self.generator.stragglers}: an episode isn't cut into segments; leave these out"
        if self.generator.greedy_baseline:
            yield "generator.greedy_baseline=true: no episode is played greedily; leave it out"
        if "{text}" not in self.observation:
            yield f"observation={self.observation!r} has no {{text}}; put it where the text belongs"
        if self.tokens is not None and self.tokens <= self.sampling.max_new_tokens:
            yield (
                f"tokens={self.tokens} leave no room beside a turn of "
                f"sampling.max_new_tokens={self.sampling.max_new_tokens}; raise it"
            )
        if self.seconds >= self.generator.group_timeout_s:
            yield (
                f"seconds={self.seconds:g} are never reached: a group ends after "
                f"generator.group_timeout_s={self.generator.group_timeout_s:g}; lower the first"
            )

    async def run(
        self, prompts: Stream[Prompt], weights: Stream[Weights]
    ) -> AsyncIterator[ScoredGroup | Dropped]:
        context = current()
        with ComputeThread("episodes") as compute:
            work = await compute(self._load, context)
            intake = WeightIntake(weights, work, compute, beside=work.receives_beside)
            lane = self._lane(weights, context, compute)
            try:
                if not await intake.begin():
                    return
                if context.deterministic:
                    drive = one_by_one(prompts, intake, work, compute)
                else:
                    drive = continuously(prompts, intake, work, compute, lane)
                async for group in drive:
                    yield group
            finally:
                await intake.close()
                await compute(work.close)
                if lane is not None:
                    await lane.close()

    def _lane(
        self, weights: Stream[Weights], context: Context, compute: ComputeThread
    ) -> EvaluationLane[ScoredGroup] | None:
        if not self.generator.evaluates_beside(context):
            return None
        second = replace(self, generator=replace(self.generator, standby=False))
        return EvaluationLane(weights, compute, lambda: second._load(beside(context), beside=True))

    def _load(self, context: Context, *, beside: bool = False) -> EpisodeDecoding:
        from arriero.components.environments.episode_decoding import EpisodeDecoding

        return EpisodeDecoding(self, context, beside=beside)
