"""Rows of a data set: a file at any fsspec URL (`formats`), or a generator of reasoning-gym by name.

A row is read once, keeps where it stands for error messages, and holds JSON values only. Every fault of the
input raises UserError in one line.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, cast, overload

import numpy as np
import numpy.typing as npt
from pydantic import JsonValue

from arriero.components.formats import BINARY, TEXT, JsonObject, int64
from arriero.engine.errors import UserError, one_line

GYM = "reasoning_gym:"
GYM_SIZE = 1000
FORMATS = (*TEXT, *BINARY)
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row; `where` is `file:line` for a person."""

    where: str
    values: JsonObject

    def text(self, field: str, setting: str) -> str:
        """The text or number in `field`, as text; `setting` is what names the field. Raises UserError."""
        if field not in self.values:
            has = ", ".join(repr(name) for name in list(self.values)[:12]) or "nothing"
            near = difflib.get_close_matches(field, self.values, n=1)
            remedy = f"did you mean {setting}={near[0]!r}?" if near else f"set {setting} to one of these"
            raise UserError(f"{self.where}: no field {field!r}; the row has {has}; {remedy}")
        value = self.values[field]
        if isinstance(value, str):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            kind = "null" if value is None else type(value).__name__
            raise UserError(
                f"{self.where}: field {field!r} is {kind}; text or a number is needed ({setting})"
            )
        return str(value)


def permutation(seed: int, epoch: int, size: int) -> npt.NDArray[np.int64]:
    """Order [size] of the rows in `epoch`, a pure function of its arguments.

    Sorted raw draws: numpy keeps the stream of a bit generator for ever, but not that of its distributions
    (NEP 19), so `Generator.permutation` could reorder a recorded run under a newer numpy.
    """
    draws = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(size)
    return np.argsort(draws, kind="stable")


def read_rows(path: str) -> list[Row]:
    """All rows of the file, in its order. Raises UserError; see the module."""
    kind = _format(path)
    try:
        with _opened(path, text=kind in TEXT) as file:
            placed = TEXT[kind](path, file) if kind in TEXT else BINARY[kind](path, file)
            rows = [Row(where=where, values=values) for where, values in placed]
    except FileNotFoundError as error:
        raise UserError(_missing(path)) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text; write the file as UTF-8") from error
    except (OSError, ImportError, EOFError) as error:
        raise UserError(f"{path}: can't be read: {one_line(error)}") from error
    except Exception as error:
        if isinstance(error, UserError) or "://" not in path:
            raise
        # A client of some store: whatever it raises where it can't reach that.
        raise UserError(f"{path}: can't be read: {type(error).__name__}: {one_line(error)}") from error
    if not rows:
        raise UserError(f"{path}: no rows")
    return rows


def path_problem(path: str) -> str | None:
    """What can be known to be wrong with `path` without reading data or going over a network."""
    try:
        if path.startswith(GYM):
            _gym_names(path.removeprefix(GYM))
            return None
        _format(path)
    except UserError as error:
        return str(error)
    local = path.removeprefix("file://")
    return None if "://" in local or "::" in local or Path(local).is_file() else _missing(path)


def _missing(path: str) -> str:
    about = "" if "://" in path or Path(path).is_absolute() else f" in {Path.cwd()}"
    return f"{path}: no such file{about}; give a path, a URL or {GYM}NAME"


def _format(path: str) -> str:
    name = path.partition("?")[0].lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    for ending in FORMATS:
        if name.endswith(ending):
            return ending
    raise UserError(
        f"{path}: the name must end in {', '.join(FORMATS)} (or be {GYM}NAME); other formats aren't read"
    )


def _opened(path: str, *, text: bool) -> Any:
    import fsspec

    opened: Any = cast("Any", fsspec).open  # its signature has no types
    try:
        if text:
            return opened(path, "rt", compression="infer", encoding="utf-8-sig")
        return opened(path, "rb")
    except (ValueError, ImportError) as error:
        raise UserError(f"{path}: can't be opened: {one_line(error)}") from error


class GymDataset(Protocol):
    """What we use of a reasoning-gym data set. Item i is a function of its configuration and seed + i."""

    def __getitem__(self, idx: int) -> dict[str, Any]: ...
    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float: ...


def gym_dataset(name: str, options: Mapping[str, JsonValue], *, size: int) -> GymDataset:
    """Data set `name` with seed 0 unless the options set one (its own default is a random seed).

    Raises UserError for an unknown name, options it doesn't take, or if reasoning-gym isn't installed.
    """
    _gym_names(name)
    import reasoning_gym

    create: Any = cast("Any", reasoning_gym).create_dataset  # its signature has no types
    try:
        found = create(name, **{"seed": 0, **options, "size": size})
    except Exception as error:  # its configurations raise whatever they like, AssertionError too
        raise UserError(f"{GYM}{name}: options {dict(options)} aren't taken: {one_line(error)}") from error
    return cast("GymDataset", found)


def _gym_names(name: str) -> None:
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
