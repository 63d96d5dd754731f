"""Messages as bytes: exact for every class, and nothing that arrives can crash or deceive the reader."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arriero
from arriero.engine.codec import CodecError, decode, encode, schema_hash
from arriero.schemas.messages import Message, Prompt, Rollout, Sample, Weights
from tests.records import arrays, messages, rollouts, same
from tests.toys import rollout


@given(messages)
def test_every_message_comes_back_exactly(message: Message) -> None:
    found = decode(encode(message), type(message))
    assert type(found) is type(message)
    assert same(found, message)
    assert encode(found) == encode(message)


def test_every_class_of_message_has_a_strategy() -> None:
    import arriero.schemas.ledger as ledger
    import arriero.schemas.messages as records

    classes = {
        c
        for module in (ledger, records)
        for c in vars(module).values()
        if isinstance(c, type) and issubclass(c, Message) and c.__module__ == module.__name__
    }
    text = repr(messages)
    missing = {c.__name__ for c in classes if c.__name__ not in text} - {"Message", "Record"}
    drawn = {"Rollout", "Sample", "Batch"}  # by functions, which a strategy's name doesn't show
    assert missing <= drawn


@given(st.binary(max_size=200), st.sampled_from([Prompt, Rollout, Weights]))
def test_garbage_is_refused(data: bytes, kind: type[Message]) -> None:
    with pytest.raises(CodecError):
        decode(data, kind)


@given(messages, st.data())
def test_truncated_messages_are_refused(message: Message, data: st.DataObject) -> None:
    payload = encode(message)
    with pytest.raises(CodecError, match=f"are no {type(message).__name__}"):
        decode(payload[: data.draw(st.integers(0, len(payload) - 1))], type(message))


@given(messages, st.binary(min_size=1, max_size=20))
def test_messages_with_something_behind_them_are_refused(message: Message, more: bytes) -> None:
    with pytest.raises(CodecError, match="trailing"):
        decode(encode(message) + more, type(message))


@given(messages, st.data())
def test_damaged_messages_are_refused_or_valid(message: Message, data: st.DataObject) -> None:
    payload = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode(bytes(payload), type(message))
    except CodecError:
        return
    type(message)(**found.__dict__)  # all that passes is valid


FIELDS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=16)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)  # fmt: skip


@given(st.dictionaries(st.sampled_from([*Rollout.model_fields, "more"]), FIELDS))
def test_fields_of_any_kind_are_refused_or_valid(fields: dict[str, Any]) -> None:
    with pytest.raises(CodecError):
        decode(packed(Rollout, fields), Rollout)


def packed(kind: type[Message], fields: object) -> bytes:
    """A message of `kind` as any process could send it."""
    return msgspec.msgpack.encode((kind.__name__, schema_hash(kind), fields))


@pytest.mark.parametrize("code", [0, 6, 42, 127])
def test_unknown_array_codes_are_refused(code: int) -> None:
    with pytest.raises(CodecError, match=f"unknown array code {code}"):
        decode(packed(Rollout, {"tokens": msgspec.msgpack.Ext(code, b"1234")}), Rollout)


def test_an_array_that_is_cut_within_an_item_is_refused() -> None:
    with pytest.raises(CodecError, match="buffer size must be a multiple"):
        decode(packed(Rollout, {"tokens": msgspec.msgpack.Ext(1, b"12345")}), Rollout)


def test_endless_nesting_is_refused() -> None:
    for opening in (b"\x91", b"\x81\xa1a"):
        with pytest.raises(CodecError):
            decode(b"\x93\xa6Prompt\xa8" + schema_hash(Prompt).encode() + opening * 100_000, Prompt)


def test_a_header_that_promises_gigabytes_costs_nothing() -> None:
    for header in (b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01"):
        with pytest.raises(CodecError):
            decode(b"\x93" + header, Prompt)


def test_another_kind_of_message_is_named() -> None:
    with pytest.raises(CodecError) as caught:
        decode(encode(Weights(version=3)), Prompt)
    assert str(caught.value) == (
        f"Weights (schema {schema_hash(Weights)}) arrived where Prompt (schema {schema_hash(Prompt)}) is "
        "expected; all processes of a run need the same code"
    )


def test_another_schema_of_the_same_name_is_refused() -> None:
    class Prompt(Message):  # as of another version of the code
        text: str

    with pytest.raises(CodecError, match="all processes of a run need the same code"):
        decode(encode(Prompt(text="?")), globals()["Prompt"])


def test_the_schema_hash_covers_what_a_record_holds() -> None:
    class Inner(Message):
        a: int

    class Outer(Message):
        inner: Inner

    before = schema_hash(Outer)

    class Changed(Message):
        a: int
        b: int = 0

    namespace: dict[str, Any] = {"__annotations__": {"inner": Changed}, "__module__": __name__}
    assert schema_hash(type("Outer", (Message,), namespace)) != before


def test_arrays_keep_every_bit() -> None:
    odd = np.array([np.float32(-1e-45), np.float32(-0.0), np.finfo(np.float32).min], np.float32)
    made = Rollout(
        tokens=np.array([1, 2, 2**31 - 1], np.int32), mask=np.ones(3, np.bool_), logprobs=odd,
        versions=np.array([0, 1, 2**31 - 1], np.int32), text="\0ü\U0001f999", finish="stop",
    )  # fmt: skip
    found = decode(encode(made), Rollout)
    assert found.logprobs.tobytes() == odd.tobytes()
    assert found.text == made.text


@given(rollouts)
def test_decoded_arrays_are_views_of_the_message_and_cannot_be_written(made: Rollout) -> None:
    found = decode(encode(made), Rollout)
    for name in arrays_of(found):
        array = getattr(found, name)
        assert not array.flags.owndata
        with pytest.raises(ValueError, match="cannot set WRITEABLE flag to True"):
            array.flags.writeable = True


def test_a_message_in_memory_that_changes_later_is_copied() -> None:
    payload = bytearray(encode(rollout(3)))
    found = decode(memoryview(payload), Rollout)
    before = found.tokens.tolist()
    payload[:] = bytes(len(payload))
    assert found.tokens.tolist() == before


def arrays_of(message: Message) -> list[str]:
    return [name for name, value in message.__dict__.items() if isinstance(value, np.ndarray)]


@pytest.mark.parametrize(
    "metadata", [{"big": 2**64}, {"surrogate": "\ud800"}, {"deep": None}], ids=["integer", "text", "nesting"]
)
def test_what_cannot_travel_is_refused_when_it_is_sent(metadata: dict[str, Any]) -> None:
    if "deep" in metadata:
        for _ in range(10_000):
            metadata = {"deep": metadata}
        message = Prompt.model_construct(text="?", metadata=metadata)
    else:
        message = Prompt(text="?", metadata=metadata)
    with pytest.raises(CodecError, match="Prompt can't be encoded"):
        encode(message)


@pytest.mark.parametrize(
    "value", [np.zeros((2, 2), np.float32), np.zeros(2, np.complex64), object(), {1, 2j}]
)
def test_values_past_the_validation_are_refused_when_they_are_sent(value: object) -> None:
    message = Sample.model_construct(group="g", tokens=value)
    with pytest.raises(CodecError, match="Sample can't be encoded"):
        encode(message)


@given(arrays(), st.sampled_from([np.nan, np.inf, -np.inf]))
def test_a_missing_log_probability_does_not_travel(fields: dict[str, Any], missing: float) -> None:
    if not fields["mask"].any():
        return
    logprobs = fields["logprobs"].copy()
    logprobs[int(np.flatnonzero(fields["mask"])[0])] = missing
    unchecked = Rollout.model_construct(**fields | {"logprobs": logprobs}, text="", finish="stop")
    with pytest.raises(CodecError, match="missing is never zero"):
        decode(encode(unchecked), Rollout)


def test_nothing_in_the_package_unpickles() -> None:
    banned = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    for path in Path(arriero.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not banned & {name.partition(".")[0] for name in names}, path
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert isinstance(node.value, ast.Constant), path
                assert node.value.value is False, path
