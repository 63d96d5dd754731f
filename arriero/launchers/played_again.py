"""Episodes played again from a record: the environment hears what the policy said, and rewards it anew."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial

import numpy as np

from arriero.components.environments import Environment, Turn
from arriero.components.environments.calls import Calls
from arriero.components.environments.environment import verdict
from arriero.components.environments.episodes import Episodes
from arriero.components.environments.tools import Toolbox
from arriero.components.policy import said
from arriero.components.verifiers.reward import Scorer
from arriero.launchers.content_hashes import tokenizer_of_run
from arriero.schemas.manifest import RunManifest
from arriero.schemas.messages import Outcome, Prompt, Rollout, Score


class Replayer(Scorer):
    """What the episodes of the node `name` are worth in `environment`, which is open for work.

    No tool is called: a turn that calls some is rewarded with 0, and `step` isn't told of it. Raises
    UserError without the tokenizer of the run.
    """

    def __init__(
        self, name: str, config: Episodes, environment: Environment, manifest: RunManifest | None
    ) -> None:
        generator = config.generator
        self._environment, self._seconds = environment, config.seconds
        self._toolbox = Toolbox(environment.tools(), chat=bool(generator.chat.template))
        self._tokenizer = tokenizer_of_run(generator.model, f"{name}.generator", manifest)
        self._calls: Calls[Score] = Calls("environment")

    async def scores(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        """One after the other, each as long as the run gave an episode."""
        return [await self.score(prompt, rollout) for rollout in rollouts]

    async def score(self, prompt: Prompt, rollout: Rollout) -> Score:
        return await asyncio.to_thread(self._score, prompt, rollout)

    def _score(self, prompt: Prompt, rollout: Rollout) -> Score:
        self._calls.submit("episode", partial(self._played, prompt, rollout))
        answers = self._calls.answers(wait_s=self._seconds)
        self._calls.forget("episode")
        if not answers:
            detail = f"more than {self._seconds:g} s in the environment"
            return Score(value=0.0, outcome=Outcome.TIMEOUT, detail=detail)
        (answer,) = answers
        if answer.value is None:
            detail = f"{type(answer.error).__name__}: {answer.error}"[:300]
            return Score(value=0.0, outcome=Outcome.ERROR, detail=detail)
        return answer.value

    async def unscorable(self, prompt: Prompt) -> str:
        raise NotImplementedError("what was recorded had a verdict")

    def _played(self, prompt: Prompt, rollout: Rollout) -> Score:
        rewards, right = list[float](), None
        with closing(self._environment.reset(prompt, seed=rollout.seed)) as episode:
            for text in self._turns(rollout):
                turn = Turn() if self._toolbox.calls(text) else episode.step(text)
                rewards.append(float(turn.reward))
                right = turn.right
                if turn.done:
                    break
        return verdict(rewards, right)

    def _turns(self, rollout: Rollout) -> Iterator[str]:
        """What the policy said, turn by turn: between them stands what it read."""
        edges = np.flatnonzero(np.diff(rollout.mask.astype(np.int8), prepend=0, append=0))
        for begin, end in edges.reshape(-1, 2):
            ids: list[int] = rollout.tokens[begin:end].tolist()
            yield said(self._tokenizer, ids)
