"""Records taken apart into entries, flat arrays and texts, and put together again exactly.

| space        | arrays                                                                                 |
|--------------|----------------------------------------------------------------------------------------|
| `rollouts`   | tokens int32, mask bool, logprobs float32, versions int32: one element per token          |
| `advantages` | values float32, per token of the samples of a batch                                       |
| `reference`  | values float32, likewise: what a reference said of its samples, then what the policy did   |
| `text`       | bytes uint8: a salt, then JSON in UTF-8 of a prompt and its responses, or of a record       |
| `index`      | rows int64 [n, 3] (part, start, size of a rollout in `rollouts`), rewards float64           |

`index` lets any zarr reader find its way without the chain; NaN is the reward of a group that has none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import JsonValue

from arriero.schemas.lineage import BatchEntry, GroupEntry, More, PromptEntry, ScoresEntry
from arriero.schemas.messages import Batch, Message, Prompt, Rollout, RolloutGroup, Sample, Score, ScoredGroup

TOKENS = ("tokens", "mask", "logprobs", "versions")
SHAPE, PRIVATE = ("mask", "versions"), ("tokens", "logprobs")
SALT_BYTES = 16
Columns = dict[str, npt.NDArray[Any]]


def columns(records: Sequence[Rollout | Sample]) -> Columns:
    """The four token arrays of all records, one after the other.

    What supervised samples don't have is NaN and -1, as off the mask.
    """
    return {
        "tokens": _joined([r.tokens for r in records], np.int32),
        "mask": _joined([r.mask for r in records], np.bool_),
        "logprobs": _joined([_or(r.logprobs, r, np.float32(np.nan)) for r in records], np.float32),
        "versions": _joined([_or(r.versions, r, np.int32(-1)) for r in records], np.int32),
    }


def joined(values: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    """Float arrays, one after the other; empty for none."""
    return _joined(values, np.float32)


def _joined(values: Sequence[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate(values) if values else np.zeros(0, dtype)


def _or(values: npt.NDArray[Any] | None, record: Rollout | Sample, missing: np.generic) -> npt.NDArray[Any]:
    return values if values is not None else np.full(len(record.tokens), missing)


def arrays_sha256(arrays: Columns, salt: bytes = b"") -> str:
    """Of the bytes of all arrays, each with its name and length before it, behind `salt`."""
    digest = hashlib.sha256(salt)
    for name, values in arrays.items():
        digest.update(f"{name}:{len(values)};".encode())
        digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()


def some(arrays: Columns, names: Iterable[str]) -> Columns:
    """Those of these names."""
    return {name: arrays[name] for name in names}


def changed(entry: GroupEntry, arrays: Columns, text: bytes, *, redacted: bool) -> str:
    """What is otherwise than when the group was recorded; empty for nothing."""
    if arrays_sha256(some(arrays, SHAPE)) != entry.shape_sha256:
        return "its mask or versions were changed"
    if redacted:
        left = any(text) or arrays["tokens"].any() or np.nan_to_num(arrays["logprobs"]).any()
        return "is said to be redacted, and some of its content is there" if left else ""
    if arrays_sha256(some(arrays, PRIVATE), text[:SALT_BYTES]) != entry.tokens_sha256:
        return "its tokens or log-probs were changed"
    return "its texts were changed" if sha256(text) != entry.text_sha256 else ""


def key_of(record: Rollout | Sample) -> bytes:
    """16 bytes that tell token arrays apart, to find the rollout that a sample was made from."""
    digest = hashlib.blake2b(record.tokens.data, digest_size=16)
    digest.update(record.mask.data)
    for values in (record.logprobs, record.versions):
        digest.update(b"-" if values is None else values.data)
    return digest.digest()


# --- texts ------------------------------------------------------------------------------------------------


_ALWAYS = ("text", "answer", "metadata")  # said of every prompt


def prompt_text(prompt: Prompt) -> bytes:
    """What the hash of a prompt is of: all that its entry doesn't hold."""
    return _json(_said(prompt))


def group_text(group: RolloutGroup, scores: Sequence[Score] = ()) -> bytes:
    return _json(
        {
            "prompt": _said(group.prompt),
            "responses": [r.text for r in group.rollouts],
            "details": [s.detail for s in scores],
        }
    )


def _said(prompt: Prompt) -> dict[str, JsonValue]:
    """The fields of a prompt without a column in `PromptEntry`, so that a new one is never left out."""
    other = {*Prompt.model_fields} - {*PromptEntry.model_fields, *_ALWAYS}
    said: dict[str, JsonValue] = {name: getattr(prompt, name) for name in _ALWAYS}
    return said | prompt.model_dump(mode="json", include=other, exclude_defaults=True)


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def more(records: Sequence[Message], columns: frozenset[str]) -> More:
    """The fields of each that have no column of their own and aren't as they are by default."""
    names = {*type(records[0]).model_fields} - columns if records else set[str]()
    found = tuple(r.model_dump(mode="json", include=names, exclude_defaults=True) for r in records)
    return found if any(found) else ()


OF_ROLLOUT = frozenset({*TOKENS, "text", "finish", "temperature", "seed"})
OF_SCORE = frozenset({"value", "outcome", "detail", "raw"})
OF_SAMPLE = frozenset(
    {*TOKENS, "group", "advantages", "reference", "policy", "temperature", "reward", "truncated", "origin"}
)


