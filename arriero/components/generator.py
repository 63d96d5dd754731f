"""The generator: rollout groups from prompts, with weights that change under way.

It never waits for the trainer: between two decoding steps it takes the newest weights, admits new prompts
into free slots, and gives the groups that are complete. In deterministic mode it decodes one group at a time
with exactly the version the group was admitted for, so that nothing depends on timing or on neighbours.

Held-out prompts are sampled by exactly the version that they were sent for. Where a run evaluates during
training, those of all versions but the first go to an engine of their own (`EvaluationLane`), or this one
keeps its weights until they are done, as it does for the first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import closing
from dataclasses import field, replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import ConfigDict, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.chat import MODEL, ChatFormat
from arriero.components.compute import ComputeThread
from arriero.components.evaluation_lane import EvaluationLane, beside
from arriero.components.model_directory import check_model_directory, context_length
from arriero.components.placement import DevicePlacement, Devices
from arriero.components.prompt_queue import PromptQueue
from arriero.components.prompts import PromptSource
from arriero.components.rollout_engine import EngineName, EnginePrecision, EvaluationEngine, KVCache
from arriero.components.sampling import Sampling
from arriero.components.second_set import SecondSet
from arriero.components.stragglers import Stragglers
from arriero.components.vllm_options import VLLMOptions
from arriero.components.weight_intake import WeightIntake
from arriero.engine.backlog import NO_BACKLOG, Backlog
from arriero.engine.graph import GraphView
from arriero.engine.runtime.context import Context, current
from arriero.engine.stream import Stream
from arriero.schemas.continuations import Continuation, prompt_of
from arriero.schemas.messages import Dropped, Prompt, RolloutGroup, Weights

if TYPE_CHECKING:
    from arriero.components.group_decoding import GroupDecoding

# So long the compute thread goes on by itself; new weights and prompts wait for it. A step of a small model
# takes a millisecond or two, and the way to the event loop and back a third of one.
_AT_ONCE_S = 0.01


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Generator:
    """Samples `samples` rollouts for each prompt, up to `slots` sequences at once.

    A prompt that leaves no room for `sampling.max_new_tokens` in the context is dropped as too long; a group
    that isn't complete after `group_timeout_s` is dropped; a rollout without finite log-probabilities is left
    out of its group and counted.

    `engine` decodes; `vllm` is for the engine of that name only. `kv_cache`: whether running requests keep
    the keys and values of older weights or compute them again when new ones come. `precision`: of the
    engine's weights; the trainer's are cast to it as they arrive. `standby`: new weights are made ready
    beside those in use while decoding goes on, and then change places with them, which takes their memory
    once more; `auto`: where that is free. `greedy_baseline`: a prompt that is trained on gets one greedy
    rollout more, for `GroupAdvantage(baseline="greedy")`. `evaluation_engine` samples held-out prompts during
    training: its `own` is a second one, which takes the memory of one more; the `same` keeps its weights
    meanwhile, so that prompts which need newer ones wait. `auto`: `own` for transformers on devices of its
    own, else `same`.
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
    standby: SecondSet = "auto"
    greedy_baseline: bool = False
    evaluation_engine: EvaluationEngine = "auto"
    stragglers: Stragglers = field(default_factory=Stragglers)
    placement: DevicePlacement = field(default_factory=DevicePlacement)
    computes: ClassVar[bool] = True

    @property
    def group_size(self) -> int:
        """Rollouts of a prompt that is trained on, the greedy one included."""
        return self.samples + self.greedy_baseline

    def want(self) -> int:
        return max(1, self.slots // self.group_size)

    def weight_ranks(self) -> int:
        return self.vllm.tensor_parallel

    def puts_back(self) -> int:
        return self.stragglers.backlog(self.want())

    def problems(self, view: GraphView) -> Iterable[str]:
        yield from self.placement.problems(staleness=view.staleness, standby=self.standby is True)
        if self.evaluation_engine == "own" and self.placement.devices == "turns":
            yield "evaluation_engine=own with placement.devices=turns: there is no turn for it; use same"
        if (self.evaluation_engine, self.engine) == ("own", "vllm") and self.vllm.memory_share >= 0.5:
            yield (
                f"evaluation_engine=own is a second vLLM on each device, but vllm.memory_share="
                f"{self.vllm.memory_share} leaves no room for it; set it below 0.5, or use same"
            )
        yield from self.stragglers.problems(
            replicas=view.replicas, max_new_tokens=self.sampling.max_new_tokens
        )
        yield from (unloadable := list(check_model_directory(self.model)))
        yield from [] if unloadable else self.chat.problems(self.model)
        talks = [d for source in view.upstream(PromptSource) for d in source.sets if d.conversational()]
        if talks and not self.chat.template:
            yield f"{talks[0].path}: its prompts are chat messages; set chat.template, to `{MODEL}` say"
        if self.engine == "vllm":
            yield from self.vllm.problems(
                self.sampling, self.precision, model=self.model, standby=self.standby is True
            )
            if self.greedy_baseline and self.sampling.temperature != 1.0:
                yield (
                    f"greedy_baseline with sampling.temperature={self.sampling.temperature}: vLLM gives "
                    "greedy tokens the log-probabilities of temperature 1; set it to 1 or engine=transformers"
                )
        elif self.vllm != VLLMOptions():
            yield f"engine={self.engine} doesn't read {self.vllm}; set engine=vllm or leave these out"
        if self.slots < self.group_size:
            greedy = " and a greedy one" if self.greedy_baseline else ""
            held = f"samples={self.samples}{greedy}"
            yield f"slots={self.slots} can't hold {held}; use at least {self.group_size}"
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
        self, prompts: Stream[Prompt], weights: Stream[Weights], backlog: Backlog = NO_BACKLOG
    ) -> AsyncIterator[RolloutGroup | Dropped]:
        context, policy = current(), self.stragglers
        # Who joins later takes prompts.
        in_tail = context.replicas - policy.tail_replicas <= context.replica < context.replicas
        queue = PromptQueue(self, prompts, backlog, in_tail=in_tail)
        if in_tail:
            await backlog.refuse_prompts()
        with (
            ComputeThread("generator") as thread,
            closing(Devices(thread, self.placement, context, alone=False)) as compute,
        ):
            work = await compute(self._load, context)
            compute.asleep = work.sleep
            await compute.rest()  # the first version has to be made
            intake = WeightIntake(weights, work, compute, beside=work.receives_beside)
            lane = self._lane(weights, context, compute)
            try:
                if not await intake.begin():
                    return
                if context.deterministic:
                    decode = self._one_by_one(queue, intake, work, compute)
                else:
                    decode = self._continuously(queue, intake, backlog, work, compute, lane)
                async for out in decode:
                    if not isinstance(out, Continuation):
                        yield out
                    elif not await backlog.put(out) and (refused := work.add(out)) is not None:
                        yield refused
            finally:
                await intake.close()
                await compute.aside(work.close)
                if lane is not None:
                    await lane.close()

    def _load(self, context: Context) -> GroupDecoding:
        # In the thread too: importing torch takes seconds in which the event loop couldn't answer anybody.
        from arriero.components.group_decoding import GroupDecoding

        return GroupDecoding(self, context)

    def evaluates_beside(self, context: Context) -> bool:
        """Whether evaluations during training get an engine of their own in this process.

        A deterministic run decodes in turn anyway.
        """
        chosen = self.evaluation_engine
        if chosen == "auto":
            apart = self.engine == "transformers" and self.placement.devices == "apart"
            chosen = "own" if apart else "same"
        return chosen == "own" and bool(context.evaluates_every) and not context.deterministic

    def _lane(
        self, weights: Stream[Weights], context: Context, compute: Devices
    ) -> EvaluationLane[RolloutGroup | Continuation] | None:
        if not self.evaluates_beside(context):
            return None
        second = replace(self, standby=False, stragglers=Stragglers())
        return EvaluationLane(weights, compute, lambda: second._load(beside(context)))

    async def _continuously(
        self,
        queue: PromptQueue,
        intake: WeightIntake,
        backlog: Backlog,
        work: GroupDecoding,
        compute: Devices,
        lane: EvaluationLane[RolloutGroup | Continuation] | None,
    ) -> AsyncIterator[RolloutGroup | Dropped | Continuation]:
        while True:
            if not work.evaluating:
                await intake.follow()
            async for refused in self._begin(queue, intake, backlog, work, lane):
                yield refused
            if lane is not None and lane.busy:
                for out in await lane.step():
                    yield out
            elif work.idle:
                await compute.rest()
                if not await queue.wait():
                    return
            if not work.idle:
                for out in await compute(work.steps, _AT_ONCE_S):
                    yield out

    async def _begin(
        self,
        queue: PromptQueue,
        intake: WeightIntake,
        backlog: Backlog,
        work: GroupDecoding,
        lane: EvaluationLane[RolloutGroup | Continuation] | None,
    ) -> AsyncIterator[Dropped]:
        """Begin what there is room for, and suits what is under way; what of it goes no further."""
        while (record := queue.next(work.room)) is not None:
            prompt = prompt_of(record)
            if lane is not None and lane.takes(prompt):
                continue
            if not work.suits(prompt):
                queue.give_back(record)
                return
            if queue.to_tail(record) and await backlog.put(Continuation(prompt=prompt)):
                continue
            if (refused := await intake.ready_for(prompt) or work.add(record)) is not None:
                yield refused

    async def _one_by_one(
        self,
        queue: PromptQueue,
        intake: WeightIntake,
        work: GroupDecoding,
        compute: Devices,
    ) -> AsyncIterator[RolloutGroup | Dropped | Continuation]:
        while await queue.wait():
            while (record := queue.next(work.room)) is not None:
                refused = await intake.exactly_for(prompt_of(record)) or work.add(record)
                if refused is not None:
                    yield refused
                while not work.idle:
                    for out in await compute(work.step):
                        yield out
            await compute.rest()
