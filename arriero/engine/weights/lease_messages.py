"""What receivers and source ranks say to each other beside the bytes: requests, each with one answer."""

import hmac
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TypeAlias

import msgspec

from arriero.engine.weights.layout import SenderGone, WeightError

MAX_MESSAGE_BYTES = 256 << 20  # a manifest of a very large model has some MB
HANDSHAKE_S = 10.0


class Join(msgspec.Struct, tag=True, frozen=True):
    """First request."""

    name: str


class Newest(msgspec.Struct, tag=True, frozen=True):
    """Ask for a version beyond `after`, up to `wait_s`."""

    after: int
    wait_s: float


class Take(msgspec.Struct, tag=True, frozen=True):
    """Lease a version."""

    session: str
    version: int


class Send(msgspec.Struct, tag=True, frozen=True):
    """Send these (offset, length) of the leased part, by a transport whose sources send."""

    spans: list[tuple[int, int]]


class Release(msgspec.Struct, tag=True, frozen=True):
    """End the lease."""


class Report(msgspec.Struct, tag=True, frozen=True):
    """What came of a version."""

    version: int
    error: str


class Leave(msgspec.Struct, tag=True, frozen=True):
    """Last request."""


class Welcome(msgspec.Struct, tag=True, frozen=True):
    session: str
    plan: bytes
    addresses: list[tuple[str, int]]  # of all source ranks
    extra: bytes  # the transport's own


class Found(msgspec.Struct, tag=True, frozen=True):
    manifest: bytes  # empty: none


class Granted(msgspec.Struct, tag=True, frozen=True):
    slot: int


class Refused(msgspec.Struct, tag=True, frozen=True):
    error: str
    stale: bool = False


class Done(msgspec.Struct, tag=True, frozen=True):
    valid: bool = True  # the lease was held to its end


Request: TypeAlias = Join | Newest | Take | Send | Release | Report | Leave
Answer: TypeAlias = Welcome | Found | Granted | Refused | Done

_encode = msgspec.msgpack.Encoder().encode
_requests = msgspec.msgpack.Decoder(Request)
_answers = msgspec.msgpack.Decoder(Answer)

Link: TypeAlias = "Connection[bytes, bytes]"


def send(link: Link, message: Request | Answer) -> None:
    link.send_bytes(_encode(message))


def receive_request(link: Link) -> Request:
    return _requests.decode(link.recv_bytes(MAX_MESSAGE_BYTES))


def receive_answer(link: Link) -> Answer:
    return _answers.decode(link.recv_bytes(MAX_MESSAGE_BYTES))


def prove(link: Link, secret: bytes, *, first: bool) -> None:
    """Both ends prove that they know the run's secret, without sending it; WeightError if the other doesn't.

    Challenge and response by HMAC-SHA256, each over both nonces and the side that answers.
    """
    import secrets

    mine = secrets.token_bytes(32)
    link.send_bytes(mine)
    theirs = _within(link)
    sides = (b"server", b"client") if first else (b"client", b"server")
    nonces: Sequence[bytes] = (mine, theirs) if first else (theirs, mine)
    link.send_bytes(hmac.digest(secret, sides[0] + b"".join(nonces), "sha256"))
    if not hmac.compare_digest(_within(link), hmac.digest(secret, sides[1] + b"".join(nonces), "sha256")):
        raise WeightError("the other end of the weight plane doesn't know the secret of this run")


def _within(link: Link) -> bytes:
    if not link.poll(HANDSHAKE_S):
        raise SenderGone(f"no answer within {HANDSHAKE_S:.0f} s")
    return link.recv_bytes(64)
