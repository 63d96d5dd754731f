"""A reward for threads that wait for its verdicts: computed where it belongs, in killable workers say."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import copy_context

from arriero.components.verifiers.canaries import refuse_blind
from arriero.components.verifiers.reward import RolloutReward, Scorer
from arriero.schemas.messages import Prompt, Rollout, Score


class Judge:
    """Asks a scorer on another thread's event loop; for any thread but that one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, scorer: Scorer) -> None:
        self.loop, self._scorer = loop, scorer

    def score(self, prompt: Prompt, rollout: Rollout) -> Score:
        """Waits as long as the reward's own limits allow."""
        return asyncio.run_coroutine_threadsafe(self._scorer.score(prompt, rollout), self.loop).result()

    def unscorable(self, prompt: Prompt) -> str:
        return asyncio.run_coroutine_threadsafe(self._scorer.unscorable(prompt), self.loop).result()


@contextmanager
def judging(reward: RolloutReward) -> Generator[Judge, None, None]:
    """`reward` ready for work, on an event loop in a thread of its own, after its canaries.

    Raises UserError as a reward's `run` does.
    """
    ready: Future[Judge] = Future()
    ended: list[asyncio.Event] = []

    async def serve() -> None:
        over = asyncio.Event()
        try:
            async with reward.opened() as scorer:
                await refuse_blind(reward, scorer)
                ended.append(over)
                ready.set_result(Judge(asyncio.get_running_loop(), scorer))
                await over.wait()
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    context = copy_context()
    # Workers die with the thread that started them, should this process be killed.
    thread = threading.Thread(target=lambda: context.run(asyncio.run, serve()), name="judging", daemon=True)
    thread.start()
    judge = ready.result()
    try:
        yield judge
    finally:
        judge.loop.call_soon_threadsafe(ended[0].set)
        thread.join()
