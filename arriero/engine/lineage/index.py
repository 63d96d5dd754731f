"""A record asked by SQL: the rows of its shards, and the tables that follow from them.

    chain segments -> shards (Parquet, verified) -> views of DuckDB

What is kept is derived, and never trusted further than its hashes reach; see `shards`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from pydantic import NonNegativeInt

from arriero.engine.errors import UserError
from arriero.engine.lineage.chain import ChainError
from arriero.engine.lineage.content import SALT_BYTES
from arriero.engine.lineage.reader import no_record, record_url
from arriero.engine.lineage.shards import Shard, ShardFile, Shards
from arriero.engine.lineage.spaces import Spaces
from arriero.engine.lineage.tables import RAW
from arriero.engine.lineage.views import NAMES, OVERVIEW, create, in_order
from arriero.schemas.lineage import Anchor, Place
from arriero.schemas.messages import Message

if TYPE_CHECKING:
    import pyarrow as pa


SAID = "id, number, text_part, text_start, text_size"  # of `rollouts`: whose texts lie where


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
    warnings: NonNegativeInt
    stops: NonNegativeInt
    resumes: NonNegativeInt


class Index:
    """The tables of the record at a URL, or of a run directory. ChainError or UserError if there is none."""

    def __init__(self, place: str) -> None:
        self.url = record_url(place)
        self._shards = Shards(self.url)
        self._duckdb: Any = import_module("duckdb")
        self._connection: Any = self._duckdb.connect()
        shards = [*self._shards.read()]
        if not shards or not shards[-1].about.after.entries:
            raise ChainError(no_record(self.url))
        self._fill(shards)
        create(self._connection)
        self.overview = self._overview([shard.about for shard in shards])
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
        found: pa.Table = self._connection.sql(in_order(name)).to_arrow_table()
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

    def arrow(self, query: str, values: Sequence[object] = ()) -> pa.Table:
        """The same as Arrow, where rows are many."""
        found: pa.Table = self._connection.sql(query, params=list(values)).to_arrow_table()
        return found

    def texts(self, rollouts: Sequence[str]) -> dict[str, Texts]:
        """What prompt and response of these rollouts say; a redacted one isn't among them."""
        query = f"select {SAID} from rollouts where id in (select unnest(?))"
        return dict(self.said(self.rows(query, [list(rollouts)])))

    def said(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Texts]]:
        """Id and texts of the rollouts whose columns `SAID` these are, in the order of their places."""
        spaces, stored = Spaces(self.url), itemgetter("text_part", "text_start", "text_size")
        for (part, start, size), group in groupby(sorted(rows, key=stored), key=stored):
            data = spaces.read("text", Place(part=part, start=start, size=size), "bytes")["bytes"].tobytes()
            if not any(data):
                continue
            said: dict[str, Any] = json.loads(data[SALT_BYTES:])
            prompt, responses, details = said["prompt"], said["responses"], said["details"]
            for row in group:
                k = row["number"]
                yield row["id"], Texts(
                    prompt=prompt["text"], answer=prompt["answer"], response=responses[k],
                    detail=details[k] if details else "",
                )  # fmt: skip

    # --- the rows -----------------------------------------------------------------------------------------

    def _fill(self, shards: Sequence[Shard]) -> None:
        """The rows of all shards as raw.events, raw.rollouts and raw.samples: read where they are kept."""
        arrow: Any = import_module("pyarrow")
        dataset: Any = import_module("pyarrow.dataset")
        self._connection.execute("create schema raw")
        for name in RAW:
            parts: list[str] = []
            kept = [s.about for s in shards if s.tables is None]
            held = [s.tables[name] for s in shards if s.tables is not None]
            if kept and self._shards.files.local:
                # Not as names of files in SQL, where *, ? and [ stand for others.
                paths = [self._shards.path(about, name) for about in kept]
                self._connection.register(f"kept_{name}", dataset.dataset(paths, format="parquet"))
                parts.append(f"select * from kept_{name}")
            else:
                held += [self._shards.table(about, name) for about in kept]
            if held:
                self._connection.register(f"held_{name}", arrow.concat_tables(held))
                parts.append(f"select * from held_{name}")
            kind = "table" if name == "events" else "view"
            self._connection.execute(f"create {kind} raw.{name} as {' union all '.join(parts)}")

    def _overview(self, shards: Sequence[ShardFile]) -> Overview:
        (counts,) = self.rows(OVERVIEW)
        versions = [row["version"] for row in self.rows("select version from numbered.steps order by entry")]
        states = [s.state for s in shards if s.state is not None]
        return Overview(
            anchor=shards[-1].after, state=states[-1] if states else "",
            versions=(*versions[:1], *versions[-1:]),
            broken=next((s.broken for s in shards if s.broken), ""), **counts,
        )  # fmt: skip

    def _shut(self) -> None:
        """A query may come from anywhere: it reads the tables, and no other file or address."""
        self._connection.execute("set enable_external_access = false")
        self._connection.execute("set lock_configuration = true")
