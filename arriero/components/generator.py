"""The generator: rollout groups from prompts, with weights that change under way.

It never waits for the trainer: between two decoding steps it takes the newest weights, admits new prompts
into free slots, and gives the groups that are complete. In deterministic mode it decodes one group at a time
with exactly the version the group was admitted for, so that nothing depends on timing or on neighbours.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import field
from typing import TYPE_CHECKING, ClassVar

from pydantic import ConfigDict, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.chat import ChatFormat
from arriero.components.compute import ComputeThread
from arriero.components.model_directory import check_model_directory, context_length
from arriero.components.rollout_engine import EngineName, EnginePrecision, KVCache
from arriero.components.sampling import Sampling
from arriero.components.vllm_options import VLLMOptions
from arriero.engine.graph import GraphView
from arriero.engine.runtime.context import Context, current
from arriero.engine.stream import Stream
from arriero.schemas.messages import Dropped, Prompt, RolloutGroup, Weights

if TYPE_CHECKING:
    from arriero.components.group_decoding import GroupDecoding


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Generator:
    """Samples `samples` rollouts for each prompt, up to `slots` sequences at once.

    A prompt that leaves no room for `sampling.max_new_tokens` in the context is dropped as too long; a group
    that isn't complete after `group_timeout_s` is dropped; a rollout without finite log-probabilities is left
    out of its group and counted.

    `engine` decodes; `vllm` is for the engine of that name only. `kv_cache`: whether running requests keep
    the keys and values of older weights or compute them again when new ones come. `precision`: of the
    engine's weights; the trainer's are cast to it as they arrive.
    """

    model: str
    samples: PositiveInt = 8
    sampling: Sampling = field(default_factory=Sampling)
    chat: ChatFormat = field(default_factory=ChatFormat)
    slots: PositiveInt = 256
    context: PositiveInt | None = None
    group_timeout_s: PositiveFloat = 600.0
    engine: EngineName = "transformers"
    vllm: VLLMOptions = field(default_factory=VLLMOptions)
    kv_cache: KVCache = "keep"
    precision: EnginePrecision = "float32"
    computes: ClassVar[bool] = True

    def want(self) -> int:
        return max(1, self.slots // self.samples)

    def problems(self, view: GraphView) -> Iterable[str]:
        yield from (unloadable := list(check_model_directory(self.model)))
        yield from [] if unloadable else self.chat.problems(self.model)
        if self.engine == "vllm":
            yield from self.vllm.problems(self.sampling)
        elif self.vllm != VLLMOptions():
            yield f"engine={self.engine} doesn't read {self.vllm}; set engine=vllm or leave these out"
        if self.slots < self.samples:
            yield f"slots={self.slots} can't hold samples={self.samples}; use at least {self.samples}"
        most = context_length(self.model)
        if self.context and most and self.context > most:
            yield f"context={self.context}, but the model was made for {most} tokens; use at most {most}"
        room = self.context or most
        if room is not None and self.sampling.max_new_tokens >= room:
            yield (
                f"the context of {room} tokens leaves no room for a prompt beside "
                f"sampling.max_new_tokens={self.sampling.max_new_tokens}; lower it"
            )

    async def run(
        self, prompts: Stream[Prompt], weights: Stream[Weights]
    ) -> AsyncIterator[RolloutGroup | Dropped]:
        with ComputeThread("generator") as compute:
            work = await compute(self._load, current())
            try:
                await compute(work.load, await _newer(weights))
                if current().deterministic:
                    async for group in self._one_by_one(prompts, weights, work, compute):
                        yield group
                else:
                    async for group in self._continuously(prompts, weights, work, compute):
                        yield group
            finally:
                await compute(work.close)

    def _load(self, context: Context) -> GroupDecoding:
        # In the thread too: importing torch takes seconds in which the event loop couldn't answer anybody.
        from arriero.components.group_decoding import GroupDecoding

        return GroupDecoding(self, context)

    async def _continuously(
        self, prompts: Stream[Prompt], weights: Stream[Weights], work: GroupDecoding, compute: ComputeThread
    ) -> AsyncIterator[RolloutGroup | Dropped]:
        waiting: Prompt | None = None
        while True:
            if (newer := weights.poll()) is not None:
                await compute(work.load, newer)
            while work.has_room and (prompt := waiting or prompts.poll()) is not None:
                waiting = None
                while work.version < prompt.min_version:
                    await compute(work.load, await _newer(weights))
                if (refused := work.add(prompt)) is not None:
                    yield refused
            if work.idle:
                if (waiting := await prompts.next()) is None:
                    return
                continue
            for group in await compute(work.step):
                yield group

    async def _one_by_one(
        self, prompts: Stream[Prompt], weights: Stream[Weights], work: GroupDecoding, compute: ComputeThread
    ) -> AsyncIterator[RolloutGroup | Dropped]:
        async for prompt in prompts:
            if work.version != prompt.min_version:
                await compute(work.load, await weights.at(prompt.min_version))
            if (refused := work.add(prompt)) is not None:
                yield refused
            while not work.idle:
                for group in await compute(work.step):
                    yield group


async def _newer(weights: Stream[Weights]) -> Weights:
    """The next version, waited for."""
    if (newer := await weights.next()) is None:
        raise RuntimeError("the loop of the weights ended while prompts still come")
    return newer
