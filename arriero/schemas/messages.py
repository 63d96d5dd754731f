"""The records that travel on edges.

    Prompt -> RolloutGroup -> ScoredGroup -> Batch -> Weights -> (back to the generator)

Provenance: `id` is deterministic (parents + index), `parents` are the records this one was made from and
`origins` the admission numbers of the prompts it descends from. The runtime writes all three when a
component yields a record; a component never invents them.

Missing is never zero: a log-probability is finite where the policy sampled the token and NaN elsewhere, so a
forgotten mask shows as NaN in the loss instead of as a probability of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    JsonValue,
    NonNegativeInt,
    PositiveFloat,
    model_validator,
)

from arriero.schemas.arrays import BoolArray, Float32Array, Int32Array, finite_exactly_where, same_bits
from arriero.schemas.weights import WeightManifest

Int63 = Annotated[int, Field(ge=0, lt=2**63)]
"""What the tables of a record hold as 64 bits."""

Split = Literal["train", "eval"]
Finish = Literal["stop", "length"]


class Message(BaseModel):
    """Base of everything that is encoded: frozen, unknown fields refused."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        ser_json_inf_nan="strings",  # the default, null, isn't read back as a number
    )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy; with `update` it is validated again: no change gets past the checks of the constructor."""
        if not update:
            return super().model_copy(deep=deep)
        return type(self)(**{**self.__dict__, **update})

    def _unchecked(self, update: Mapping[str, Any]) -> Self:
        """A copy with fields changed to values that are known to be valid."""
        return super().model_copy(update=update)


class Record(Message):
    """Base of what travels on edges; see the module for the three fields."""

    id: str = ""
    parents: tuple[str, ...] = ()
    origins: tuple[int, ...] = ()

    def stamped(self, *, id: str, parents: tuple[str, ...], origins: tuple[int, ...]) -> Self:
        """The same record with its provenance written; the rest isn't validated again."""
        return self._unchecked({"id": id, "parents": parents, "origins": origins})


class Said(Message):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class Prompt(Record):
    """One question. `metadata` is the row of the data set `source`; `row` and `epoch` are its place there.

    `messages`: the conversation that it is, for a chat template; empty where it is `text` alone.
    `min_version` is written at admission: the generator starts it with these weights or newer ones.
    """

    text: str
    messages: tuple[Said, ...] = ()
    answer: str = ""
    metadata: dict[str, JsonValue] = Field(default_factory=dict)
    split: Split = "train"
    epoch: Int63 = 0
    row: Int63 = 0
    source: str = ""
    min_version: NonNegativeInt = 0


class Rollout(Message):
    """One sampled response. All arrays have the length L of prompt + response.

    tokens [L] int32; mask [L]: true where the policy sampled the token; logprobs [L] float32: nats, of the
    distribution really sampled from (temperature included), NaN off the mask; versions [L] int32: the weights
    that sampled the token, -1 off the mask. `greedy`: it took the likeliest token everywhere, as a baseline
    for the others, and is never trained on.
    """

    tokens: Int32Array
    mask: BoolArray
    logprobs: Float32Array
    versions: Int32Array
    text: str
    finish: Finish
    temperature: PositiveFloat = 1.0
    seed: Int63 = 0
    greedy: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        mask = self.mask
        if not (self.tokens.size == mask.size == self.logprobs.size == self.versions.size):
            raise ValueError(
                f"unequal lengths: tokens {len(self.tokens)}, mask {len(mask)}, "
                f"logprobs {len(self.logprobs)}, versions {len(self.versions)}"
            )
        _check_behaviour(self.logprobs, self.versions, mask)
        return self

    @property
    def oldest_version(self) -> int | None:
        """The smallest version of a sampled token; None if no token was sampled."""
        return _oldest(self.versions)


class RolloutGroup(Record):
    """All rollouts of one prompt. `chat_digest` tells the chat template it was shown with; empty: none.

    `recorded` names what it is when it was sampled in another run: `<run id>:<id of the group there>`.
    """

    prompt: Prompt
    rollouts: tuple[Rollout, ...] = Field(min_length=1)
    chat_digest: str = ""
    recorded: str = ""

    @property
    def oldest_version(self) -> int | None:
        return oldest(r.oldest_version for r in self.rollouts)


class Outcome(StrEnum):
    """What a reward found out; only `ok` and `wrong` are verdicts on the answer."""

    OK = "ok"
    WRONG = "wrong"
    ERROR = "error"
    TIMEOUT = "timeout"


class Score(Message):
    """Reward of one rollout: `value` is what is trained on, `outcome` says what it rests on.

    `raw` is the value before shaping (length, format), which filters look at; None: `value` itself. `turns`:
    the part of it that each turn of the policy earned; empty where it isn't told apart.
    """

    value: FiniteFloat
    outcome: Outcome
    detail: str = ""
    raw: FiniteFloat | None = None
    turns: tuple[FiniteFloat, ...] = ()


class ScoredGroup(Record):
    """A rollout group with one score per rollout, in the same order.

    `reward_version` is the hash of the code and configuration that scored it; empty if it wasn't told.
    """

    group: RolloutGroup
    scores: tuple[Score, ...]
    reward_version: str = ""

    @model_validator(mode="after")
    def _one_score_each(self) -> Self:
        if len(self.scores) != len(self.group.rollouts):
            raise ValueError(f"{len(self.scores)} scores for {len(self.group.rollouts)} rollouts")
        return self

    def stamped(self, *, id: str, parents: tuple[str, ...], origins: tuple[int, ...]) -> Self:
        """As of any record; a group that no node gave out before is stamped alike, so that it has a name."""
        stamped = super().stamped(id=id, parents=parents, origins=origins)
        if self.group.id:
            return stamped
        group = self.group.stamped(id=id, parents=parents, origins=origins)
        return stamped._unchecked({"group": group})

    @property
    def oldest_version(self) -> int | None:
        return self.group.oldest_version


