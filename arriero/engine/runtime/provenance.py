"""Which inputs an output was made from. A component rarely has to say: what it embeds, it came from."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from typing import TypeVar, cast

from arriero.schemas.messages import Record, Weights

R = TypeVar("R", bound=Record)


def parents_of(record: Record, taken: Collection[str], node: str) -> tuple[str, ...]:
    """Ids of the inputs behind `record`: as it names them, else the taken records that it embeds, else the
    only one taken. Raises ValueError if that leaves a doubt.

    An input that is given on, changed or not, still names its own parents: then it is the parent itself.
    """
    unknown = [p for p in record.parents if p not in taken]
    if record.id in taken and (unknown or not record.parents):
        return (record.id,)
    if record.parents:
        if unknown:
            raise ValueError(
                f"{node} gave a {type(record).__name__} that names {unknown[0]!r} as parent, which it hasn't"
            )
        return record.parents
    if embedded := tuple(dict.fromkeys(r.id for r in _embedded(record) if r.id in taken)):
        return embedded
    if len(taken) > 1:
        raise ValueError(
            f"{node} gave a {type(record).__name__} that names no parent while it holds {len(taken)} inputs; "
            "embed the input record in it or pass parents=(input.id, ...)"
        )
    return tuple(taken)


def check_kind(output: object, promised: type[Record], node: str) -> None:
    """TypeError unless an output is what its component's annotation promises; mypy may not have seen it."""
    if not isinstance(output, promised):
        kind = type(output).__name__
        raise TypeError(
            f"{node} gave {output!r:.80}, a {kind}; its run promises {promised.__name__} or Dropped"
        )


def check_place(output: Record, parents: tuple[str, ...], node: str, *, version: int) -> None:
    """ValueError for an output that comes from no input, and for a version that doesn't follow `version`.

    The first version of a loop comes from nothing.
    """
    if not isinstance(output, Weights):
        if not parents:
            raise ValueError(
                f"{node} gave a {type(output).__name__} that comes from no input it holds; if it gives "
                "several outputs for an input, let its rates() say produces=..."
            )
    elif parents and output.version != version + 1:
        raise ValueError(f"{node} gave version {output.version} after {version}; a batch makes one version")


def child_id(node: str, parents: tuple[str, ...], index: int) -> str:
    """Deterministic id: one parent extends its id, several are hashed; `index` counts their children."""
    suffix = f"#{index}" if index else ""
    if len(parents) == 1:
        return f"{parents[0]}>{node}{suffix}"
    digest = hashlib.blake2b("\n".join(parents).encode(), digest_size=8).hexdigest()
    return f"{node}-{digest}{suffix}"


def origins_of(parents: list[Record]) -> tuple[int, ...]:
    """Admission numbers behind the parents, ascending."""
    return tuple(sorted({k for p in parents for k in p.origins}))


def _embedded(record: Record) -> Iterator[Record]:
    for value in record.__dict__.values():
        if isinstance(value, Record):
            yield value
        elif isinstance(value, tuple):
            yield from (v for v in cast("tuple[object, ...]", value) if isinstance(v, Record))
