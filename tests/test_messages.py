"""Records refuse what would be misread later; above all, a missing log-probability never becomes a zero."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from arriero.engine.codec import CodecError, decode, encode
from arriero.schemas.graph import Capacity, GraphSpec
from arriero.schemas.ledger import EVENT, Admitted, Trained
from arriero.schemas.messages import (
    Batch,
    Message,
    Outcome,
    Prompt,
    Rollout,
    RolloutGroup,
    Sample,
    Score,
    ScoredGroup,
    Weights,
    oldest,
)  # fmt: skip
from arriero.schemas.run import RunOptions
from tests.records import arrays, samples
from tests.toys import rollout

Fields = dict[str, Any]


def fields() -> Fields:
    """Of a rollout: one prompt token, then two that versions 4 and 5 sampled."""
    return {
        "tokens": np.array([7, 8, 9], np.int32),
        "mask": np.array([False, True, True]),
        "logprobs": np.array([np.nan, -0.5, 0.0], np.float32),
        "versions": np.array([-1, 4, 5], np.int32),
        "text": "ok",
        "finish": "stop",
    }


def sample_fields() -> Fields:
    found = {k: v for k, v in fields().items() if k not in ("text", "finish")}
    return found | {"group": "g", "advantages": np.array([0.0, 1.0, -1.0], np.float32)}


def changed(values: Fields, change: Fields) -> Fields:
    return {**values, **change}


def floats(*values: float) -> npt.NDArray[np.float32]:
    return np.array(values, np.float32)


def ints(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


BOTH: list[tuple[str, Any, str]] = [
    ("tokens", [7, 8, 9], "a numpy array of int32 is needed, not list"),
    ("tokens", b"\7\0\0\0", "a numpy array of int32 is needed, not bytes"),
    ("tokens", np.array([7, 8, 9]), "dtype int64 where int32 is needed"),
    ("tokens", np.array([7, 8, 9], ">i4"), "dtype >i4 where int32 is needed"),
    ("tokens", np.array([7, 8, 9], np.uint32), "dtype uint32 where int32 is needed"),
    ("tokens", ints(7, 8, 9)[None], r"shape \(1, 3\) where one contiguous dimension is needed"),
    ("tokens", np.array(7, np.int32), r"shape \(\) where one contiguous dimension is needed"),
    ("tokens", np.arange(6, dtype=np.int32)[::2], "one contiguous dimension is needed"),
    ("tokens", np.ma.masked_array(ints(7, 8, 9)), "a numpy array of int32 is needed, not MaskedArray"),
    ("mask", ints(0, 1, 1), "dtype int32 where bool is needed"),
    ("logprobs", np.array([np.nan, -0.5, 0.0]), "dtype float64 where float32 is needed"),
    ("logprobs", np.array([np.nan, -0.5, 0.0], np.float16), "dtype float16 where float32 is needed"),
    ("tokens", ints(7, 8), "unequal lengths"),
    ("mask", np.array([False, True]), "unequal lengths"),
    ("logprobs", floats(np.nan, -0.5), "unequal lengths"),
    ("versions", ints(-1, 4), "unequal lengths"),
    ("logprobs", floats(np.nan, -0.5, np.nan), "missing is never zero"),
    ("logprobs", floats(np.nan, -0.5, np.inf), "missing is never zero"),
    ("logprobs", floats(np.nan, -np.inf, -0.5), "missing is never zero"),
    ("logprobs", floats(0.0, -0.5, -0.5), "missing is never zero"),
    ("versions", ints(-1, 4, -1), "versions must be >= 0 where mask is true and -1 elsewhere"),
    ("versions", ints(4, 4, 4), "versions must be >= 0 where mask is true and -1 elsewhere"),
    ("temperature", 0.0, "greater than 0"),
    ("temperature", float("nan"), "greater than 0"),
    ("surprise", 1, "Extra inputs are not permitted"),
]


@pytest.mark.parametrize(("field", "value", "message"), BOTH)
@pytest.mark.parametrize(("kind", "valid"), [(Rollout, fields), (Sample, sample_fields)])
def test_a_rollout_or_sample_refuses(
    kind: type[Message], valid: Callable[[], Fields], field: str, value: Any, message: str
) -> None:
    kind(**valid())
    with pytest.raises(ValidationError, match=message):
        kind(**changed(valid(), {field: value}))


@pytest.mark.parametrize(
    ("kind", "valid", "change", "message"),
    [
        (Rollout, fields, {"finish": "error"}, "Input should be 'stop' or 'length'"),
        (Rollout, fields, {"seed": -1}, "greater than or equal to 0"),
        (Sample, sample_fields, {"advantages": floats(0.0, np.nan, 0.0)}, "advantages must be finite"),
        (
            Sample,
            sample_fields,
            {"advantages": floats(0.0, 1.0)},
            "unequal lengths: tokens 3, {'advantages': 2}",
        ),
        (Sample, sample_fields, {"reward": float("inf")}, "finite number"),
        (
            Sample,
            lambda: sample_fields() | {"logprobs": None, "versions": None},
            {"mask": np.frombuffer(b"\0\1\2", np.bool_)},
            "its bytes are neither 0 nor 1",
        ),
        (Score, lambda: {"value": 1.0, "outcome": "ok"}, {"value": float("nan")}, "finite number"),
        (Score, lambda: {"value": 1.0, "outcome": "ok"}, {"outcome": "great"}, "'ok', 'wrong', 'error' or"),
        (Prompt, lambda: {"text": "?"}, {"split": "test"}, "'train' or 'eval'"),
        (Prompt, lambda: {"text": "?"}, {"min_version": -1}, "greater than or equal to 0"),
        (Prompt, lambda: {"text": "?"}, {"metadata": {"a": object()}}, "valid JSON value"),
        (Weights, lambda: {"version": 0}, {"version": -1}, "greater than or equal to 0"),
        (
            RolloutGroup,
            lambda: {"prompt": Prompt(text="?"), "rollouts": (rollout(0),)},
            {"rollouts": ()},
            "at least 1",
        ),
        (Capacity, lambda: {"messages": 1}, {"messages": 0}, "greater than 0"),
        (Capacity, lambda: {"messages": 1}, {"bytes": 0}, "greater than 0"),
        (RunOptions, lambda: {"run_id": "r"}, {"lease_s": 0.0}, "greater than 0"),
        (RunOptions, lambda: {"run_id": "r"}, {"threads": {"trainer": 0}}, "greater than 0"),
    ],
)
def test_a_record_refuses(
    kind: type[Message], valid: Callable[[], Fields], change: Fields, message: str
) -> None:
    kind(**valid())
    with pytest.raises(ValidationError, match=message):
        kind(**changed(valid(), change))


def test_a_scored_group_has_one_score_per_rollout() -> None:
    group = RolloutGroup(prompt=Prompt(text="?"), rollouts=(rollout(0), rollout(1)))
    one = Score(value=1.0, outcome=Outcome.OK)
    ScoredGroup(group=group, scores=(one, one))
    with pytest.raises(ValidationError, match="1 scores for 2 rollouts"):
        ScoredGroup(group=group, scores=(one,))


def test_ledger_events_are_told_apart_by_their_kind() -> None:
    admitted = Admitted(id="p", origin=0, split="train", epoch=0, row=0, min_version=0)
    assert EVENT.validate_json(admitted.model_dump_json()) == admitted
    with pytest.raises(ValidationError, match="does not match any of the expected tags"):
        EVENT.validate_python({"kind": "lost"})
    with pytest.raises(ValidationError, match="finite number"):
        Trained(
            node="t", version=1, batch="b", origins=(0,), tokens=1, staleness_max=0,
            staleness_mean=float("nan"), reward_mean=0.0,
        )  # fmt: skip


def construct(values: Fields) -> Rollout:
    return Rollout(**values)


def validate(values: Fields) -> Rollout:
    return Rollout.model_validate(values)


def travel(values: Fields) -> Rollout:
    return decode(encode(Rollout.model_construct(**values)), Rollout)


def copy_with(values: Fields) -> Rollout:
    return Rollout(**fields()).model_copy(update=values)


def copy_of_the_log_probabilities_alone(values: Fields) -> Rollout:
    mask = values["mask"]
    clean = changed(values, {"logprobs": np.where(mask, np.float32(-1), np.float32(np.nan))})
    return Rollout(**clean).model_copy(update={"logprobs": values["logprobs"]})


def stamp(values: Fields) -> Rollout:
    """Inside a group, which the runtime stamps without validating again."""
    group = RolloutGroup(prompt=Prompt(text="?"), rollouts=(Rollout(**values),))
    return group.stamped(id="a", parents=(), origins=(1,)).rollouts[0]


WAYS_IN = [construct, validate, travel, copy_with, copy_of_the_log_probabilities_alone, stamp]


@pytest.mark.parametrize("way_in", WAYS_IN)
@given(arrays(), st.data())
def test_no_way_in_turns_a_missing_log_probability_into_a_number(
    way_in: Callable[[Fields], Rollout], found: Fields, data: st.DataObject
) -> None:
    values = {**fields(), **found}
    given_logprobs = values["logprobs"].copy()
    for k in range(len(given_logprobs)):
        if data.draw(st.booleans()):
            given_logprobs[k] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf, 0.0]))
    given_logprobs.setflags(write=False)
    try:
        made = way_in(values | {"logprobs": given_logprobs.copy()})
    except (ValidationError, CodecError):
        assert (np.isfinite(given_logprobs) != values["mask"]).any()
        return
    assert made.logprobs.tobytes() == given_logprobs.tobytes()
    assert np.isfinite(made.logprobs[made.mask]).all()
    assert not np.isfinite(made.logprobs[~made.mask]).any()


def test_a_copy_with_changes_is_validated() -> None:
    made = Rollout(**fields())
    with pytest.raises(ValidationError, match="missing is never zero"):
        made.model_copy(update={"mask": np.array([True, True, True])})
    with pytest.raises(ValidationError, match="Extra inputs"):
        made.model_copy(update={"tokenz": 1})
    assert made.model_copy() == made
    assert Prompt(text="?").model_copy(update={"min_version": 3}).min_version == 3


@pytest.mark.parametrize("name", ["tokens", "mask", "logprobs", "versions"])
def test_arrays_of_records_cannot_be_written(name: str) -> None:
    made = Rollout(**fields())
    with pytest.raises(ValueError, match="read-only"):
        getattr(made, name)[0] = 1
    with pytest.raises(ValidationError, match="frozen"):
        setattr(made, name, getattr(made, name))


def test_a_part_of_an_array_that_can_still_be_written_is_copied() -> None:
    whole = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    made = Rollout(**changed(fields(), {"tokens": whole[1]}))
    view = whole[0]
    view.setflags(write=False)
    other = Rollout(**changed(fields(), {"tokens": view}))
    whole[:] = 0
    assert (made.tokens.tolist(), other.tokens.tolist()) == ([4, 5, 6], [1, 2, 3])


def test_a_whole_array_is_taken_without_a_copy_and_becomes_read_only() -> None:
    mine = ints(7, 8, 9)
    made = Rollout(**changed(fields(), {"tokens": mine}))
    assert made.tokens is mine
    with pytest.raises(ValueError, match="read-only"):
        mine[0] = 1


def test_the_oldest_version_is_that_of_a_sampled_token() -> None:
    made = Rollout(**fields())
    assert made.oldest_version == 4
    unsampled: Fields = {
        **fields(),
        "mask": np.zeros(3, np.bool_), "logprobs": floats(*[np.nan] * 3), "versions": ints(-1, -1, -1),
    }  # fmt: skip
    assert Rollout(**unsampled).oldest_version is None
    group = RolloutGroup(prompt=Prompt(text="?"), rollouts=(Rollout(**unsampled), made, rollout(9)))
    assert group.oldest_version == 4
    assert ScoredGroup(
        group=group, scores=(Score(value=0.0, outcome=Outcome.WRONG),) * 3
    ).oldest_version == 4  # fmt: skip
    assert oldest([None, 3, None, 2]) == 2
    assert oldest([None]) is None


@given(samples())
def test_the_oldest_version_of_a_sample_is_the_smallest_on_the_mask(made: Sample) -> None:
    expected = None
    if made.versions is not None and made.mask.any():
        expected = int(made.versions[made.mask].min())
    assert made.oldest_version == expected


def test_a_batch_without_some_groups_keeps_the_rest() -> None:
    made = [
        Sample(**changed(sample_fields(), {"group": g, "origin": k}))
        for k, g in enumerate(("a", "b", "a", "c"))
    ]
    batch = Batch(id="x", origins=(0, 1, 2, 3), samples=tuple(made))
    left = batch.without(frozenset({"a"}))
    assert (left.id, left.origins, [s.group for s in left.samples]) == ("x", (1, 3), ["b", "c"])
    assert Batch(samples=()).oldest_version is None


def test_provenance_is_written_without_validating_again() -> None:
    group = RolloutGroup(prompt=Prompt(text="?"), rollouts=(rollout(0),))
    stamped = group.stamped(id="p>generator", parents=("p",), origins=(3,))
    assert (stamped.id, stamped.parents, stamped.origins) == ("p>generator", ("p",), (3,))
    assert stamped.rollouts is group.rollouts
    assert group.id == ""


def test_a_group_that_comes_with_its_scores_is_named_as_they_are() -> None:
    # A generator of episodes gives both at once; without a name all its rollouts would share theirs.
    prompt = Prompt(id="p", text="?")
    score = Score(value=1.0, outcome=Outcome.OK)
    played = ScoredGroup(group=RolloutGroup(prompt=prompt, rollouts=(rollout(0),)), scores=(score,))
    stamped = played.stamped(id="p>episodes", parents=("p",), origins=(3,))
    assert (stamped.group.id, stamped.group.parents, stamped.group.origins) == ("p>episodes", ("p",), (3,))
    scored = played.model_copy(update={"group": played.group.stamped(id="g", parents=("p",), origins=(3,))})
    assert scored.stamped(id="g>reward", parents=("g",), origins=(3,)).group.id == "g"


def test_a_graph_needs_a_node() -> None:
    with pytest.raises(ValidationError, match="at least 1 item"):
        GraphSpec(name="g", nodes=())


def test_a_rollout_of_4096_tokens_is_validated_within_a_fifth_of_a_millisecond() -> None:
    size = 4096
    values: Fields = {
        "tokens": np.zeros(size, np.int32), "mask": np.ones(size, np.bool_),
        "logprobs": np.full(size, -1.0, np.float32), "versions": np.zeros(size, np.int32),
        "text": "", "finish": "stop",
    }  # fmt: skip
    took: list[float] = []
    for _ in range(50):
        began = time.perf_counter()
        Rollout(**values)
        took.append(time.perf_counter() - began)
    assert sorted(took)[len(took) // 2] < 2e-4  # measured: 1e-5


@pytest.mark.parametrize(
    ("made", "values", "key"),
    [
        (Rollout, fields(), "seed"),
        (Prompt, {"text": "?"}, "row"),
        (Prompt, {"text": "?"}, "epoch"),
    ],
)
def test_numbers_that_a_record_could_not_hold_are_refused_where_they_are_made(
    made: type[Message], values: Fields, key: str
) -> None:
    most = np.iinfo(np.int64).max
    assert getattr(made(**values, **{key: int(most)}), key) == most
    for wrong in (int(most) + 1, -1):
        with pytest.raises(ValidationError, match=f"{key}\n.*(less than 9223372036854775808|or equal to 0)"):
            made(**values, **{key: wrong})
