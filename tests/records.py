"""Hypothesis strategies for every class of record and message."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pydantic import JsonValue

from arriero.schemas.ledger import (
    Admitted,
    DroppedEvent,
    Ended,
    Evaluated,
    Joined,
    Learned,
    Leave,
    Restarted,
    Resumed,
    Scaled,
    Started,
    Stop,
    Trained,
    Unhealthy,
)  # fmt: skip
from arriero.schemas.messages import (
    Batch,
    Dropped,
    EndOfStream,
    Example,
    Message,
    Outcome,
    Prompt,
    Rollout,
    RolloutGroup,
    Said,
    Sample,
    Score,
    ScoredGroup,
    Weights,
)  # fmt: skip
from arriero.schemas.weights import WeightManifest, cells_fingerprint

finite = st.floats(allow_nan=False, allow_infinity=False)
logprobs = st.floats(-50, 0, width=32)
counts = st.integers(0, 2**31 - 1)
origins = st.lists(st.integers(-(2**40), 2**40), max_size=3).map(tuple)
names = st.text(max_size=8)
reasons: st.SearchStrategy[Any] = st.sampled_from(["stale", "too_long", "invalid", "filtered", "end_of_run"])
provenance: dict[str, st.SearchStrategy[Any]] = {
    "id": names,
    "parents": st.lists(names, max_size=2).map(tuple),
    "origins": origins,
}
json_values: st.SearchStrategy[JsonValue] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | finite | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)

said = st.builds(Said, role=st.sampled_from(["system", "user", "assistant", "tool"]), content=names)
prompts = st.builds(
    Prompt, **provenance, text=st.text(max_size=20), answer=names,
    messages=st.lists(said, max_size=2).map(tuple),
    metadata=st.dictionaries(names, json_values, max_size=3), split=st.sampled_from(["train", "eval"]),
    epoch=counts, row=counts, min_version=counts,
)  # fmt: skip


@st.composite
def arrays(draw: st.DrawFn) -> dict[str, npt.NDArray[Any]]:
    """tokens, mask, logprobs and versions [L] that fit each other."""
    mask = draw(hnp.arrays(np.bool_, st.integers(0, 12)))
    size = len(mask)
    sampled = draw(hnp.arrays(np.float32, size, elements=logprobs))
    versions = draw(hnp.arrays(np.int32, size, elements=counts))
    return {
        "tokens": draw(hnp.arrays(np.int32, size, elements=counts)),
        "mask": mask,
        "logprobs": np.where(mask, sampled, np.float32(np.nan)),
        "versions": np.where(mask, versions, np.int32(-1)),
    }


def made(fields: dict[str, Any], rest: dict[str, Any]) -> Rollout:
    return Rollout(**fields, **rest)


rollouts = st.builds(
    made,
    arrays(),
    st.fixed_dictionaries(
        {"text": names, "finish": st.sampled_from(["stop", "length"]), "seed": counts,
         "temperature": st.floats(0.01, 10)}
    ),
)  # fmt: skip
groups = st.builds(
    RolloutGroup, **provenance, prompt=prompts, rollouts=st.lists(rollouts, min_size=1, max_size=3).map(tuple)
)
scores = st.builds(Score, value=finite, outcome=st.sampled_from(Outcome), detail=names)
scored_groups = groups.flatmap(
    lambda group: st.builds(
        ScoredGroup, **provenance, group=st.just(group),
        scores=st.lists(scores, min_size=len(group.rollouts), max_size=len(group.rollouts)).map(tuple),
    )
)  # fmt: skip


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """With the behaviour policy's log-probabilities and versions, or supervised; read by models or not."""
    fields: dict[str, Any] = draw(arrays())
    read = {name: fields["logprobs"] for name in ("reference", "policy") if draw(st.booleans())}
    if draw(st.booleans()):
        fields = {name: fields[name] for name in ("tokens", "mask")}
    advantages = hnp.arrays(np.float32, len(fields["mask"]), elements=st.floats(-1e6, 1e6, width=32))
    return Sample(
        group=draw(names), **fields, **read, advantages=draw(advantages),
        temperature=draw(st.floats(0.01, 10)),
        reward=draw(finite), origin=draw(st.integers(-1, 2**40)), truncated=draw(st.booleans()),
    )  # fmt: skip


