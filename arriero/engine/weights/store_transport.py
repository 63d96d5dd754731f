"""Sharded weights by an object store: any URL that fsspec knows, between sites that share nothing else.

    <url>/newest.json                     the manifest of the newest version, written last
    <url>/<session>/plan                  how the source ranks pack
    <url>/<session>/<version>/<rank>      the cells that a source rank packs, one object each
    <url>/<session>/readers/<name>.json   a receiver: the version it reads, the last it tried, what came of it

An object store knows no locks and no deaths, so a version is kept as long as a receiver that says it reads it
may do so by its bound, and a receiver that dies is one that does not answer.
"""

# pyright: reportUnknownMemberType=false
# Nothing of fsspec is annotated.

import json
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from secrets import token_hex
from typing import Protocol, cast
from urllib.parse import quote, unquote

import fsspec
import numpy as np

from arriero.engine.weights.copying import Bytes
from arriero.engine.weights.layout import StaleWeights, WeightError
from arriero.engine.weights.plan import Plan
from arriero.engine.weights.ranks import OneRank, Ranks, first_says
from arriero.engine.weights.ring import KEPT, SlotRing
from arriero.engine.weights.transport import Outcome, Span, batches, lease_timeout
from arriero.schemas.weights import WeightManifest

_POLL_S = 0.05


class _Files(Protocol):
    """A file system of fsspec, as far as we use it."""

    def pipe_file(self, path: str, value: object) -> None: ...
    def cat_file(self, path: str) -> bytes: ...
    def cat_ranges(
        self, paths: list[str], starts: list[int], ends: list[int], *, on_error: str
    ) -> list[bytes | Exception]: ...
    def ls(self, path: str, detail: bool = True) -> list[str]: ...
    def rm(self, path: str, recursive: bool = False) -> None: ...
    def mv(self, path1: str, path2: str) -> None: ...
    def makedirs(self, path: str, exist_ok: bool = False) -> None: ...
    def invalidate_cache(self) -> None: ...


class _Store:
    """The objects under one URL."""

    def __init__(self, url: str) -> None:
        files, root = cast("tuple[_Files, str]", fsspec.core.url_to_fs(url))  # it is not annotated
        self.files, self.root = files, root.rstrip("/")
        # A write in place could be read half done; object stores show a write whole or not at all.
        self._in_place = url.startswith(("file:", "/", "local:"))

    def write(self, path: str, data: bytes | memoryview) -> None:
        target = f"{self.root}/{path}"
        self.files.makedirs(target.rpartition("/")[0], exist_ok=True)
        if self._in_place:
            fresh = f"{target}.{token_hex(8)}"
            self.files.pipe_file(fresh, data)
            self.files.mv(fresh, target)
        else:
            self.files.pipe_file(target, bytes(data))

    def read(self, path: str) -> bytes | None:
        """The bytes; None if there is no such object."""
        with suppress(FileNotFoundError):
            return self.files.cat_file(f"{self.root}/{path}")
        return None

    def read_spans(self, path: str, spans: Sequence[Span]) -> list[bytes | Exception]:
        """The bytes of each span of an object; an asynchronous file system reads them at the same time."""
        starts = [span.offset for span in spans]
        ends = [span.offset + span.nbytes for span in spans]
        return self.files.cat_ranges([f"{self.root}/{path}"] * len(spans), starts, ends, on_error="return")

    def names(self, path: str) -> list[str]:
        self.files.invalidate_cache()
        with suppress(FileNotFoundError):
            listed = self.files.ls(f"{self.root}/{path}", detail=False)
            return [name.rstrip("/").rpartition("/")[2] for name in listed]
        return []

    def remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self.files.rm(f"{self.root}/{path}", recursive=True)