# --- and back ---------------------------------------------------------------------------------------------


def pieces(lengths: Iterable[int]) -> list[slice]:
    """The slice of each of several arrays that stand one after the other."""
    found: list[slice] = []
    end = 0
    for length in lengths:
        found.append(slice(end, end + length))
        end += length
    return found


def _of_tokens(arrays: Columns, piece: slice) -> dict[str, Any]:
    """The fields of a rollout with one value per token; `Any`, since its other fields have other types."""
    return {name: arrays[name][piece] for name in TOKENS}


def group_of(entry: GroupEntry, arrays: Columns, text: bytes) -> ScoredGroup | RolloutGroup:
    """The record that `entry` was made from; without its texts if they are gone, and `text` is empty."""
    said = json.loads(text) if text else _nothing_said(entry)
    rollouts = tuple(
        Rollout(
            **_of_tokens(arrays, piece),
            text=said["responses"][k],
            finish=entry.finishes[k],
            temperature=entry.temperatures[k],
            seed=entry.seeds[k],
            **_read(entry.more[k] if entry.more else {}),
        )
        for k, piece in enumerate(pieces(entry.lengths))
    )
    prompt = Prompt.model_validate_json(_json(entry.prompt.model_dump() | said["prompt"]))
    group = RolloutGroup(
        id=entry.id, parents=entry.parents, origins=entry.origins, prompt=prompt, rollouts=rollouts,
        chat_digest=entry.chat_digest, recorded=entry.recorded,
    )  # fmt: skip
    if (s := entry.scores) is None:
        return group
    scores = tuple(
        Score(
            value=s.values[k],
            outcome=s.outcomes[k],
            raw=s.raw[k],
            detail=detail,
            **_read(s.more[k] if s.more else {}),
        )
        for k, detail in enumerate(said["details"])
    )
    return ScoredGroup(
        id=s.id, parents=s.parents, origins=s.origins, group=group, scores=scores,
        reward_version=s.reward_version,
    )  # fmt: skip


def _nothing_said(entry: GroupEntry) -> dict[str, Any]:
    none = [""] * len(entry.lengths)
    return {"prompt": {"text": ""}, "responses": none, "details": none}


def prompt_entry(prompt: Prompt) -> PromptEntry:
    return PromptEntry(
        id=prompt.id, parents=prompt.parents, origins=prompt.origins, split=prompt.split, epoch=prompt.epoch,
        row=prompt.row, source=prompt.source, min_version=prompt.min_version,
    )  # fmt: skip


def scores_entry(scored: ScoredGroup) -> ScoresEntry:
    return ScoresEntry(
        id=scored.id, parents=scored.parents, origins=scored.origins, reward_version=scored.reward_version,
        values=tuple(s.value for s in scored.scores), outcomes=tuple(s.outcome for s in scored.scores),
        raw=tuple(s.raw for s in scored.scores), more=more(scored.scores, OF_SCORE),
    )  # fmt: skip


def batch_of(
    entry: BatchEntry,
    tokens: Sequence[Columns],
    advantages: npt.NDArray[np.float32],
    reference: npt.NDArray[np.float32],
) -> Batch:
    """The batch that `entry` was made from. `tokens` are the four arrays of each of its samples."""
    at = pieces(entry.lengths)
    read = {(k, name): reference[piece] for k, name, piece in readings(entry)}
    samples = tuple(
        Sample(
            group=entry.groups[entry.group[k]],
            tokens=arrays["tokens"],
            mask=arrays["mask"],
            advantages=advantages[at[k]],
            logprobs=arrays["logprobs"] if entry.behaviour[k] else None,
            versions=arrays["versions"] if entry.behaviour[k] else None,
            reference=read.get((k, "reference")),
            policy=read.get((k, "policy")),
            temperature=entry.temperatures[k],
            reward=entry.rewards[k],
            truncated=entry.truncated[k],
            origin=entry.origin[k],
            **_read(entry.more[k] if entry.more else {}),
        )
        for k, arrays in enumerate(tokens)
    )
    return Batch(id=entry.id, parents=entry.parents, origins=entry.origins, samples=samples)


def readings(entry: BatchEntry) -> list[tuple[int, str, slice]]:
    """What stands in `reference`: of which sample, which field, and where."""
    fields = {"reference": entry.referenced, "policy": entry.reread}
    whose = [(k, name) for name, read in fields.items() for k, yes in enumerate(read) if yes]
    at = pieces(entry.lengths[k] for k, _ in whose)
    return [(k, name, piece) for (k, name), piece in zip(whose, at, strict=True)]


def _read(fields: dict[str, JsonValue]) -> dict[str, Any]:
    """As the records have them: JSON has no tuples."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}


def batch_sha256(groups: Sequence[str], own: Columns, advantages: npt.NDArray[np.float32]) -> str:
    """Of the hashes of its groups, of what anybody may see of its own arrays, and of its advantages."""
    digest = hashlib.sha256("".join(f"{name};" for name in groups).encode())
    digest.update(arrays_sha256({**some(own, SHAPE), "advantages": advantages}).encode())
    return digest.hexdigest()


def batch_tokens_sha256(own: Columns, reference: npt.NDArray[np.float32], salt: bytes) -> str:
    """Of what may be taken away of a batch: its own tokens and log-probabilities, and what models said."""
    return arrays_sha256({**some(own, PRIVATE), "reference": reference}, salt)
