"""From rollout groups to scored groups: canaries first, then several groups at once, each answered once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator

from arriero.components.verifiers.canaries import refuse_blind
from arriero.components.verifiers.quarantine import Quarantine
from arriero.components.verifiers.reward import RolloutReward, Scorer
from arriero.components.verifiers.version import reward_version
from arriero.engine.errors import UserError
from arriero.engine.runtime.context import count
from arriero.engine.stream import Stream
from arriero.schemas.messages import Dropped, Outcome, RolloutGroup, Score, ScoredGroup

log = logging.getLogger(__name__)

_BLIND = 256  # scores in a row without a verdict that end the run
_BLIND_SLOWLY, _BLIND_S = 8, 120.0  # so many are enough if they took so long: every one runs out of time
_UNSCORABLE = 8  # prompts from the first on that end it

VERDICTS = (Outcome.OK, Outcome.WRONG)


async def scored(
    reward: RolloutReward, records: Stream[RolloutGroup]
) -> AsyncGenerator[ScoredGroup | Dropped, None]:
    """One output for each record, in the order in which they are done. Raises UserError (`RolloutReward`)."""
    async with reward.opened() as scorer:
        await refuse_blind(reward, scorer)
        desk = Desk(reward, scorer)
        running: set[asyncio.Task[ScoredGroup | Dropped]] = set()
        arrival: asyncio.Task[RolloutGroup | None] | None = asyncio.create_task(records.next())
        try:
            while arrival or running:
                waiting = [arrival] if arrival and len(running) < max(1, reward.want()) else []
                done, _ = await asyncio.wait([*running, *waiting], return_when=asyncio.FIRST_COMPLETED)
                for answered in [t for t in running if t in done]:
                    running.discard(answered)
                    yield desk.told(answered.result())
                if arrival and arrival in done:
                    record = arrival.result()
                    arrival = asyncio.create_task(records.next()) if record else None
                    if record:
                        running.add(asyncio.create_task(desk.answer(record)))
        finally:
            for task in (*running, *([arrival] if arrival else [])):
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        desk.end()


class Desk:
    """Answers groups, and knows when a reward has stopped to make sense."""

    def __init__(self, reward: RolloutReward, scorer: Scorer) -> None:
        self._reward, self._scorer = reward, scorer
        self._version = reward_version(reward)
        self._scored = self._blind = 0
        self._blind_since = 0.0
        self._lost = False
        self._unscorable: dict[int, str] = {}
        self._report = Quarantine()

    async def answer(self, record: RolloutGroup) -> ScoredGroup | Dropped:
        """The scores in the order of the rollouts, or why the prompt is quarantined."""
        if why := await self._scorer.unscorable(record.prompt):
            self._report.tell([(record.prompt, why)])
            return Dropped(parent=record.id, reason="invalid", detail=f"quarantined: {why}"[:500])
        scores = await self._scorer.scores(record.prompt, record.rollouts)
        return ScoredGroup(
            parents=(record.id,), group=record, scores=tuple(scores), reward_version=self._version
        )

    def told(self, out: ScoredGroup | Dropped) -> ScoredGroup | Dropped:
        """`out`, counted. Raises UserError where going on has no sense."""
        if isinstance(out, Dropped):
            self._quarantined(out)
            return out
        self._scored += 1
        for score in out.scores:
            if score.outcome not in VERDICTS:
                count(f"scores_{score.outcome.value}")
                self._without_verdict(score)
            else:
                self._blind = 0
        return out

    def end(self) -> None:
        """At the end of the stream. Raises UserError if no prompt could be scored."""
        if self._unscorable and not self._scored:
            raise UserError(self._nothing_to_score())

    def _quarantined(self, out: Dropped) -> None:
        count("prompts_quarantined")
        self._unscorable[len(self._unscorable)] = out.detail
        if not self._scored and len(self._unscorable) >= _UNSCORABLE:
            raise UserError(self._nothing_to_score())

    def _nothing_to_score(self) -> str:
        return (
            f"reward {self._reward.label} can score none of the first {len(self._unscorable)} prompts: "
            f"{self._unscorable[0]}; set answer_field of the data, or another reward"
        )

    def _without_verdict(self, score: Score) -> None:
        now = time.monotonic()
        if not self._lost:
            log.warning(
                "reward %s: no verdict on a response: %s: %s (told once; all are counted)",
                self._reward.label, score.outcome.value, score.detail,
            )  # fmt: skip
        self._lost = True
        self._blind_since = self._blind_since if self._blind else now
        self._blind += 1
        if self._blind >= _BLIND or (self._blind >= _BLIND_SLOWLY and now - self._blind_since > _BLIND_S):
            raise UserError(
                f"reward {self._reward.label} had no verdict {self._blind} times in a row; the last: "
                f"{score.outcome.value}: {score.detail}"
            )
