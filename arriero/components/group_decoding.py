"""Rollout groups out of a decode engine: prompts in, weights in place, complete groups out."""

# pyright: reportUnknownMemberType=false
# The tokenizers of transformers are annotated only in part.

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from arriero.components.chat import Chat
from arriero.components.packing import check_vocabulary
from arriero.components.policy import load_tokenizer
from arriero.components.rollout_engine import Completion, Request, open_engine
from arriero.engine.errors import UserError
from arriero.engine.runtime.context import Context
from arriero.schemas.messages import Dropped, Prompt, Rollout, RolloutGroup, Weights

if TYPE_CHECKING:
    from arriero.components.generator import Generator

_BARREN = 16  # groups in a row without a usable rollout that end the run


def request_seed(run_seed: int, prompt: str, sample: int) -> int:
    """Seed [0, 2**63) of one rollout: the same for the same run seed, prompt id and sample number."""
    digest = hashlib.blake2b(f"{run_seed}/{prompt}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(kw_only=True)
class _Group:
    """The rollouts of one prompt under way; `done` by sample number."""

    prompt: Prompt
    token_ids: list[int]
    began: float = field(default_factory=time.monotonic)
    done: dict[int, Completion] = field(default_factory=dict[int, Completion])


class GroupDecoding:
    """A decode engine fed with prompts: which requests belong together, and what has come back of each.

    Not for several threads at once.
    """

    def __init__(self, config: Generator, context: Context) -> None:
        self.tokenizer = load_tokenizer(config.model)
        self._config, self._context = config, context
        self._chat = Chat(self.tokenizer, config.chat, model=config.model)
        self._engine = open_engine(config, context, self.tokenizer)
        self._open: dict[str, _Group] = {}
        self._barren = 0

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def has_room(self) -> bool:
        return self._engine.room() >= self._config.samples

    @property
    def idle(self) -> bool:
        return not self._open

    def load(self, weights: Weights) -> None:
        """Take a version; running requests go on with it."""
        if weights.version == self.version:
            return
        if weights.manifest is None:
            raise ValueError(
                f"version {weights.version} came without a manifest; its producer must publish weights"
            )
        self._engine.take(weights.manifest)

    def add(self, prompt: Prompt) -> Dropped | None:
        """Start the rollouts of a prompt, or say why not. UserError if the model doesn't know its tokens."""
        ids = self._chat.prompt(prompt.text)
        room = self._engine.max_length - self._config.sampling.max_new_tokens
        if not 0 < len(ids) <= room:
            detail = f"{len(ids)} prompt tokens, between 1 and {room} fit"
            return Dropped(parent=prompt.id, reason="too_long" if ids else "invalid", detail=detail)
        if (vocabulary := self._engine.vocabulary) is not None:
            check_vocabulary(ids, vocabulary, f"prompt {prompt.id}")
        self._open[prompt.id] = _Group(prompt=prompt, token_ids=ids)
        seed = self._context.seed
        self._engine.add([
            Request(key=f"{prompt.id}/{n}", prompt_ids=ids, seed=request_seed(seed, prompt.id, n))
            for n in range(self._config.samples)
        ])  # fmt: skip
        return None

    def step(self) -> list[RolloutGroup | Dropped]:
        """One decoding step; the groups that it completed, or that ran out of time."""
        out: list[RolloutGroup | Dropped] = []
        for completion in self._engine.step():
            prompt, _, sample = completion.key.rpartition("/")
            group = self._open[prompt]
            group.done[int(sample)] = completion
            if len(group.done) == self._config.samples:
                del self._open[prompt]
                out.append(self._finished(group))
        return out + self._timed_out()

    def _timed_out(self) -> list[RolloutGroup | Dropped]:
        limit = self._config.group_timeout_s
        late = [g for g in self._open.values() if time.monotonic() - g.began > limit]
        for group in late:
            self._cancel(group)
        return [
            Dropped(
                parent=group.prompt.id,
                reason="group_timeout",
                detail=f"{len(group.done)} of {self._config.samples} rollouts after {limit:.0f} s",
            )
            for group in late
        ]

    def _cancel(self, group: _Group) -> None:
        del self._open[group.prompt.id]
        for n in range(self._config.samples):
            self._engine.cancel(f"{group.prompt.id}/{n}")

    def _finished(self, group: _Group) -> RolloutGroup | Dropped:
        done = [(n, c) for n, c in sorted(group.done.items()) if c.finish != "error" and len(c.token_ids)]
        if invalid := self._config.samples - len(done):
            self._context.count("invalid_rollouts", invalid)
        if not done:
            detail = "no rollout has finite log-probabilities"
            self._barren += 1
            if self._barren >= _BARREN:
                raise UserError(
                    f"{detail} in {self._barren} groups in a row: version {self.version} of "
                    f"{self._config.model} gives NaN; check its weights, or lower optimizer.lr"
                )
            return Dropped(parent=group.prompt.id, reason="invalid", detail=detail)
        self._barren = 0
        rollouts = tuple(self._rollout(group, n, c) for n, c in done)
        return RolloutGroup(prompt=group.prompt, rollouts=rollouts, chat_digest=self._chat.digest)

    def _rollout(self, group: _Group, sample: int, completion: Completion) -> Rollout:
        """The completion behind its prompt, in arrays of one length; `Rollout` says what is off the mask."""
        head = len(group.token_ids)
        total = head + len(completion.token_ids)
        mask = np.arange(total) >= head
        tokens, versions = np.empty(total, np.int32), np.full(total, -1, np.int32)
        logprobs = np.full(total, np.nan, np.float32)
        tokens[:head], tokens[head:] = group.token_ids, completion.token_ids
        logprobs[head:], versions[head:] = completion.logprobs, completion.versions
        text = str(self.tokenizer.decode(completion.token_ids, skip_special_tokens=True))
        return Rollout(
            tokens=tokens,
            mask=mask,
            logprobs=logprobs,
            versions=versions,
            text=text,
            finish="stop" if completion.finish == "stop" else "length",
            temperature=self._config.sampling.temperature,
            seed=request_seed(self._context.seed, group.prompt.id, sample),
        )

    def close(self) -> None:
        """Cancel what is under way and close the engine."""
        for group in list(self._open.values()):
            self._cancel(group)
        self._engine.close()
