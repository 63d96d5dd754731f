"""Flat arrays at any fsspec URL, in zarr v3: `<space>/<part>/<array>`, appended to once per commit.

Every append begins a new chunk, and a chunk holds a whole append: what one commit wrote (a step, as a rule)
is read in one request per array. An append that is larger than the chunks of the current part begins the next
part, whose chunks are larger. What an append leaves of a chunk is zero: it compresses to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from arriero.engine.lineage.files import Files
from arriero.schemas.lineage import Place

Arrays = Mapping[str, npt.NDArray[Any]]

_LEAST = 4096  # elements of a chunk
# Measured on recorded rollouts (`benchmarks/lineage.py compression`).
_LEVEL = 1


class Spaces:
    """All spaces of one record. What stands beyond `ends` (a commit that wasn't finished) is overwritten."""

    def __init__(self, url: str, ends: Mapping[str, Place] | None = None) -> None:
        self._zarr: Any = import_module("zarr")
        self._store = _store(url)
        self._arrays: dict[tuple[str, int, str], Any] = {}
        self.ends: dict[str, Place] = dict(ends or {})
        self._chunk: dict[str, int] = {}
        self._names: dict[str, tuple[str, ...]] = {}

    def append(self, space: str, arrays: Arrays) -> tuple[int, int]:
        """Write arrays [n, ...] of one length n at the end of `space`; the part and the start."""
        (size,) = {len(a) for a in arrays.values()}
        end = self.ends.get(space)
        if end is None or size > self._chunk_of(space, end.part, next(iter(arrays))):
            part, start = (0 if end is None else end.part + 1), 0
            self._make(space, part, max(_LEAST, 1 << (2 * size - 1).bit_length()), arrays)
        else:
            chunk = self._chunk[space]
            part, start = end.part, -(-(end.start + end.size) // chunk) * chunk
        chunk = self._chunk[space]
        for name, values in arrays.items():
            array = self._array(space, part, name)
            padded = np.zeros((chunk, *values.shape[1:]), values.dtype)
            padded[:size] = values
            array.resize((start + chunk, *array.shape[1:]))
            array[start : start + chunk] = padded
        self.ends[space] = Place(part=part, start=start, size=size)
        return part, start

    def read(self, space: str, place: Place, *names: str) -> dict[str, npt.NDArray[Any]]:
        """The arrays `names` of `space` at `place`, read-only. Raises KeyError if they aren't there."""
        found: dict[str, npt.NDArray[Any]] = {}
        for name in names:
            values = np.asarray(self._array(space, place.part, name)[place.start : place.start + place.size])
            values.setflags(write=False)
            found[name] = values
        return found

    def overwrite(self, space: str, place: Place, arrays: Arrays) -> None:
        """Put other values where some stand: for redaction."""
        for name, values in arrays.items():
            self._array(space, place.part, name)[place.start : place.start + place.size] = values

    def _chunk_of(self, space: str, part: int, name: str) -> int:
        if space not in self._chunk:
            self._chunk[space] = int(self._array(space, part, name).chunks[0])
        return self._chunk[space]

    def _array(self, space: str, part: int, name: str) -> Any:
        key = (space, part, name)
        if key not in self._arrays:
            try:
                self._arrays[key] = self._zarr.open_array(
                    self._store, path=f"{space}/{part}/{name}", mode="r+"
                )
            except FileNotFoundError as error:
                raise KeyError(f"{space}/{part}/{name}") from error
        return self._arrays[key]

    def _make(self, space: str, part: int, chunk: int, arrays: Arrays) -> None:
        zarr = self._zarr
        if not self.ends and not self._arrays:
            zarr.open_group(self._store, mode="a", zarr_format=3)
        zarr.create_group(self._store, path=f"{space}/{part}", overwrite=True, zarr_format=3)
        self._chunk[space] = chunk
        for name, values in arrays.items():
            self._arrays[space, part, name] = zarr.create_array(
                self._store,
                name=f"{space}/{part}/{name}",
                shape=(0, *values.shape[1:]),
                chunks=(chunk, *values.shape[1:]),
                dtype=values.dtype,
                compressors={"name": "zstd", "configuration": {"level": _LEVEL, "checksum": False}},
                zarr_format=3,
                overwrite=True,
            )


def _store(url: str) -> Any:
    storage: Any = import_module("zarr.storage")
    files = Files(url, "rollouts")
    return (
        storage.LocalStore(files.root)
        if files.local
        else storage.FsspecStore.from_url(f"{url.rstrip('/')}/rollouts")
    )
