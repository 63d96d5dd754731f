"""Rows out of files: JSONL, JSON, CSV, Parquet, Arrow. Each row knows where it stands, for a person."""

from __future__ import annotations

import csv
import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

from pydantic import JsonValue
from pydantic_core import to_jsonable_python

from arriero.engine.errors import UserError, one_line

JsonObject = dict[str, JsonValue]
_MOST_FIELD = 1 << 24  # characters of one CSV field


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row; `where` is `file:line` for a person."""

    where: str
    values: JsonObject

    def text(self, field: str, setting: str) -> str:
        """The text or number in `field`, as text; `setting` is what names the field. Raises UserError."""
        value = self.value(field, setting)
        if isinstance(value, str):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            kind = "null" if value is None else type(value).__name__
            raise UserError(
                f"{self.where}: field {field!r} is {kind}; text or a number is needed ({setting})"
            )
        return str(value)

    def value(self, field: str, setting: str) -> JsonValue:
        """What is in `field`; as above."""
        if field not in self.values:
            has = ", ".join(repr(name) for name in list(self.values)[:12]) or "nothing"
            near = difflib.get_close_matches(field, self.values, n=1)
            remedy = f"did you mean {setting}={near[0]!r}?" if near else f"set {setting} to one of these"
            raise UserError(f"{self.where}: no field {field!r}; the row has {has}; {remedy}")
        return self.values[field]


def json_lines(path: str, file: IO[str]) -> Iterator[Row]:
    """One object per line; empty lines are skipped."""
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield json_row(f"{path}:{number}", line)


def json_file(path: str, file: IO[str]) -> Iterator[Row]:
    """A list of objects, or an object with exactly one list of objects in it."""
    found = _parsed(path, file.read())
    if isinstance(found, dict):
        lists = {k: v for k, v in found.items() if isinstance(v, list) and v and isinstance(v[0], dict)}
        if len(lists) != 1:
            raise UserError(
                f"{path}: an object with {len(lists)} lists of objects ({', '.join(lists) or 'none'}); "
                "a list of objects is needed, or one that holds a single one"
            )
        (found,) = lists.values()
    if not isinstance(found, list):
        raise UserError(f"{path}: a {type(found).__name__} where a list of objects is needed")
    for number, row in enumerate(found, start=1):
        yield Row(where=f"{path}, row {number}", values=_object(f"{path}, row {number}", row))


def delimited(path: str, file: IO[str], *, delimiter: str) -> Iterator[Row]:
    """Rows under a header, as RFC 4180 quotes them; every value is text."""
    csv.field_size_limit(_MOST_FIELD)
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    try:
        header = next(reader, list[str]())
        if len(set(header)) < len(header) or "" in header:
            raise UserError(f"{path}:1: names of columns must be there and differ, not {header}")
        for values in reader:
            if values and len(values) != len(header):
                raise UserError(
                    f"{path}:{reader.line_num}: {len(values)} fields where the header has {len(header)}"
                )
            if values:
                yield Row(where=f"{path}:{reader.line_num}", values=dict(zip(header, values, strict=True)))
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}: no CSV: {error}") from error


def parquet(path: str, file: IO[bytes]) -> Iterator[Row]:
    """The rows of a Parquet file."""
    yield from table_rows(path, lambda: parquet_file(path, file).read())


def arrow(path: str, file: IO[bytes]) -> Iterator[Row]:
    """The rows of an Arrow file (Feather version 2), or of a saved Arrow stream."""
    yield from table_rows(path, lambda: arrow_file(path, file).read_all())


def parquet_file(path: str, file: IO[bytes]) -> Any:
    """A reader of row groups. Raises UserError for another kind of file."""
    import pyarrow as pa
    from pyarrow import parquet as library

    try:
        return cast("Any", library).ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise UserError(f"{path}: not a file of Parquet: {one_line(error)}") from error


def arrow_file(path: str, file: IO[bytes]) -> Any:
    """A reader of record batches; of a stream it has no `num_record_batches`. Raises UserError as above."""
    import pyarrow as pa
    from pyarrow import ipc

    library: Any = ipc  # its signatures have unknown types
    start = file.read(6)
    file.seek(0)
    try:
        return library.open_file(file) if start == b"ARROW1" else library.open_stream(file)
    except pa.ArrowInvalid as error:
        raise UserError(f"{path}: not a file of Arrow: {one_line(error)}") from error


def table_rows(path: str, read: Callable[[], Any], *, first: int = 0) -> Iterator[Row]:
    """The rows of what `read` gives, a table or a batch, counted from `first`. Raises UserError."""
    import pyarrow as pa

    try:
        records = cast("list[dict[str, object]]", read().to_pylist())
    except pa.ArrowInvalid as error:
        raise UserError(f"{path}: broken: {one_line(error)}") from error
    for number, record in enumerate(records, start=first + 1):
        values = cast("JsonObject", to_jsonable_python(record, bytes_mode="base64"))
        yield Row(where=f"{path}, row {number}", values=values)


def json_row(where: str, text: str) -> Row:
    """One line of JSONL. Raises UserError."""
    return Row(where=where, values=_object(where, _parsed(where, text)))


def json_lists(value: object) -> object:
    """`value` with lists for tuples: a graph's JSON comes back with tuples, which a JsonValue refuses."""
    if isinstance(value, Mapping):
        return {k: json_lists(v) for k, v in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list | tuple):
        return [json_lists(v) for v in cast("Sequence[object]", value)]
    return value


def int64(digits: str) -> int:
    """The number. ValueError if it doesn't fit in the 64 bits that a message holds."""
    number = int(digits) if len(digits) <= 20 else 1 << 63  # longer ones aren't worth the parsing
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"{digits[:24]} has more than 64 bits; write the number as text, in quotes")
    return number


TEXT: Mapping[str, Callable[[str, IO[str]], Iterator[Row]]] = {
    ".jsonl": json_lines,
    ".ndjson": json_lines,
    ".json": json_file,
    ".csv": lambda path, file: delimited(path, file, delimiter=","),
    ".tsv": lambda path, file: delimited(path, file, delimiter="\t"),
}
BINARY: Mapping[str, Callable[[str, IO[bytes]], Iterator[Row]]] = {
    ".parquet": parquet,
    ".arrow": arrow,
    ".feather": arrow,
}


def _parsed(where: str, text: str) -> JsonValue:
    try:
        found: JsonValue = json.loads(text, parse_int=int64)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: invalid JSON at column {error.colno}: {error.msg}") from error
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error
    except RecursionError:
        raise UserError(f"{where}: JSON that is nested too deeply; make it flatter") from None
    return found


def _object(where: str, value: JsonValue) -> JsonObject:
    if not isinstance(value, dict):
        raise UserError(f"{where}: a {type(value).__name__} where a JSON object is needed")
    return value
