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
from arriero.components.policy import load_tokenizer, said
from arriero.components.rollout_engine import Completion, Request, open_engine
from arriero.engine.errors import UserError
from arriero.engine.runtime.context import Context
from arriero.schemas.continuations import Continuation, Response
from arriero.schemas.messages import Dropped, Prompt, Rollout, RolloutGroup, Weights

if TYPE_CHECKING:
    from arriero.components.generator import Generator
    from arriero.schemas.weights import WeightManifest

_BARREN = 16  # groups in a row without a usable rollout that end the run
_NOTHING = Response(
    tokens=np.empty(0, np.int32), logprobs=np.empty(0, np.float32), versions=np.empty(0, np.int32)
)


def request_seed(run_seed: int, prompt: str, sample: int) -> int:
    """Seed [0, 2**63) of one rollout: the same for the same run seed, prompt id and sample number."""
    digest = hashlib.blake2b(f"{run_seed}/{prompt}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(kw_only=True)
class _Group:
    """The rollouts of one prompt under way: as they came, and by sample number what has come back."""

    came: Continuation
    token_ids: list[int]
    began: float = field(default_factory=time.monotonic)
    back: dict[int, Response] = field(default_factory=dict[int, Response])

    @property
    def prompt(self) -> Prompt:
        return self.came.prompt

    @property
    def spent_s(self) -> float:
        return self.came.spent_s + time.monotonic() - self.began

    def put_back(self, samples: int, *, timeouts: int, spent_s: float) -> Continuation:
        """The group as far as it has come: of a response that is still running, what it came with."""
        responses = tuple(self.back.get(n) or begun(self.came, n) for n in range(samples))
        return Continuation(prompt=self.prompt, responses=responses, timeouts=timeouts, spent_s=spent_s)


def begun(came: Continuation, sample: int) -> Response:
    """What there is of response number `sample` so far."""
    return came.responses[sample] if came.responses else _NOTHING


def joined(before: Response, completion: Completion, max_new_tokens: int) -> Response:
    """A response and what was sampled after it; not finished while it may have more tokens."""
    tokens = np.concatenate([before.tokens, completion.token_ids])
    goes_on = completion.finish == "length" and tokens.size < max_new_tokens
    return Response(
        tokens=tokens,
        logprobs=np.concatenate([before.logprobs, completion.logprobs]),
        versions=np.concatenate([before.versions, completion.versions]),
        finish=None if goes_on else completion.finish,
    )


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
        self._torn = False  # a version broke off as it arrived: what is in the engine is none

    @property
    def version(self) -> int:
        """That is in use; -1 for none."""
        return -1 if self._torn else self._engine.version

    @property
    def room(self) -> int:
        """Responses that may begin now."""
        return self._engine.room()

    @property
    def has_room(self) -> bool:
        """Whether a held-out prompt may begin now."""
        return self.room >= self._config.samples

    @property
    def idle(self) -> bool:
        return not self._open

    def suits(self, prompt: Prompt) -> bool:
        """Whether `prompt` may begin with what is under way: an evaluation is of one version alone."""
        if prompt.split == "eval":
            return self.idle or self.version == prompt.min_version
        return self.version >= prompt.min_version or not self.evaluating

    @property
    def evaluating(self) -> bool:
        """Whether held-out prompts are under way: then the weights have to stay."""
        return any(group.prompt.split == "eval" for group in self._open.values())

    @property
    def receives_beside(self) -> bool:
        return self._engine.receives_beside

    def prepare(self, weights: Weights) -> None:
        """Receive a version beside the one in use; may run in another thread."""
        self._engine.prepare(published(weights))

    def load(self, weights: Weights) -> None:
        """Take a version; running requests go on with it."""
        if weights.version != self.version:
            self._torn = True
            self._engine.take(published(weights))
            self._torn = False

    def sleep(self) -> None:
        """Give the device's memory to somebody else, with nothing under way; the next call takes it again."""
        self._engine.sleep(self._config.placement.sleep_level)

    def add(self, record: Prompt | Continuation) -> Dropped | None:
        """Start the rollouts of a prompt or go on with them, or say why not.

        UserError if the model doesn't know its tokens.
        """
        came = _came(record)
        prompt = came.prompt
        if prompt.id in self._open:  # a lease ran out and it came once more; one answer does for both
            return None
        ids = self._chat.prompt(prompt)
        room = self._engine.max_length - self._config.sampling.max_new_tokens
        if not 0 < len(ids) <= room:
            detail = f"{len(ids)} prompt tokens, between 1 and {room} fit"
            return Dropped(parent=prompt.id, reason="too_long" if ids else "invalid", detail=detail)
        if (vocabulary := self._engine.vocabulary) is not None:
            check_vocabulary(ids, vocabulary, f"prompt {prompt.id}")
        if (stale := self._stale(came)) is not None:
            return stale
        group = self._open[prompt.id] = _Group(came=came, token_ids=ids)
        group.back = {n: r for n, r in enumerate(came.responses) if r.finish is not None}
        self._engine.add([
            self._request(group, n) for n in range(self._size(prompt)) if n not in group.back
        ])  # fmt: skip
        return None

    def _stale(self, came: Continuation) -> Dropped | None:
        """What the trainer's guard is certain to drop isn't worth more tokens."""
        old, bound = came.oldest_version, self._context.staleness
        if old is None or came.prompt.split == "eval" or self.version - old <= bound:
            return None
        detail = f"begun by version {old}, version {self.version} came before it was finished"
        return Dropped(parent=came.prompt.id, reason="stale", detail=detail)

    def _request(self, group: _Group, sample: int) -> Request:
        prompt, before = group.prompt, begun(group.came, sample).tokens
        limit = self._config.sampling.max_new_tokens - before.size
        # A held-out prompt is sampled by exactly the version that it was sent for; on its way to another
        # replica it might come too late for that.
        if (segment := self._config.stragglers.segment_tokens) and prompt.split == "train":
            limit = min(limit, segment)
        return Request(
            key=f"{prompt.id}/{sample}",
            prompt_ids=[*group.token_ids, *before.tolist()],
            seed=request_seed(self._context.seed, prompt.id, sample),
            max_new_tokens=limit,
            sampled=before.size,
            greedy=sample >= self._config.samples,
        )

    def _size(self, prompt: Prompt) -> int:
        """How many rollouts `prompt` gets; the greedy one, if any, is the last."""
        return self._config.samples if prompt.split == "eval" else self._config.group_size

    def step(self) -> list[RolloutGroup | Dropped | Continuation]:
        """One decoding step; the groups that it completed, that are to be put back, or that are too late."""
        out: list[RolloutGroup | Dropped | Continuation] = []
        most = self._config.sampling.max_new_tokens
        for completion in self._engine.step():
            prompt, _, number = completion.key.rpartition("/")
            group, sample = self._open[prompt], int(number)
            size = self._size(group.prompt)
            group.back[sample] = joined(begun(group.came, sample), completion, most)
            if len(group.back) == size:
                del self._open[prompt]
                if all(response.finish for response in group.back.values()):
                    out.append(self._finished(group))
                else:
                    came = group.came
                    out.append(group.put_back(size, timeouts=came.timeouts, spent_s=group.spent_s))
        return out + self._timed_out()

    def steps(self, for_s: float) -> list[RolloutGroup | Dropped | Continuation]:
        """Steps until one has something to give, nothing is left to decode, or `for_s` have passed."""
        until = time.monotonic() + for_s
        while not (out := self.step()) and not self.idle and time.monotonic() < until:
            pass
        return out

    def _timed_out(self) -> list[RolloutGroup | Dropped | Continuation]:
        late = [g for g in self._open.values() if g.spent_s > self._config.group_timeout_s]
        for group in late:
            self._cancel(group)
        return [self._too_late(group) for group in late]

    def _too_late(self, group: _Group) -> Dropped | Continuation:
        policy, timeouts = self._config.stragglers, group.came.timeouts
        moves = group.prompt.split == "train"
        if moves and policy.on_timeout == "resubmit" and timeouts < policy.resubmissions:
            self._context.count("resubmitted_groups", 1)
            return group.put_back(self._size(group.prompt), timeouts=timeouts + 1, spent_s=0.0)
        done = sum(response.finish is not None for response in group.back.values())
        detail = f"{done} of {self._size(group.prompt)} rollouts after {self._config.group_timeout_s:.0f} s"
        if timeouts:
            detail += f", resubmitted {timeouts} times"
        return Dropped(parent=group.prompt.id, reason="group_timeout", detail=detail)

    def _cancel(self, group: _Group) -> None:
        del self._open[group.prompt.id]
        for n in range(self._size(group.prompt)):
            self._engine.cancel(f"{group.prompt.id}/{n}")

    def _finished(self, group: _Group) -> RolloutGroup | Dropped:
        done = [(n, r) for n, r in sorted(group.back.items()) if r.finish != "error" and r.tokens.size]
        if invalid := self._size(group.prompt) - len(done):
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
        rollouts = tuple(self._rollout(group, n, r) for n, r in done)
        return RolloutGroup(prompt=group.prompt, rollouts=rollouts, chat_digest=self._chat.digest)

    def _rollout(self, group: _Group, sample: int, response: Response) -> Rollout:
        """The response behind its prompt, in arrays of one length; `Rollout` says what is off the mask."""
        head = len(group.token_ids)
        total = head + response.tokens.size
        mask = np.arange(total) >= head
        tokens, versions = np.empty(total, np.int32), np.full(total, -1, np.int32)
        logprobs = np.full(total, np.nan, np.float32)
        tokens[:head], tokens[head:] = group.token_ids, response.tokens
        logprobs[head:], versions[head:] = response.logprobs, response.versions
        text = said(self.tokenizer, response.tokens.tolist())
        return Rollout(
            tokens=tokens,
            mask=mask,
            logprobs=logprobs,
            versions=versions,
            text=text,
            finish="stop" if response.finish == "stop" else "length",
            temperature=self._config.sampling.temperature,
            seed=request_seed(self._context.seed, group.prompt.id, sample),
            greedy=sample >= self._config.samples,
        )

    def close(self) -> None:
        """Cancel what is under way and close the engine."""
        for group in list(self._open.values()):
            self._cancel(group)
        self._engine.close()


def _came(record: Prompt | Continuation) -> Continuation:
    return record if isinstance(record, Continuation) else Continuation(prompt=record)


def published(weights: Weights) -> WeightManifest:
    if weights.manifest is None:
        raise ValueError(
            f"version {weights.version} came without a manifest; its producer must publish weights"
        )
    return weights.manifest
