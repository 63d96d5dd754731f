"""The tables of a record as Parquet beside it, so that a large one answers at once.

    chain segments -> Lineage -> tables -> index/*.parquet, index/index.json

The index is derived and never trusted further than its hashes reach: `index.json` names every segment of the
chain and every file of the index with its SHA-256. If one of them is otherwise, all is made anew. Where it
can't be written, the tables are made each time.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pydantic import NonNegativeInt, ValidationError

from arriero.engine.errors import UserError
from arriero.engine.lineage.content import SALT_BYTES
from arriero.engine.lineage.files import Files
from arriero.engine.lineage.reader import Lineage, record_url
from arriero.engine.lineage.spaces import Spaces
from arriero.engine.lineage.tables import NAMES, table, whole_groups
from arriero.schemas.ledger import Restarted, Resumed
from arriero.schemas.lineage import Anchor, Digest, Place
from arriero.schemas.messages import Message

if TYPE_CHECKING:
    import pyarrow as pa

_ABOUT = "index.json"


class Texts(Message):
    """Of one rollout; `detail` is what its reward said about it."""

    prompt: str
    answer: str
    response: str
    detail: str


class Overview(Message):
    """What a record holds in all; `state` is empty while it isn't closed."""

    anchor: Anchor
    state: str
    steps: NonNegativeInt
    versions: tuple[int, ...]
    rollouts: NonNegativeInt
    groups: NonNegativeInt
    admitted: NonNegativeInt
    dropped: NonNegativeInt
    evaluated: NonNegativeInt
    redacted: NonNegativeInt
    broken: str = ""
    restarts: NonNegativeInt
    resumes: NonNegativeInt


class IndexFile(Message):
    """`index.json`: hashes of what the index is made from, and of what it is made of."""

    format: int
    segments: dict[str, Digest]
    files: dict[str, Digest]
    overview: Overview


_FORMAT = 5  # of the tables: one more whenever a column changes


