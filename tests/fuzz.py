"""Generated input for everything that reads what others wrote: it is read, or refused as the reader promises.

    python -m tests.fuzz [--seconds 3600] [--seed 0] [--only NAME]

Each target has examples that are right; what is tried are damaged ones (bytes changed, taken out, doubled;
values of JSON replaced, keys left out or added) and noise. Another error than those that a target names is a
finding, told with the input that shows it. `make fuzz` goes on for an hour, tests/test_fuzz.py for seconds.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz_targets import Target, targets

_ODD = [
    b"", b"\x00", b"\xff" * 8, b"[" * 5000, b'{"a":' * 5000, b"9" * 5000, b"1e999", b"NaN", b"-1", b"null",
    b'"', b"..", b"/", b"\n", b"\\ud800", b"\xed\xa0\x80", b"$ref", b"9223372036854775808",
    b"\xc9\xff\xff\xff\xff",
]  # fmt: skip
_LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6)
    | st.sampled_from(["", "../..", "NaN", "$ref", "os:system", "\u0000", "9" * 400])
)  # fmt: skip
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)


@st.composite
def damaged(draw: st.DrawFn, examples: Sequence[bytes]) -> bytes:
    """An example with some of its bytes changed, taken out, doubled or replaced."""
    data = bytearray(draw(st.sampled_from(examples)))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 40)))
        match draw(st.integers(0, 4)):
            case 0:
                data[start:end] = draw(st.binary(max_size=12))
            case 1:
                data[start:end] = b""
            case 2:
                data[start:start] = data[start:end]
            case 3:
                data[start:end] = draw(st.sampled_from(_ODD))
            case _:
                del data[start:]
    return bytes(data)


@st.composite
def rewritten(draw: st.DrawFn, examples: Sequence[bytes]) -> bytes:
    """An example of JSON, or of lines of it, with a value replaced, a key left out or one more."""
    lines = draw(st.sampled_from(examples)).splitlines()
    at = draw(st.integers(0, len(lines) - 1))
    lines[at] = json.dumps(_changed(draw, json.loads(lines[at]), 0)).encode()
    return b"\n".join(lines) + b"\n"


def _changed(draw: st.DrawFn, value: object, depth: int) -> object:
    if isinstance(value, dict) and value and (depth == 0 or draw(st.booleans())):
        fields = dict(cast("dict[str, object]", value))
        key = draw(st.sampled_from(sorted(fields)))
        match draw(st.integers(0, 3)):
            case 0:
                del fields[key]
            case 1:
                fields[draw(st.text(max_size=4))] = draw(_VALUES)
            case _:
                fields[key] = _changed(draw, fields[key], depth + 1)
        return fields
    if isinstance(value, list) and value and draw(st.booleans()):
        items = list(cast("list[object]", value))
        index = draw(st.integers(0, len(items) - 1))
        items[index] = _changed(draw, items[index], depth + 1)
        return items
    return draw(_VALUES)


def inputs(target: Target) -> st.SearchStrategy[bytes]:
    """What is tried on a target."""
    found = damaged(target.examples) | st.binary(max_size=64)
    if all(_is_json(line) for example in target.examples for line in example.splitlines()):
        found |= rewritten(target.examples)
    return found


def _is_json(text: bytes) -> bool:
    try:
        return isinstance(json.loads(text), dict | list)
    except ValueError:
        return False


@contextmanager
def _empty_folder() -> Generator[Path]:
    with tempfile.TemporaryDirectory(
        prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    ) as name:
        yield Path(name)


def tried(target: Target, examples: int, number: int) -> None:
    """Try what is right, then `examples` inputs, those of seed `number`.

    Raises the first error that isn't a refusal, with its input in a note.
    """

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        phases=(Phase.generate, Phase.shrink),
        print_blob=False,
    )
    @given(inputs(target))
    def reads_or_refuses(data: bytes) -> None:
        with _empty_folder() as folder:
            try:
                target.read(data, folder)
            except target.refusals:
                pass
            except BaseException as error:
                error.add_note(f"{target.name}: {data!r}")
                raise

    for example in target.examples:
        with _empty_folder() as folder:
            target.read(example, folder)
    reads_or_refuses()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    chosen = [t for t in targets() if args.only in t.name]
    logging.disable()
    counts = dict.fromkeys((t.name for t in chosen), 0)
    began, number, found = time.monotonic(), args.seed, 0
    while time.monotonic() - began < args.seconds and chosen:
        number += 1
        for target in list(chosen):
            try:
                tried(target, 300, number)
            except Exception as error:  # noqa: BLE001  # a finding
                print(
                    f"FOUND {type(error).__name__}: {error}",
                    *getattr(error, "__notes__", ()),
                    sep="\n",
                    flush=True,
                )
                found += 1
                chosen.remove(target)  # it would find the same again
            counts[target.name] += 300
    print("\n".join(f"{name}: {count}" for name, count in counts.items()))
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
