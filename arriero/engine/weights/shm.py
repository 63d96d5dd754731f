"""A file in /dev/shm with a header, a lease table and the slots, mapped by a sender and its receivers.

    words 0-7      magic, slots, bytes of a slot, segment id (2), digest of the plan (2), newest slot + 1
    words 8-263    32 slots x (sequence, version, closed, fingerprint (2))
    word 264       bytes of the plan
    words 320-     128 receivers x (leased slot + 1, version, since, pid, length of the name, name (11),
                   joined, last version tried + 1, length of the error, error (45))
    then           the slots, each at a page boundary, and the plan that the senders pack by

All header fields are 64-bit words, stored and loaded whole. Only the sender writes slots, each lease is
written by its one holder. A lease entry counts as long as its byte lock is held (see `locks`).

A slot's sequence is odd while it is written (a seqlock): a reader that sees another sequence after its copy
was overtaken. Order between processes comes from the manifest, which travels after the data; the sequence
detects overtaking, and what it could miss on a weakly ordered machine the fingerprints find.
"""

import mmap
import os
import re
import stat
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

import numpy as np

from arriero.engine.locks import is_locked, try_lock
from arriero.engine.weights.copying import Bytes
from arriero.engine.weights.layout import WeightError
from arriero.engine.weights.transport import Outcome