class StoreOutlet:
    """A source rank's end. `url` is a folder of its own; the newest `slots` versions stay in it,
    and of every `keep_every`-th the newest two."""

    def __init__(
        self,
        url: str,
        plan: Plan,
        ranks: Ranks | None = None,
        *,
        slots: int = 2,
        keep_every: int = 0,
        lease_timeout_s: float | None = None,
    ) -> None:
        self._ring, self._num_slots = SlotRing(slots, keep_every), slots
        self.url, self._store, self._ranks = url, _Store(url), ranks or OneRank()
        self.session = first_says(self._ranks, lambda: self._begin(plan)).decode()
        self.overtaken: tuple[str, ...] = ()
        self._part: Bytes = np.ones(max(plan.part_bytes(self._ranks.rank), 1), dtype=np.uint8)
        total = sum(plan.part_bytes(rank) for rank in range(plan.num_sources))
        self._lease_timeout_s = lease_timeout(total, lease_timeout_s)
        self._kept: list[int] = []
        before = self._store.read("newest.json")
        self._before = "" if before is None else WeightManifest.model_validate_json(before).session

    def _begin(self, plan: Plan) -> bytes:
        session = token_hex(16)
        self._store.write(f"{session}/plan", plan.encode())
        return session.encode()

    def begin(self, version: int) -> tuple[int, Bytes]:
        """Object stores have room: nobody is waited for, old versions go when nobody reads them."""
        return 0, self._part

    def announce(self, manifest: WeightManifest) -> None:
        # The first rank comes last: when it writes the manifest, all parts are there.
        self._store.write(f"{self.session}/{manifest.version}/{self._ranks.rank}", self._part.data)
        if self._ranks.rank:
            return
        self._store.write("newest.json", manifest.model_dump_json().encode())
        self._kept.append(manifest.version)
        self._collect()
        if self._before:
            self._store.remove(self._before)  # what a predecessor had left
            self._before = ""

    def outcomes(self) -> Mapping[str, Outcome]:
        return {
            name: Outcome(int(state["tried"]), str(state["error"])) for name, state in self._readers().items()
        }

    def close(self) -> None:
        """The objects stay: the run's owner removes the folder."""

    def _collect(self) -> None:
        """Remove all but the newest versions, the kept ones, and those that somebody reads in time."""
        newest = [*self._kept[-self._num_slots :], *[v for v in self._kept if self._ring.keeps(v)][-KEPT:]]
        old = [v for v in self._kept if v not in newest]
        reading: dict[int, list[str]] = {}
        late: list[str] = []
        for name, state in self._readers().items():
            version = int(state["reading"])
            if version >= 0 and time.time() - float(state["since"]) < self._lease_timeout_s:
                reading.setdefault(version, []).append(name)
            elif version in old:
                late.append(name)
        for version in old:
            if version not in reading:
                self._kept.remove(version)
                self._store.remove(f"{self.session}/{version}")
        self.overtaken = tuple(sorted(late))

    def _readers(self) -> dict[str, dict[str, str | int | float]]:
        found: dict[str, dict[str, str | int | float]] = {}
        for name in self._store.names(f"{self.session}/readers"):
            said = self._store.read(f"{self.session}/readers/{name}") if name.endswith(".json") else None
            if said is not None:
                found[unquote(name.removesuffix(".json"))] = json.loads(said)
        return found


class StoreInlet:
    """A receiver rank's end. `name` is what the sender calls it, e.g. generator-0/1."""

    stable = carried = False

    def __init__(self, url: str, name: str) -> None:
        self._store, self._name = _Store(url), name
        self._session = ""
        self._plan: tuple[str, Plan] | None = None
        self._state: dict[str, str | int | float] = {"reading": -1, "since": 0.0, "tried": -1, "error": ""}

    def newest(self, after: int = -1, wait_s: float = 0.0) -> WeightManifest | None:
        until = time.monotonic() + wait_s
        while True:
            said = self._store.read("newest.json")
            manifest = WeightManifest.model_validate_json(said) if said is not None else None
            if manifest is not None:
                self._join(manifest.session)
                if manifest.version > after:
                    return manifest
            if time.monotonic() >= until:
                return None
            time.sleep(_POLL_S)  # object stores notify nobody

    def plan(self, session: str) -> Plan:
        if self._plan is None or self._plan[0] != session:
            said = self._store.read(f"{session}/plan")
            if said is None:
                raise WeightError(f"{self._name}: no plan for session {session}: it is of another run")
            self._plan = session, Plan.decode(said)
        return self._plan[1]

    @contextmanager
    def lease(self, manifest: WeightManifest, spans: Sequence[Span]) -> Generator[None, None, None]:
        self._join(manifest.session)
        self._say(reading=manifest.version, since=time.time())
        try:
            yield
        finally:
            self._say(reading=-1)

    def fetch(self, manifest: WeightManifest, spans: Sequence[Span]) -> Generator[Bytes, None, None]:
        for batch in batches(spans):
            path = f"{manifest.session}/{manifest.version}/{batch[0].source}"
            for span, data in zip(batch, self._store.read_spans(path, batch), strict=True):
                if isinstance(data, FileNotFoundError):
                    raise StaleWeights(f"{self._name}: version {manifest.version} is no longer there")
                if isinstance(data, Exception):
                    raise WeightError(f"{path}: {type(data).__name__}: {data}") from data
                if len(data) != span.nbytes:
                    raise WeightError(f"{path} ends at {span.offset + len(data)}, the manifest says later")
                yield np.frombuffer(data, dtype=np.uint8)

    def report(self, version: int, error: str) -> None:
        self._say(tried=version, error=error)

    def close(self) -> None:
        if self._session:
            self._store.remove(self._path())

    def _join(self, session: str) -> None:
        if session != self._session:
            self._session = session
            self._say(reading=-1, tried=-1, error="")

    def _say(self, **change: str | int | float) -> None:
        self._state.update(change)
        self._store.write(self._path(), json.dumps(self._state).encode())

    def _path(self) -> str:
        return f"{self._session}/readers/{quote(self._name, safe='')}.json"
