"""Records for tests of rewards, and a reward run over them as the runtime runs it."""

from __future__ import annotations

from typing import Any

from arriero.components.verifiers.canaries import response
from arriero.components.verifiers.reward import RolloutReward
from arriero.schemas.messages import Dropped, Prompt, Rollout, RolloutGroup, Score, ScoredGroup
from tests.drive import outputs, stream


def rollout(text: str) -> Rollout:
    return response(text)


def group(
    *texts: str, answer: str = "", metadata: dict[str, Any] | None = None, id: str = "g"
) -> RolloutGroup:
    prompt = Prompt(id="e0-r7", text="?", answer=answer, metadata=metadata or {}, row=7)
    return RolloutGroup(id=id, prompt=prompt, rollouts=tuple(rollout(t) for t in texts))


async def run(reward: RolloutReward, *records: RolloutGroup) -> list[ScoredGroup | Dropped]:
    return await outputs(reward.run(stream(records, RolloutGroup)))


async def scores(reward: RolloutReward, record: RolloutGroup) -> list[Score]:
    (found,) = await run(reward, record)
    assert isinstance(found, ScoredGroup), found
    assert found.group is record
    return list(found.scores)


async def values(reward: RolloutReward, record: RolloutGroup) -> list[float]:
    return [s.value for s in await scores(reward, record)]


def outcome(reward: RolloutReward, answer: str, text: str, **metadata: Any) -> str:
    """The verdict on one response, computed here."""
    found = reward.score(Prompt(text="?", answer=answer, metadata=metadata), rollout(text))
    assert isinstance(found, Score)
    return found.outcome.value


def hangs_at_row_1(prompt: Prompt, response: Rollout) -> float:
    """For a worker, which imports this module and not that of the test."""
    while prompt.row == 1 and response.text == "#### -1":
        pass
    return 1.0


def generous(prompt: Prompt, response: Rollout) -> bool:
    """Tells nothing from nothing."""
    return True