class Example(Record):
    """Supervised text: the tokens after `prompt` are trained on. The other fields are as in `Prompt`.

    Of a conversation what the assistant says in it is trained on too.
    """

    prompt: str
    response: str
    messages: tuple[Said, ...] = ()
    epoch: Int63 = 0
    row: Int63 = 0


class Sample(Message):
    """One sequence to train on, arrays [L] as in `Rollout`.

    `advantages` [L] float32 is finite everywhere; `logprobs` and `versions` are None for supervised data,
    else as in `Rollout`. `reference` is as `logprobs`, of a fixed model; None if none has read the sample.
    `policy` likewise, of the weights that are about to be trained on the sample.
    `truncated`: the response ended at the limit of tokens, so something would have come after it. `right`:
    the reward's outcome was `ok`; `judged`: it was a verdict, and `reward` is one. `turns`:
    the parts of the reward that each turn of the policy earned, if they are known apart. `replayed`: it comes
    from a replay buffer, which gives it out without regard to its age. `mismatched`: the response was given
    to another prompt; models read it, and it isn't trained on.
    `group` is the id of the record it came from, so that a whole group can be dropped from a batch.
    """

    group: str
    tokens: Int32Array
    mask: BoolArray
    advantages: Float32Array
    logprobs: Float32Array | None = None
    versions: Int32Array | None = None
    reference: Float32Array | None = None
    policy: Float32Array | None = None
    temperature: PositiveFloat = 1.0
    reward: FiniteFloat = 0.0
    turns: tuple[FiniteFloat, ...] = ()
    truncated: bool = False
    right: bool = False
    judged: bool = True
    replayed: bool = False
    mismatched: bool = False
    origin: int = -1

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        length, mask = self.tokens.size, self.mask
        arrays = {
            "mask": mask,
            "advantages": self.advantages,
            "logprobs": self.logprobs,
            "versions": self.versions,
            "reference": self.reference,
            "policy": self.policy,
        }
        if wrong := {k: v.size for k, v in arrays.items() if v is not None and v.size != length}:
            raise ValueError(f"unequal lengths: tokens {length}, {wrong}")
        if not np.isfinite(self.advantages).all():
            raise ValueError("advantages must be finite")
        if self.logprobs is None and not same_bits(mask, mask != 0):
            raise ValueError("mask must hold true and false only: its bytes are neither 0 nor 1")
        _check_behaviour(self.logprobs, self.versions, mask)
        for read in (self.reference, self.policy):
            if read is not None:
                _check_behaviour(read, None, mask)
        return self

    @property
    def oldest_version(self) -> int | None:
        """The smallest version of a sampled token; None for supervised data."""
        return None if self.versions is None else _oldest(self.versions)


class Batch(Record):
    """What one optimizer step trains on."""

    samples: tuple[Sample, ...]

    @property
    def oldest_version(self) -> int | None:
        return oldest(s.oldest_version for s in self.samples)

    @property
    def trained_tokens(self) -> int:
        """Tokens that a step on it is made from; mismatched responses are only read."""
        return sum(int(s.mask.sum()) for s in self.samples if not s.mismatched)

    def without(self, groups: frozenset[str]) -> Batch:
        """The batch without the samples of `groups`, which are no longer among its parents."""
        kept = tuple(s for s in self.samples if s.group not in groups)
        origins = tuple(sorted({s.origin for s in kept if not s.replayed}))
        return self.model_copy(update={"samples": kept, "origins": origins})


class Weights(Record):
    """A version of the policy: `version` optimizer steps were taken. The bytes travel on the weight plane.

    `metrics` describes the step that made it (loss, gradient norm, ...); empty for the first version.
    """

    version: NonNegativeInt
    manifest: WeightManifest | None = None
    metrics: dict[str, float] = Field(default_factory=dict)


DropReason = Literal["stale", "too_long", "group_timeout", "invalid", "dead_letter", "filtered", "end_of_run"]


class Dropped(Record):
    """Yielded by a component (or written by the runtime) instead of an output: `parent` goes no further.

    `right_share`: of the rollouts of a group that is dropped for its results.
    """

    parent: str
    reason: DropReason
    detail: str = ""
    right_share: float | None = None


class EndOfStream(Message):
    """Replica `replica` of `producer` has sent its last record on its edge."""

    producer: str
    replica: NonNegativeInt


def oldest(versions: Iterable[int | None]) -> int | None:
    """The smallest of the versions that are not None; None if there is none."""
    return min((v for v in versions if v is not None), default=None)


def _check_behaviour(
    logprobs: npt.NDArray[np.float32] | None,
    versions: npt.NDArray[np.int32] | None,
    mask: npt.NDArray[np.bool_],
) -> None:
    """Raises ValueError unless both say something exactly where `mask` [L] is true; None says nothing."""
    if logprobs is not None and not finite_exactly_where(logprobs, mask):
        raise ValueError("logprobs must be finite where mask is true, NaN elsewhere: missing is never zero")
    if versions is not None and not same_bits(versions >= 0, mask):
        raise ValueError("versions must be >= 0 where mask is true and -1 elsewhere")


def _oldest(versions: npt.NDArray[np.int32]) -> int | None:
    """The smallest version that isn't negative. As unsigned, -1 is the largest number."""
    if not versions.size:
        return None
    smallest = versions.view(np.uint32).min()
    return int(smallest) if smallest < 2**31 else None
