"""The generator: rollout groups from prompts, with weights that change under way.

It never waits for the trainer: between two decoding steps it takes the newest weights, admits new prompts into
free slots, and gives the groups that are complete. In deterministic mode it decodes one group at a time with
exactly the version the group was admitted for, so that nothing depends on timing or on neighbours.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import ConfigDict, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.compute import ComputeThread
from arriero.components.model_directory import check_model_directory, context_length
from arriero.components.sampling import Sampling
from arriero.engine.graph import GraphView
from arriero.engine.runtime.context import Context, current
from arriero.engine.stream import Stream
from arriero.schemas.messages import Dropped, Prompt, Rollout, RolloutGroup, Weights

if TYPE_CHECKING:
    from arriero.components.decoding import Completion, DecodeEngine
    from arriero.engine.weights import WeightReceiver


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Generator:
    """Samples `samples` rollouts for each prompt, up to `slots` sequences at once.

    A prompt that leaves no room for `sampling.max_new_tokens` in the context is dropped as too long; a group
    that isn't complete after `group_timeout_s` is dropped; a rollout without finite log-probabilities is left
    out of its group and counted.
    """

    model: str
    samples: PositiveInt = 8
    sampling: Sampling = field(default_factory=Sampling)
    slots: PositiveInt = 256
    context: PositiveInt | None = None
    group_timeout_s: PositiveFloat = 600.0
    computes: ClassVar[bool] = True

    def want(self) -> int:
        return max(1, self.slots // self.samples)

    def problems(self, view: GraphView) -> Iterable[str]:
        yield from check_model_directory(self.model)
        if self.slots < self.samples:
            yield f"slots={self.slots} can't hold the samples={self.samples} of one prompt; use at least {self.samples}"
        room = self.context or context_length(self.model)
        if room is not None and self.sampling.max_new_tokens >= room:
            yield (
                f"the context of {room} tokens leaves no room for a prompt beside "
                f"sampling.max_new_tokens={self.sampling.max_new_tokens}; lower it"
            )

    async def run(
        self, prompts: Stream[Prompt], weights: Stream[Weights]
    ) -> AsyncIterator[RolloutGroup | Dropped]:
        with ComputeThread("generator") as compute:
            work = await compute(_Decoding, self, current())
            try:
                await compute(work.load, await weights.next())
                if current().deterministic:
                    async for group in self._one_by_one(prompts, weights, work, compute):
                        yield group
                else:
                    async for group in self._continuously(prompts, weights, work, compute):
                        yield group
            finally:
                await compute(work.close)

    async def _continuously(
        self, prompts: Stream[Prompt], weights: Stream[Weights], work: _Decoding, compute: ComputeThread
    ) -> AsyncIterator[RolloutGroup | Dropped]:
        waiting: Prompt | None = None
        while True:
            if (newer := weights.poll()) is not None:
                await compute(work.load, newer)
            while work.has_room and (prompt := waiting or prompts.poll()) is not None:
                waiting = None
                while work.version < prompt.min_version:
                    await compute(work.load, await weights.next())
                if (refused := work.add(prompt)) is not None:
                    yield refused
            if work.idle:
                if (waiting := await prompts.next()) is None:
                    return
                continue
            for group in await compute(work.step):
                yield group

    async def _one_by_one(
        self, prompts: Stream[Prompt], weights: Stream[Weights], work: _Decoding, compute: ComputeThread
    ) -> AsyncIterator[RolloutGroup | Dropped]:
        async for prompt in prompts:
            if work.version != prompt.min_version:
                await compute(work.load, await weights.at(prompt.min_version))
            if (refused := work.add(prompt)) is not None:
                yield refused
            while not work.idle:
                for group in await compute(work.step):
                    yield group


def request_seed(run_seed: int, prompt: str, sample: int) -> int:
    """Seed [0, 2**63) of one rollout: the same for the same run seed, prompt id and sample number."""
    digest = hashlib.blake2b(f"{run_seed}/{prompt}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class _Decoding:
    """The engine with its groups: which requests belong together, and what has come back."""

    def __init__(self, config: Generator, context: Context) -> None:
        import torch

        from arriero.components.decoding import DecodeEngine
        from arriero.components.training import load_policy
        from arriero.engine.weights import WeightReceiver

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model, self.tokenizer = load_policy(config.model, device=device)
        self._max_length = config.context or int(getattr(model.config, "max_position_embeddings", 4096))
        self._config, self._context = config, context
        self._engine: DecodeEngine = DecodeEngine(
            model,
            self.tokenizer,
            config.sampling,
            slots=config.slots,
            max_length=self._max_length,
            device=device,
        )
        self._into = dict(model.state_dict())
        self._receiver: WeightReceiver = WeightReceiver(f"{context.node}-{context.replica}")
        self._open: dict[str, tuple[Prompt, list[int], float, list[Completion]]] = {}
        self.version = -1

    @property
    def has_room(self) -> bool:
        return self._engine.room() >= self._config.samples

    @property
    def idle(self) -> bool:
        return not self._open

    def load(self, weights: Weights) -> None:
        """Take a version in place; running requests go on with it."""
        if weights.version == self.version:
            return
        if weights.manifest is None:
            raise ValueError(
                f"version {weights.version} came without a manifest; its producer must publish weights"
            )
        self._receiver.receive(weights.manifest, self._into)
        self._engine.set_version(weights.version)
        self.version = weights.version

    def add(self, prompt: Prompt) -> Dropped | None:
        """Start the rollouts of a prompt, or say why not."""
        from arriero.components.decoding import Request

        ids: list[int] = self.tokenizer.encode(prompt.text)
        room = self._max_length - self._config.sampling.max_new_tokens
        if not 0 < len(ids) <= room:
            detail = f"{len(ids)} prompt tokens, between 1 and {room} fit"
            return Dropped(parent=prompt.id, reason="too_long" if ids else "invalid", detail=detail)
        self._open[prompt.id] = (prompt, ids, time.monotonic(), [])
        self._engine.add([
            Request(key=f"{prompt.id}/{n}", prompt_ids=ids, seed=request_seed(self._context.seed, prompt.id, n))
            for n in range(self._config.samples)
        ])  # fmt: skip
        return None

    def step(self) -> list[RolloutGroup | Dropped]:
        """One decoding step; the groups that it completed."""
        out: list[RolloutGroup | Dropped] = []
        for completion in self._engine.step():
            id = completion.key.rpartition("/")[0]
            prompt, ids, _, done = self._open[id]
            done.append(completion)
            if len(done) == self._config.samples:
                del self._open[id]
                out.append(self._group(prompt, ids, done))
        out.extend(self._timed_out())
        return out

    def _timed_out(self) -> list[Dropped]:
        limit = self._config.group_timeout_s
        late = [id for id, (_, _, began, _) in self._open.items() if time.monotonic() - began > limit]
        dropped: list[Dropped] = []
        for id in late:
            done = self._open.pop(id)[3]
            for n in range(self._config.samples):
                self._engine.cancel(f"{id}/{n}")
            detail = f"{len(done)} of {self._config.samples} rollouts after {limit:.0f} s"
            dropped.append(Dropped(parent=id, reason="group_timeout", detail=detail))
        return dropped

    def _group(self, prompt: Prompt, ids: list[int], done: list[Completion]) -> RolloutGroup | Dropped:
        done.sort(key=lambda c: int(c.key.rpartition("/")[2]))
        valid = [c for c in done if c.finish != "error" and len(c.token_ids)]
        if len(valid) < len(done):
            self._context.count("invalid_rollouts", len(done) - len(valid))
        if not valid:
            return Dropped(
                parent=prompt.id, reason="invalid", detail="no rollout has finite log-probabilities"
            )
        return RolloutGroup(prompt=prompt, rollouts=tuple(self._rollout(ids, c) for c in valid))

    def _rollout(self, ids: list[int], completion: Completion) -> Rollout:
        """The completion behind its prompt, in arrays of one length; see `Rollout` for what stands off the mask."""
        head, total = len(ids), len(ids) + len(completion.token_ids)
        tokens = np.empty(total, np.int32)
        tokens[:head], tokens[head:] = ids, completion.token_ids
        mask = np.zeros(total, np.bool_)
        mask[head:] = True
        logprobs = np.full(total, np.nan, np.float32)
        logprobs[head:] = completion.logprobs
        versions = np.full(total, -1, np.int32)
        versions[head:] = completion.versions
        text: str = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        return Rollout(
            tokens=tokens, mask=mask, logprobs=logprobs, versions=versions, text=text,
            finish="stop" if completion.finish == "stop" else "length",
            temperature=self._config.sampling.temperature,
            seed=request_seed(self._context.seed, completion.key.rpartition("/")[0], int(completion.key.rpartition("/")[2])),
        )  # fmt: skip

    def close(self) -> None:
        self._receiver.close()