batches = st.builds(Batch, **provenance, samples=st.lists(samples(), max_size=3).map(tuple))


def manifest(version: int) -> WeightManifest:
    """Of two parts that are all zeros."""
    plan, cells = "b" * 32, ("0" * 32, "0" * 32)
    return WeightManifest(
        version=version, url="shm://x", session="a" * 32, plan=plan, slot=0, cells=cells,
        fingerprint=cells_fingerprint(plan, cells),
    )  # fmt: skip


metrics = st.dictionaries(names, finite, max_size=2)
weights = st.builds(
    Weights, **provenance, version=counts, manifest=st.none() | st.builds(manifest, counts), metrics=metrics
)
messages: st.SearchStrategy[Message] = st.one_of(
    said,
    prompts,
    rollouts,
    groups,
    scores,
    scored_groups,
    samples(),
    batches,
    weights,
    st.builds(Example, **provenance, prompt=names, response=names),
    st.builds(Dropped, **provenance, parent=names, reason=reasons, detail=names),
    st.builds(EndOfStream, producer=names, replica=counts),
    st.builds(
        Admitted, id=names, origin=st.integers(-9, 9), split=st.sampled_from(["train", "eval"]), epoch=counts,
        row=counts, min_version=counts,
    ),
    st.builds(DroppedEvent, node=names, parent=names, origins=origins, reason=reasons, detail=names),
    st.builds(
        Trained, node=names, version=counts, batch=names, origins=origins, tokens=counts,
        staleness_max=counts, staleness_mean=finite, reward_mean=finite, metrics=metrics,
    ),
    st.builds(
        Evaluated, id=names, origin=st.integers(-9, 9), version=counts,
        values=st.lists(finite, max_size=2).map(tuple),
        outcomes=st.lists(st.sampled_from(Outcome), max_size=2).map(tuple),
    ),
    st.builds(
        Learned, node=names, version=st.integers(1, 9), batch=names, origins=origins,
        inputs=st.lists(names, max_size=2).map(tuple),
    ),
    st.builds(Ended, node=names, replica=counts, error=names, traceback=names, user=st.booleans()),
    st.builds(Stop, reason=names),
    st.builds(
        Unhealthy, node=names, version=counts, gate=names, level=st.sampled_from(["warn", "stop"]),
        measure=names, value=finite, bound=finite, detail=names,
    ),
    st.builds(Started, node=names, replica=counts, life=names),
    st.builds(Joined, role=names, replicas=st.lists(counts, max_size=3).map(tuple)),
    st.builds(Leave, role=names, replica=counts),
    st.builds(
        Scaled, id=names, role=names, joined=st.lists(counts, max_size=3).map(tuple),
        leaving=st.lists(counts, max_size=3).map(tuple), number=st.integers(1, 9),
    ),
    st.builds(Restarted, name=names, number=st.integers(1, 9), why=names),
    st.builds(
        Resumed, number=st.integers(1, 9), versions=st.dictionaries(names, counts, max_size=2),
        anew=st.booleans(), changed=st.lists(names, max_size=2).map(tuple), why=names,
    ),
)  # fmt: skip


def same(a: Message, b: Message) -> bool:
    """Whether two messages are equal, arrays by dtype and bytes, so that NaN is NaN."""
    return bool(_plain(a) == _plain(b))


def _plain(value: Any) -> Any:
    if hasattr(value, "tobytes"):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, Message):
        return type(value), {f: _plain(getattr(value, f)) for f in type(value).model_fields}
    if type(value) in (tuple, list):  # isinstance would leave the items unknown
        return type(value), [_plain(v) for v in value]
    return type(value), value
