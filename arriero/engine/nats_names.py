"""What a run is called on the server, so that several runs can share one.

| thing      | stream             | subject                          |
|------------|--------------------|----------------------------------|
| edge       | `<run>-<edge>`     | `<run>.edge.<edge>`              |
| log        | `<run>-log-<log>`  | `<run>.log.<log>.<hash of id>`   |
| ends       | `<run>-ctl-ends`   | `<run>.end.<edge>.<replica>`     |
|            |                    | `<run>.end.<edge>.of<producers>` |
| heartbeats | `<run>-ctl-beats`  | `<run>.beat.<key, "-" as ".">`   |
| dead       | `<run>-ctl-dead`   | `<run>.dead`                     |
| hints      | none               | `<run>.settled.<edge>.<group>`   |
|            |                    | `<run>.ended.<edge>.<replica>`   |
| view       | none               | `<run>.view`                     |
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from arriero.engine.broker import BrokerError

_RUN = re.compile(r"[A-Za-z0-9_-]+")
_OTHER = re.compile(r"[^A-Za-z0-9_]")


def token(name: str) -> str:
    """`name` as one token of a subject or stream name: anything but letters, digits and `_` as `=XX`."""
    return _OTHER.sub(lambda m: "".join(f"={byte:02X}" for byte in m[0].encode()), name)


def from_token(text: str) -> str:
    """The name behind a token."""
    return bytes(re.sub(rb"=([0-9A-F]{2})", lambda m: bytes.fromhex(m[1].decode()), text.encode())).decode()


@dataclass(frozen=True)
class Names:
    """Names of one run's streams and subjects."""

    run: str

    def __post_init__(self) -> None:
        if not _RUN.fullmatch(self.run):
            raise BrokerError(f"run name {self.run!r}: only letters, digits, '-' and '_' are allowed")

    def edge_stream(self, edge: str) -> str:
        return f"{self.run}-{token(edge)}"

    def edge_subject(self, edge: str) -> str:
        return f"{self.run}.edge.{token(edge)}"

    def log_stream(self, log: str) -> str:
        return f"{self.run}-log-{token(log)}"

    def log_subject(self, log: str, id: str) -> str:
        """One subject per id, at most one message per subject: an id is appended once, for ever."""
        return f"{self.run}.log.{token(log)}.{hashlib.blake2b(id.encode(), digest_size=16).hexdigest()}"

    def log_subjects(self, log: str) -> str:
        return f"{self.run}.log.{token(log)}.*"

    @property
    def ends_stream(self) -> str:
        return f"{self.run}-ctl-ends"

    def end_subject(self, edge: str, what: str = "*") -> str:
        """`what`: the replica that has ended, or `of<producers>` that the edge is sealed."""
        return f"{self.run}.end.{token(edge)}.{what}"

    def ended_subject(self, edge: str, what: str = "*") -> str:
        return f"{self.run}.ended.{token(edge)}.{what}"

    @property
    def all_ends(self) -> str:
        return f"{self.run}.end.*.*"

    @property
    def beats_stream(self) -> str:
        return f"{self.run}-ctl-beats"

    def beat_subject(self, key: str | None = None) -> str:
        """A key is `<role>-<replica>-<rank>`: a role can be allowed its own subjects alone."""
        return f"{self.run}.beat.{'>' if key is None else '.'.join(map(token, key.split('-')))}"

    def beat_key(self, subject: str) -> str:
        """The key behind the subject of a heartbeat."""
        return "-".join(map(from_token, subject.split(".")[2:]))

    @property
    def view_subject(self) -> str:
        return f"{self.run}.view"

    @property
    def dead_stream(self) -> str:
        return f"{self.run}-ctl-dead"

    @property
    def dead_subject(self) -> str:
        return f"{self.run}.dead"

    def settled_subject(self, edge: str, group: str) -> str:
        return f"{self.run}.settled.{token(edge)}.{token(group)}"