class Index:
    """The tables of the record at a URL, or of a run directory. ChainError or UserError if there is none."""

    def __init__(self, place: str) -> None:
        self.url = record_url(place)
        self._files = Files(self.url, "index")
        self._duckdb: Any = import_module("duckdb")
        self._connection: Any = self._duckdb.connect()
        segments = self._segments()
        known = self._known(segments)
        self.overview = known.overview if known is not None else self._make(segments)
        self._shut()

    def rows(self, query: str, values: Sequence[object] = ()) -> list[dict[str, Any]]:
        """The rows of a query of ours with `?` for each of `values`."""
        found: Any = self._connection.execute(query, list(values))
        names = [column[0] for column in found.description]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]

    def table(self, name: str) -> pa.Table:
        """One of the tables, as Arrow. Raises KeyError for another name."""
        if name not in NAMES:
            raise KeyError(name)
        found: pa.Table = self._connection.sql(f"select * from {name}").to_arrow_table()
        return found

    def sql(self, query: str) -> pa.Table:
        """The result of any query over the tables. Raises UserError for one that fails."""
        try:
            if (relation := self._connection.sql(query)) is None:
                raise UserError(f"{query!r} has no result; ask with select")
            found: pa.Table = relation.to_arrow_table()
        except self._duckdb.Error as error:
            raise UserError(f"{error}; the tables are {', '.join(NAMES)}") from error
        return found

    def texts(self, rollouts: Sequence[str]) -> dict[str, Texts]:
        """What prompt and response of these rollouts say; a redacted one isn't among them."""
        spaces, found = Spaces(self.url), dict[str, Texts]()
        query = (
            "select id, number, text_part as part, text_start as start, text_size as size from rollouts "
            "where id in (select unnest(?)) order by text_part, text_start"
        )
        for row in self.rows(query, [list(rollouts)]):
            place = Place(part=row["part"], start=row["start"], size=row["size"])
            data = spaces.read("text", place, "bytes")["bytes"].tobytes()
            if any(data):
                said: dict[str, Any] = json.loads(data[SALT_BYTES:])
                found[row["id"]] = Texts(
                    prompt=said["prompt"]["text"], answer=said["prompt"]["answer"],
                    response=said["responses"][row["number"]],
                    detail=(said["details"] or {row["number"]: ""})[row["number"]],
                )  # fmt: skip
        return found

    # --- the files ----------------------------------------------------------------------------------------

    def _shut(self) -> None:
        """A query may come from anywhere: it reads the tables, and no other file or address."""
        paths = [f"{self._files.root}/{name}.parquet" for name in NAMES]
        quoted = ", ".join("'" + path.replace("'", "''") + "'" for path in paths)
        self._connection.execute(f"set allowed_paths = [{quoted}]")
        self._connection.execute("set enable_external_access = false")
        self._connection.execute("set lock_configuration = true")

    def _segments(self) -> dict[str, str]:
        chain = Files(self.url, "chain")
        return {name: _sha256(chain.read(name)) for name in chain.names(".jsonl")}

    def _known(self, segments: Mapping[str, str]) -> IndexFile | None:
        """What the index says of itself, if it is whole and of these segments; its tables are then there."""
        try:
            about = IndexFile.model_validate_json(self._files.read(_ABOUT))
            if about.format != _FORMAT or about.segments != segments or {*about.files} != {*NAMES}:
                return None
            for name, digest in about.files.items():
                data = self._files.read(f"{name}.parquet")
                if _sha256(data) != digest:
                    return None
                self._register(name, data)
        except (OSError, ValidationError):
            return None
        return about

    def _register(self, name: str, data: bytes) -> None:
        if self._files.local:
            path = f"{self._files.root}/{name}.parquet".replace("'", "''")
            self._connection.execute(f"create view {name} as select * from read_parquet('{path}')")
        else:
            parquet: Any = import_module("pyarrow.parquet")
            self._connection.register(name, parquet.read_table(io.BytesIO(data)))

    def _make(self, segments: dict[str, str]) -> Overview:
        record = Lineage(self.url)
        overview = _overview(record)
        parquet: Any = import_module("pyarrow.parquet")
        self._connection = self._duckdb.connect()  # with no view of an index that is stale
        files: dict[str, bytes] = {}
        for name in NAMES:
            made = table(record, name)
            self._connection.register(name, made)
            sink = io.BytesIO()
            parquet.write_table(made, sink, compression="zstd")
            files[name] = sink.getvalue()
        if self._segments() == segments:  # else the run went on meanwhile
            self._keep(segments, files, overview)
        return overview

    def _keep(self, segments: dict[str, str], files: Mapping[str, bytes], overview: Overview) -> None:
        """Write it down; `index.json` last, so that what a kill leaves is never taken for an index."""
        digests = {name: _sha256(data) for name, data in files.items()}
        about = IndexFile(format=_FORMAT, segments=segments, files=digests, overview=overview)
        with suppress(OSError):  # nobody may write there: the tables are in memory all the same
            for name, data in files.items():
                self._files.write(f"{name}.parquet", data)
            self._files.write(_ABOUT, about.model_dump_json(indent=1).encode())


def _overview(record: Lineage) -> Overview:
    return Overview(
        anchor=record.anchor, state=record.closed.state if record.closed else "", steps=len(record.steps),
        versions=tuple(s.version for s in (*record.steps[:1], *record.steps[-1:])),
        rollouts=sum(len(g.lengths) for g in whole_groups(record)),
        groups=sum(1 for _ in whole_groups(record)), broken=record.broken,
        admitted=len(record.admitted), dropped=len(record.dropped), evaluated=len(record.evaluated),
        redacted=len(record.redacted), restarts=sum(isinstance(e, Restarted) for e in record.events),
        resumes=sum(isinstance(e, Resumed) for e in record.events),
    )  # fmt: skip


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
