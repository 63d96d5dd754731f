"""Flat arrays at any fsspec URL, in zarr v3: `<space>/<part>/<array>`, appended to once per commit.

Every append begins a new chunk, and a chunk holds a whole append: what one commit wrote (a step, as a rule)
is read in one request per array. An append that is larger than the chunks of the current part begins the next
part, whose chunks are larger. What an append leaves of a chunk is zero: it compresses to nothing.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from arriero.engine.lineage.files import Files
from arriero.schemas.lineage import Place

Values = npt.NDArray[Any]
Arrays = Mapping[str, Values]

_LOADS = 48  # chunks kept by a reader: those of about six steps
_LEAST = 4096  # elements of a chunk
_LEVEL = 1  # of zstd: measured on recorded rollouts (`benchmarks/lineage.py compression`)


class Spaces:
    """All spaces of one record. What stands beyond `ends` (a commit that wasn't finished) is overwritten.

    Chunks and the length of an array are written here, not through zarr: that takes several milliseconds of
    hopping between threads for each array, ten times what the work takes. zarr makes the arrays, and reads.
    """

    def __init__(self, url: str, ends: Mapping[str, Place] | None = None) -> None:
        self._files = Files(url, "rollouts")
        self._url = url
        self._arrays: dict[str, Any] = {}
        self._metadata: dict[str, dict[str, Any]] = {}
        self._loads: OrderedDict[tuple[str, int], npt.NDArray[Any]] = OrderedDict()
        self.ends: dict[str, Place] = dict(ends or {})

    def append(self, space: str, arrays: Arrays) -> tuple[int, int]:
        """Write arrays [n, ...] of one length n at the end of `space`; the part and the start."""
        (size,) = {len(a) for a in arrays.values()}
        end = self.ends.get(space)
        chunk = self._chunk(f"{space}/{end.part}/{next(iter(arrays))}") if end is not None else 0
        if end is None or size > chunk:
            part, number = (0 if end is None else end.part + 1), 0
            chunk = max(_LEAST, 1 << (2 * size - 1).bit_length())
            self._make(f"{space}/{part}", chunk, arrays)
        else:
            part, number = end.part, -(-(end.start + end.size) // chunk)
        for name, values in arrays.items():
            self._put(f"{space}/{part}/{name}", number, chunk, values)
        self.ends[space] = Place(part=part, start=number * chunk, size=size)
        return part, number * chunk

    def hurry(self, bound_s: float) -> None:
        """As that of `Files`."""
        self._files.hurry(bound_s)

    def settle(self) -> None:
        """What was appended can be read, and lasts, whatever happens to the machine."""
        self._files.settle()

    def read(self, space: str, place: Place, *names: str) -> dict[str, npt.NDArray[Any]]:
        """The arrays `names` of `space` at `place`, read-only.

        Raises KeyError if they aren't there, ValueError for a chunk that is damaged.
        """
        found: dict[str, npt.NDArray[Any]] = {}
        for name in names:
            path = f"{space}/{place.part}/{name}"
            number, start = divmod(place.start, self._chunk(path))
            found[name] = self._loaded(path, number)[start : start + place.size]
        return found

    def rewrite(self, path: str, places: Iterable[Place], make: Callable[[Values], Values]) -> None:
        """Put `make` of what stands at places of one array in its place: each chunk is written once."""
        chunk = self._chunk(path)
        by_chunk: defaultdict[int, list[slice]] = defaultdict(list)
        for place in places:
            number, start = divmod(place.start, chunk)  # no append goes beyond its chunk
            by_chunk[number].append(slice(start, start + place.size))
        for number, pieces in by_chunk.items():
            whole = self._chunk_of(path, number).copy()
            for piece in pieces:
                whole[piece] = make(whole[piece])
            self._put(path, number, chunk, whole, grows=False)
        self._files.settle()
        self._loads.clear()

    def trim(self) -> None:
        """Remove what stands beyond `ends`: what an unfinished commit left, which no entry names."""
        for name in self._files.below():
            match name.split("/"):
                case [space, part, array, "c", number, *_] if not name.endswith(".part"):
                    end = self.ends.get(space)
                    last = (end.part, end.start // self._chunk(f"{space}/{part}/{array}")) if end else (-1, 0)
                    if (int(part), int(number)) > last:
                        self._files.remove(name)
                case _ if name.endswith(".part"):
                    self._files.remove(name)
                case _:
                    pass

    def _loaded(self, path: str, number: int) -> npt.NDArray[Any]:
        """A chunk: what one commit appended. The last few are kept: what is asked together lies together."""
        key = (path, number)
        if key not in self._loads:
            try:
                values = self._chunk_of(path, number)
            except RuntimeError as error:  # of a codec
                raise ValueError(f"chunk {number} of {path} can't be read: {error}") from error
            values.setflags(write=False)
            self._loads[key] = values
            if len(self._loads) > _LOADS:
                self._loads.popitem(last=False)
        self._loads.move_to_end(key)
        return self._loads[key]

    def _chunk_of(self, path: str, number: int) -> npt.NDArray[Any]:
        chunk, array = self._chunk(path), self._array(path)
        part = slice(number * chunk, (number + 1) * chunk)
        return self._files.patiently(f"give chunk {number} of {path}", lambda: np.asarray(array[part]))

    def _put(
        self, path: str, number: int, chunk: int, values: npt.NDArray[Any], *, grows: bool = True
    ) -> None:
        """Write chunk `number`, and if the array `grows` the length that it then has."""
        zstd: Any = import_module("numcodecs.zstd")
        padded = np.zeros((chunk, *values.shape[1:]), values.dtype)
        padded[: len(values)] = values
        nested = "/0" * (values.ndim - 1)
        self._files.stage(f"{path}/c/{number}{nested}", bytes(zstd.Zstd(level=_LEVEL).encode(padded)))
        if not grows:
            return
        metadata = self._described(path)
        metadata["shape"][0] = (number + 1) * chunk
        self._files.stage(f"{path}/zarr.json", json.dumps(metadata).encode())

    def _chunk(self, path: str) -> int:
        return int(self._described(path)["chunk_grid"]["configuration"]["chunk_shape"][0])

    def _described(self, path: str) -> dict[str, Any]:
        """Raises KeyError where there is no such array."""
        if path not in self._metadata:
            try:
                self._metadata[path] = json.loads(self._files.read(f"{path}/zarr.json"))
            except FileNotFoundError as error:
                raise KeyError(path) from error
        return self._metadata[path]

    def _array(self, path: str) -> Any:
        if path not in self._arrays:
            zarr: Any = import_module("zarr")
            self._arrays[path] = self._files.patiently(
                f"open {path}", lambda: zarr.open_array(self._store(), path=path, mode="r+")
            )
        return self._arrays[path]

    def _make(self, part: str, chunk: int, arrays: Arrays) -> None:
        self._files.patiently(f"make {part}", lambda: self._made(part, chunk, arrays))
        for name in arrays:
            self._metadata.pop(f"{part}/{name}", None)
            self._files.made(f"{part}/{name}")

    def _made(self, part: str, chunk: int, arrays: Arrays) -> None:
        zarr: Any = import_module("zarr")
        store = self._store()
        zarr.open_group(store, mode="a", zarr_format=3)
        zarr.create_group(store, path=part, overwrite=True, zarr_format=3)
        for name, values in arrays.items():
            zarr.create_array(
                store,
                name=f"{part}/{name}",
                shape=(0, *values.shape[1:]),
                chunks=(chunk, *values.shape[1:]),
                dtype=values.dtype,
                compressors={"name": "zstd", "configuration": {"level": _LEVEL, "checksum": False}},
                zarr_format=3,
                overwrite=True,
            )

    def _store(self) -> Any:
        storage: Any = import_module("zarr.storage")
        if self._files.local:
            return storage.LocalStore(self._files.root)
        return storage.FsspecStore.from_url(f"{self._url.rstrip('/')}/rollouts")