FOLDER = Path("/dev/shm")
MAX_SLOTS, MAX_RECEIVERS, MAX_NAME_BYTES = 32, 128, 88
_MAGIC = int.from_bytes(b"arrwght4", sys.byteorder)
_NUM_SLOTS, _SLOT_BYTES, _ID, _LAYOUT, _NEWEST = 1, 2, 3, 5, 7
_SLOTS, _SLOT_WORDS, _PLAN_BYTES = 8, 8, 264
_LEASES, _LEASE_WORDS = 320, 64
_JOINED, _TRIED, _ERROR, _ERROR_BYTES = 16, 17, 18, 8 * 45  # words of an entry
_HEADER_BYTES = -(-(_LEASES + MAX_RECEIVERS * _LEASE_WORDS) * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
_OWNER_BYTE = 0


@dataclass(frozen=True)
class SlotState:
    """What the header says of a slot; `closed`: no new lease, its sender waits to overwrite it."""

    sequence: int
    version: int
    closed: bool
    fingerprint: str

    @property
    def written(self) -> bool:
        return self.sequence > 0 and self.sequence % 2 == 0


@dataclass(frozen=True)
class Lease:
    """A living receiver that reads a slot since `since_ns` (CLOCK_MONOTONIC)."""

    receiver: str
    pid: int
    since_ns: int


class Segment:
    """One mapped file. `create` is the sender's way in, `open` the receivers'."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self._fd = path, fd
        self._claimed: int | None = None
        size = os.fstat(fd).st_size
        if size < _HEADER_BYTES:
            raise WeightError(f"{path} has {size} bytes: it holds no weights")
        # Page tables are filled now: a fault per page would slow the first copy ninefold.
        self._map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._words = memoryview(self._map)[:_HEADER_BYTES].cast("Q")
        self._data: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.num_slots, self.slot_bytes = self._words[_NUM_SLOTS], self._words[_SLOT_BYTES]
        plan_at, plan_bytes = (
            _HEADER_BYTES + self.num_slots * _pages(self.slot_bytes),
            self._words[_PLAN_BYTES],
        )
        if self._words[0] != _MAGIC or size != plan_at + plan_bytes:
            raise WeightError(f"{path} is no weight segment of this version of arriero")
        self.id, self.layout = self._hex(_ID), self._hex(_LAYOUT)
        self.plan = bytes(self._data[plan_at : plan_at + plan_bytes])

    @classmethod
    def create(cls, url: str, layout: str, slots: int, slot_bytes: int, plan: bytes) -> "Segment":
        """The sender's segment: that of a dead predecessor if its layout is the same, else a new one.

        `plan` is for the receivers; `layout`, its digest, says whether they can use what they know.

        Raises WeightError if a living sender has it, OSError (ENOSPC) if /dev/shm is too small.
        """
        path = path_of(url)
        if path.exists():
            old = cls.open(url)
            if not try_lock(old._fd, _OWNER_BYTE):
                old.close()
                raise WeightError(f"{url} belongs to another sender that is alive")
            if (old.layout, old.num_slots, old.slot_bytes) == (layout, slots, slot_bytes):
                return old
            old.close()
        fresh = path.with_name(f"{path.name}.{token_hex(8)}")
        fd = os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            # Reserves the pages: with ftruncate alone a full /dev/shm would kill us with SIGBUS later.
            plan_at = _HEADER_BYTES + slots * _pages(slot_bytes)
            os.posix_fallocate(fd, 0, plan_at + len(plan))
            os.pwrite(fd, plan, plan_at)
            header = np.zeros(_PLAN_BYTES + 1, dtype=np.uint64)
            header[:3] = _MAGIC, slots, slot_bytes
            header[_PLAN_BYTES] = len(plan)
            header[_ID : _ID + 2] = np.frombuffer(bytes.fromhex(token_hex(16)), dtype=np.uint64)
            header[_LAYOUT : _LAYOUT + 2] = np.frombuffer(bytes.fromhex(layout), dtype=np.uint64)
            os.pwrite(fd, header.tobytes(), 0)
            try_lock(fd, _OWNER_BYTE)
            # Receivers find it whole or not at all; those that map the old file keep it.
            fresh.rename(path)
        except BaseException:
            os.close(fd)
            fresh.unlink()
            raise
        return cls(path, fd)

    @classmethod
    def open(cls, url: str) -> "Segment":
        """Map an existing segment; WeightError if there is none, or if it is another user's."""
        path = path_of(url)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise WeightError(f"no weights at {url}: {error.strerror}") from error
        try:
            status = os.fstat(fd)
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o600:
                raise WeightError(f"{path} is not this user's own, private file")
            return cls(path, fd)
        except BaseException:
            os.close(fd)
            raise

    def replaced(self) -> bool:
        """Whether another file stands at our path: a sender with another layout, or another run."""
        try:
            return not os.path.samestat(os.fstat(self._fd), self.path.stat())
        except OSError:
            return True

    def slot(self, index: int, offset: int, nbytes: int) -> Bytes:
        """Bytes of a slot; nothing is copied."""
        start = _HEADER_BYTES + index * _pages(self.slot_bytes) + offset
        return self._data[start : start + nbytes]

    def state(self, slot: int) -> SlotState:
        at = _SLOTS + slot * _SLOT_WORDS
        return SlotState(self._words[at], self._words[at + 1], bool(self._words[at + 2]), self._hex(at + 3))

    def close_slot(self, slot: int) -> None:
        """No new leases from now on."""
        self._words[_SLOTS + slot * _SLOT_WORDS + 2] = 1

    def begin(self, slot: int) -> None:
        """The slot is being written: whoever still reads it is overtaken."""
        at = _SLOTS + slot * _SLOT_WORDS
        self._words[at] += 1 + self._words[at] % 2

    def commit(self, slot: int, version: int, fingerprint: str) -> None:
        """The slot holds this version, complete."""
        at = _SLOTS + slot * _SLOT_WORDS
        self._words[at + 1] = version
        for word, value in enumerate(np.frombuffer(bytes.fromhex(fingerprint), dtype=np.uint64)):
            self._words[at + 3 + word] = int(value)
        self._words[at + 2] = 0
        self._words[at] += 1
        self._words[_NEWEST] = slot + 1

    def newest(self) -> int | None:
        """The slot that was committed last."""
        return self._words[_NEWEST] - 1 if self._words[_NEWEST] else None

    def claim(self, receiver: str) -> int:
        """An entry of the lease table, for as long as this segment is open; if none is free, it is closed."""
        name = receiver.encode()
        entries = [(entry, _LEASES + entry * _LEASE_WORDS) for entry in range(MAX_RECEIVERS)]
        # The entry of another one that died tells the sender so: it goes last.
        for entry, at in sorted(
            entries, key=lambda e: bool(self._words[e[1] + _JOINED]) and self._text(e[1] + 4) != receiver
        ):
            if try_lock(self._fd, at * 8):
                self._words[at] = self._words[at + _TRIED] = self._words[at + _ERROR] = 0
                self._words[at + 3] = os.getpid()
                self._write_text(at + 4, name)
                self._words[at + _JOINED] = 1
                self._claimed = at
                return entry
        self.close()
        raise WeightError(f"{receiver}: {self.path.name} has {MAX_RECEIVERS} receivers already")

    @contextmanager
    def leased(self, entry: int, slot: int, version: int) -> Generator[SlotState, None, None]:
        """The state of a slot whose sender waits for this reader, within its bound."""
        at = _LEASES + entry * _LEASE_WORDS
        self._words[at + 1], self._words[at + 2] = version, time.monotonic_ns()
        self._words[at] = slot + 1
        try:
            yield self.state(slot)
        finally:
            self._words[at] = 0

    def readers(self, slot: int) -> list[Lease]:
        """Living receivers that hold a lease on the version that is in this slot."""
        version = self.state(slot).version
        found: list[Lease] = []
        for at in range(_LEASES, _LEASES + MAX_RECEIVERS * _LEASE_WORDS, _LEASE_WORDS):
            if (
                self._words[at] != slot + 1
                or self._words[at + 1] != version
                or not is_locked(self._fd, at * 8)
            ):
                continue
            found.append(Lease(self._text(at + 4), self._words[at + 3], self._words[at + 2]))
        return found

    def tried(self, entry: int, version: int, error: str = "") -> None:
        """What came of a receiver's last version; `error` is cut to its place."""
        at = _LEASES + entry * _LEASE_WORDS
        self._write_text(at + _ERROR, error.encode()[:_ERROR_BYTES])
        self._words[at + _TRIED] = version + 1

    def outcomes(self) -> dict[str, Outcome]:
        """Of all receivers that have joined and not left; of two with one name, the living one's."""
        found: dict[str, Outcome] = {}
        for at in range(_LEASES, _LEASES + MAX_RECEIVERS * _LEASE_WORDS, _LEASE_WORDS):
            if not self._words[at + _JOINED]:
                continue
            name, gone = self._text(at + 4), not (at == self._claimed or is_locked(self._fd, at * 8))
            if name not in found or not gone:
                found[name] = Outcome(self._words[at + _TRIED] - 1, self._text(at + _ERROR), gone)
        return found

    def close(self) -> None:
        """Unmap, and give back locks and leases. The file stays: see `destroy`."""
        if self._fd < 0:
            return
        if self._claimed is not None:
            self._words[self._claimed + _JOINED] = 0
        os.close(self._fd)
        self._fd = -1
        self._words.release()
        self._data = np.empty(0, dtype=np.uint8)
        with suppress(BufferError):  # a traceback may still show a part of it; unmapped with the last one
            self._map.close()

    def _text(self, at: int) -> str:
        return bytes(self._data[(at + 1) * 8 : (at + 1) * 8 + self._words[at]]).decode(errors="replace")

    def _write_text(self, at: int, text: bytes) -> None:
        self._words[at] = len(text)
        self._data[(at + 1) * 8 : (at + 1) * 8 + len(text)] = np.frombuffer(text, dtype=np.uint8)

    def _hex(self, at: int) -> str:
        return np.array([self._words[at], self._words[at + 1]], dtype=np.uint64).tobytes().hex()


def path_of(url: str) -> Path:
    """File of shm://<name>; WeightError if the name isn't one plain file name."""
    if sys.platform != "linux":
        raise WeightError(f"{url}: the shared-memory transport needs Linux")
    if not re.fullmatch(r"shm://[A-Za-z0-9][A-Za-z0-9._-]{0,149}", url):
        raise WeightError(f"{url!r} is no shm://<name> with letters, digits, '.', '_' and '-'")
    return FOLDER / ("arriero-" + url.removeprefix("shm://"))


def destroy(url: str) -> None:
    """Remove a segment's file, also one that its sender has left half made; nothing if there is none.

    The run's owner does this at its end; processes that map it keep their memory until they close it.
    """
    path = path_of(url)
    for file in (path, *FOLDER.glob(path.name + ".????????????????")):
        file.unlink(missing_ok=True)


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
