"""Items of reasoning-gym as rows, and its scorers, tried before they are trusted."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, cast, overload

from pydantic import JsonValue

from arriero.components.formats import JsonObject, Row, int64
from arriero.engine.errors import UserError, one_line

GYM = "reasoning_gym:"
GYM_SIZE = 1000


class GymDataset(Protocol):
    """What we use of a reasoning-gym data set. Item i is a function of its configuration and seed + i."""

    def __getitem__(self, idx: int) -> dict[str, Any]: ...
    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float: ...


def gym_dataset(name: str, options: Mapping[str, JsonValue], *, size: int) -> GymDataset:
    """Data set `name` with seed 0 unless the options set one (its own default is a random seed).

    Raises UserError for an unknown name, options it doesn't take, or if reasoning-gym isn't installed.
    """
    check_gym_name(name)
    import reasoning_gym

    create: Any = cast("Any", reasoning_gym).create_dataset  # its signature has no types
    try:
        found = create(name, **{"seed": 0, **options, "size": size})
    except Exception as error:  # its configurations raise whatever they like, AssertionError too
        raise UserError(f"{GYM}{name}: options {dict(options)} aren't taken: {one_line(error)}") from error
    return cast("GymDataset", found)


def check_gym_name(name: str) -> None:
    """Raises UserError if reasoning-gym isn't installed or has no data set of this name."""
    try:
        from reasoning_gym import factory
    except ImportError as error:
        raise UserError(
            f"{GYM}{name}: reasoning-gym isn't installed; pip install 'arriero[reasoning-gym]'"
        ) from error
    names: list[str] = sorted(cast("Any", factory).DATASETS)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        remedy = f"did you mean {GYM}{near[0]}?" if near else f"known: {', '.join(names[:8])}, ..."
        raise UserError(f"{GYM}{name}: no such data set in reasoning-gym; {remedy}")


class GymRows(Sequence[Row]):
    """Items of a reasoning-gym data set as rows, each made when it is asked for.

    `values` is the item (question, answer, metadata) with "dataset" and "options" added: all that its scorer
    needs, also in another process.
    """

    def __init__(self, name: str, options: Mapping[str, JsonValue], size: int) -> None:
        self._name, self._options, self._size = name, dict(options), size
        self._dataset = gym_dataset(name, options, size=size)

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self._row(i) for i in range(self._size)[index]]
        return self._row(range(self._size)[index])

    def _row(self, index: int) -> Row:
        # Through JSON at once: a scorer in this process sees what one behind an edge sees.
        # What JSON has no form for (a Fraction) becomes text; no scorer reads it.
        text = json.dumps(self._dataset[index], default=str)
        try:
            item: JsonObject = json.loads(text, parse_int=int64)
        except ValueError as error:
            raise UserError(f"{GYM}{self._name}, item {index}: {error}") from error
        values: JsonObject = {**item, "dataset": self._name, "options": self._options}
        return Row(where=f"{GYM}{self._name}, item {index}", values=values)


JUNK = ("", "banana")


@dataclass(frozen=True, kw_only=True)
class GymScorer:
    """The data set's own scorer, tried before it is trusted."""

    dataset: GymDataset
    tuples: bool

    def __call__(self, answer: str, entry: JsonObject) -> float:
        """The scorer's own number, usually in [0, 1]. Raises what it raises."""
        return float(self.dataset.score_answer(answer, _tupled(entry) if self.tuples else entry))


@lru_cache(maxsize=64)
def gym_scorer(name: str, options_json: str, *, trials: int = 3) -> GymScorer:
    """A scorer for entries that came through JSON; the first items of the data set are the trial.

    JSON turns tuples into lists, and some scorers compare with ==: the form is taken in which the data set's
    own answers earn full marks (those without an answer have nothing to try). Raises UserError for a data set
    that pays full marks for junk, or none for its own answer in either form.
    """
    dataset = gym_dataset(name, json.loads(options_json), size=trials)
    entries = [row.values for row in GymRows(name, json.loads(options_json), trials)]
    for tuples in (False, True):
        scorer = GymScorer(dataset=dataset, tuples=tuples)
        golds = [(str(e["answer"]), e) for e in entries if e.get("answer") is not None]
        if all(_score(scorer, gold, e) >= 1.0 for gold, e in golds):
            break
    else:
        raise UserError(f"{GYM}{name}: its scorer gives its own answer no full marks; use a function reward")
    for junk in JUNK:
        if any(_score(scorer, junk, e) >= 1.0 and junk != e.get("answer") for e in entries):
            raise UserError(f"{GYM}{name}: its scorer gives {junk!r} full marks; use a function reward")
    return scorer


def _score(scorer: GymScorer, answer: str, entry: JsonObject) -> float:
    try:
        return scorer(answer, entry)
    except Exception:  # noqa: BLE001  # a scorer that raises on a trial has paid nothing
        return 0.0


def _tupled(value: JsonValue) -> Any:
    if isinstance(value, list):
        return tuple(_tupled(v) for v in value)
    if isinstance(value, dict):
        return {k: _tupled(v) for k, v in value.items()}
    return value
