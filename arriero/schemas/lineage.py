"""The record of a run: entries of a hash-chained log, and where their content lies.

Structure stands in the entries, content (token arrays, texts) apart from them, bound by its hash: so content
can be taken away later, and the chain still holds. What may be taken away is hashed behind 16 random bytes
that stand and go with it, so that a guess at what is gone can't be tried against the hash.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, FiniteFloat, JsonValue, NonNegativeInt, PositiveFloat, TypeAdapter

from arriero.schemas.ledger import Event
from arriero.schemas.messages import Finish, Message, Outcome, Split

RunState = Literal["finished", "failed", "stopped"]
# In the metadata of a model file: the head of the record, or the room for it while it isn't known.
HEAD, NO_HEAD = "lineage_head", "0" * 64
More = tuple[dict[str, JsonValue], ...]  # per record: its fields without a column; empty: none has any
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # SHA-256, hexadecimal


class Place(Message):
    """`size` elements from `start` in part `part` of a space of flat arrays."""

    part: NonNegativeInt
    start: NonNegativeInt
    size: NonNegativeInt


class Opened(Message):
    """First entry: what the run was made of. Hashes are of the bytes of the files; empty: there is none.

    `health`: what gates find is noted; False in records that are older than that.
    """

    kind: Literal["opened"] = "opened"
    format: Literal[3] = 3
    run_id: str
    graph_digest: str
    manifest_sha256: str = ""
    options_sha256: str = ""
    health: bool = False


class Reopened(Message):
    """The recorder started again; `cut_bytes` of an unfinished commit were taken off the end.

    What the run is made of from here on, as in `Opened`; empty where nothing is said.
    """

    kind: Literal["reopened"] = "reopened"
    cut_bytes: NonNegativeInt
    graph_digest: str = ""
    manifest_sha256: str = ""
    options_sha256: str = ""


class Noted(Message):
    """An event of the ledger."""

    kind: Literal["event"] = "event"
    event: Event


class PromptEntry(Message):
    """A prompt without its text. Fields as in `Prompt`."""

    id: str
    parents: tuple[str, ...]
    origins: tuple[int, ...]
    split: Split
    epoch: NonNegativeInt
    row: NonNegativeInt
    source: str
    min_version: NonNegativeInt


class ScoresEntry(Message):
    """The scores of a group, one column per field of `Score`; `details` stand with the texts."""

    id: str
    parents: tuple[str, ...]
    origins: tuple[int, ...]
    reward_version: str
    values: tuple[FiniteFloat, ...]
    outcomes: tuple[Outcome, ...]
    raw: tuple[FiniteFloat | None, ...]
    more: More = ()


class GroupEntry(Message):
    """A group of rollouts as it was seen on `edge`: its columns hold one value per rollout.

    `arrays` is the place of tokens, mask, logprobs and versions of all its rollouts, one after the other.
    `shape_sha256` is the hash of mask and versions. `text` is the place of the salt, 16 bytes, and of prompt,
    responses and details, whose hash with it is `text_sha256`; behind the same salt, `tokens_sha256` is of
    tokens and log-probabilities, and `prompt_sha256` of the prompt alone.
    """

    kind: Literal["group"] = "group"
    edge: str
    id: str
    parents: tuple[str, ...]
    origins: tuple[int, ...]
    chat_digest: str
    recorded: str = ""
    prompt: PromptEntry
    lengths: tuple[NonNegativeInt, ...]
    sampled: tuple[NonNegativeInt, ...]
    oldest: tuple[int, ...]
    newest: tuple[int, ...]
    finishes: tuple[Finish, ...]
    temperatures: tuple[PositiveFloat, ...]
    seeds: tuple[NonNegativeInt, ...]
    more: More = ()
    scores: ScoresEntry | None = None
    arrays: Place
    shape_sha256: Digest
    tokens_sha256: Digest
    prompt_sha256: Digest
    text: Place
    text_sha256: Digest


class BatchEntry(Message):
    """A batch as it was seen on `edge`: its columns hold one value per sample.

    `group` indexes `groups`; `rollout` is the number of the rollout in that group whose arrays the sample
    has, or -1: then they stand in `own`, in the order of the samples. `advantages` likewise; `reference` is
    what a reference said of those it has read (`referenced`), then what the policy did (`reread`).
    `sha256` is of the hashes of its groups, of mask and versions of `own`, and of the advantages;
    `tokens_sha256`, behind the 16 bytes at `salt`, of the rest of `own` and of `reference`.
    """

    kind: Literal["batch"] = "batch"
    edge: str
    id: str
    parents: tuple[str, ...]
    origins: tuple[int, ...]
    groups: tuple[str, ...]
    group: tuple[NonNegativeInt, ...]
    rollout: tuple[int, ...]
    lengths: tuple[NonNegativeInt, ...]
    temperatures: tuple[PositiveFloat, ...]
    rewards: tuple[FiniteFloat, ...]
    truncated: tuple[bool, ...]
    origin: tuple[int, ...]
    behaviour: tuple[bool, ...]
    referenced: tuple[bool, ...]
    reread: tuple[bool, ...] = ()
    more: More = ()
    own: Place
    advantages: Place
    reference: Place
    salt: Place
    sha256: Digest
    tokens_sha256: Digest


class RecordEntry(Message):
    """A record of another class; its JSON stands behind a salt with the texts (empty if it has arrays)."""

    kind: Literal["record"] = "record"
    edge: str
    record: str
    id: str
    parents: tuple[str, ...]
    origins: tuple[int, ...]
    text: Place
    text_sha256: Digest


class WeightsEntry(Message):
    """A version that a loop has carried. `fingerprint` is of the published bytes; empty: none were."""

    kind: Literal["weights"] = "weights"
    loop: str
    id: str
    parents: tuple[str, ...]
    origins: tuple[int, ...]
    version: NonNegativeInt
    fingerprint: str
    metrics: dict[str, float] = Field(default_factory=dict)


class RunEntry(Message):
    """Something that happened to the run itself: how it failed, or a record that couldn't be read."""

    kind: Literal["run"] = "run"
    what: str
    detail: str = ""


class Committed(Message):
    """Everything up to here is whole: the content that the entries name is stored. `ends` by space."""

    kind: Literal["committed"] = "committed"
    ends: dict[str, Place] = Field(default_factory=dict)


class Redacted(Message):
    """Texts, tokens and log-probabilities of these were taken away on purpose.

    `groups` by the ids under which samples name them, `records` of other classes, and `batches` that had
    tokens of their own, or reference log-probabilities, of the former.
    """

    kind: Literal["redacted"] = "redacted"
    groups: tuple[str, ...] = ()
    records: tuple[str, ...] = ()
    batches: tuple[str, ...] = ()
    reason: str


class Closed(Message):
    """The run is over, and nothing is missing from its record.

    `model`: SHA-256 of the files of the model that it left, by name; of a file with room for the head of the
    chain, as it was with zeros there.
    """

    kind: Literal["closed"] = "closed"
    state: RunState
    model: dict[str, Digest] = Field(default_factory=dict)


Entry = Annotated[
    Opened | Reopened | Noted | GroupEntry | BatchEntry | RecordEntry | WeightsEntry | RunEntry | Committed
    | Redacted | Closed,
    Field(discriminator="kind"),
]  # fmt: skip
ENTRY: TypeAdapter[Entry] = TypeAdapter(Entry, config=ConfigDict(ser_json_inf_nan="strings"))


class Anchor(Message):
    """The head of a chain, to be kept where the record can't be changed: it fixes all entries before it."""

    entries: NonNegativeInt
    head: Digest
