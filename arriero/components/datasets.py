"""Rows of a data set: files at any fsspec URL, read whole (`formats`) or block by block (`blocks`).

A row keeps where it stands for error messages, and holds JSON values only. Every fault of the input raises
UserError in one line.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from arriero.components.blocks import ArrowBlocks, Blocks, Chain, LineBlocks, ParquetBlocks, Whole
from arriero.components.formats import BINARY, TEXT, Row
from arriero.components.gym_rows import GYM, check_gym_name
from arriero.engine.errors import UserError, one_line

FORMATS = (*TEXT, *BINARY)
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_LOOKED_AT = 64 << 20  # bytes of a file of which the first row can't be read alone
_IN_LINES = (".jsonl", ".ndjson")


def read_rows(path: str) -> list[Row]:
    """All rows of the file, or of all files of a pattern (`*`), in its order. Raises UserError."""
    rows: list[Row] = []
    for name in _files(path):
        kind = _format(name)
        with _reading(name), _opened(name, text=kind in TEXT) as file:
            rows += TEXT[kind](name, file) if kind in TEXT else BINARY[kind](name, file)
    if not rows:
        raise UserError(f"{path}: no rows; give a file that has some")
    return rows


def open_blocks(path: str, *, in_memory: bool) -> Blocks:
    """The rows as one block in memory; else, of which at most a few are there at once, the row groups of
    Parquet, the record batches of Arrow, or pieces of 4 MiB of JSONL. Raises UserError.
    """
    if in_memory:
        return Whole(read_rows(path))
    blocks = Chain([_blocks(name) for name in _files(path)])
    if not sum(blocks.sizes):
        raise UserError(f"{path}: no rows; give a file that has some")
    return blocks


def first_row(path: str) -> Row | None:
    """The first row, read without the others where the format allows it; None for one that is large as a
    whole, and for what isn't a local file. Raises UserError.
    """
    local = path.removeprefix("file://")
    if "://" in local or "::" in local:
        return None
    name = _files(path)[0]
    kind = _format(name)
    packed = name.lower().endswith(COMPRESSED)
    if kind not in _IN_LINES and (packed or Path(name.removeprefix("file://")).stat().st_size > _LOOKED_AT):
        return None
    with _reading(name), _opened(name, text=kind in TEXT) as file:
        rows = TEXT[kind](name, file) if kind in TEXT else BINARY[kind](name, file)
        return next(rows, None)


def path_problem(path: str) -> str | None:
    """What can be known to be wrong with `path` without reading data or going over a network."""
    try:
        if path.startswith(GYM):
            check_gym_name(path.removeprefix(GYM))
            return None
        _format(path)
        local = path.removeprefix("file://")
        if "://" not in local and "::" not in local:
            _files(local)
    except UserError as error:
        return str(error)
    return None


def _blocks(path: str) -> Blocks:
    kind = _format(path)
    if kind not in (*_IN_LINES, *BINARY) or path.partition("?")[0].lower().endswith(COMPRESSED):
        raise UserError(
            f"{path}: only JSONL that isn't compressed, Parquet and Arrow are read block by block; "
            "write it as one of these, or leave out stream"
        )
    with _reading(path):
        file = cast("IO[bytes]", _opened(path, text=False).open())  # stays open as long as the blocks do
        if kind in _IN_LINES:
            return LineBlocks(path, file, lambda: _reading(path))
        kept = ParquetBlocks if kind == ".parquet" else ArrowBlocks
        return kept(path, file, lambda: _reading(path))


@contextmanager
def _reading(path: str) -> Generator[None, None, None]:
    """What goes wrong while a file is read, as a UserError in one line."""
    try:
        yield
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


def _files(path: str) -> list[str]:
    """The files that a pattern stands for, sorted; a path without `*` is its own. Raises UserError."""
    if "*" not in path:
        local = path.removeprefix("file://")
        if "://" not in local and "::" not in local and not Path(local).is_file():
            raise UserError(_missing(path))
        return [path]
    import fsspec

    with _reading(path):
        system, pattern = cast("Any", fsspec).url_to_fs(path)
        found = sorted(str(name) for name in system.glob(pattern))
    if not found:
        raise UserError(f"{path}: no file has such a name")
    return [name if "://" not in path else str(system.unstrip_protocol(name)) for name in found]


def _missing(path: str) -> str:
    if "://" in path.removeprefix("file://"):
        # The clients of some stores say so too where they can't reach the server.
        return f"{path}: can't be read: there is no such file, or its server can't be reached"
    about = "" if Path(path).is_absolute() else f" in {Path.cwd()}"
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
