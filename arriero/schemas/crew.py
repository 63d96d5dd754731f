"""What the replicas of a run on a cluster and the hub that conducts it say to each other.

Reports go to the log CREW_LOG, which the hub reads; orders to ORDERS_LOG, which every replica reads. A
replica is known by its `name`, "<role>-<replica>", and "<role>-<replica>.<host>" on further hosts of one with
many ranks. A `life` begins when its agent starts; orders are for one life.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, TypeAdapter

from arriero.schemas.messages import Message

CREW_LOG, ORDERS_LOG = "crew", "orders"


class Arrived(Message):
    """The agent of a replica is there and starts its process, unless one of this name has arrived before."""

    kind: Literal["arrived"] = "arrived"
    name: str
    life: str
    host: str


class Asks(Message):
    """The agent of a later submission is there and would join as one more replica of `role`."""

    kind: Literal["asks"] = "asks"
    role: str
    life: str
    host: str


class Leaving(Message):
    """The scheduler takes the agent of a replica that has joined away: it is to leave in order."""

    kind: Literal["leaving"] = "leaving"
    name: str
    life: str


class Left(Message):
    """The process of a replica ended with `code` (negative: by a signal); `said` is the end of its output."""

    kind: Literal["left"] = "left"
    name: str
    life: str
    code: int
    said: str = ""


class Order(Message):
    """To the agent of this life, or to all where it is empty: start the process again, kill it, or leave."""

    kind: Literal["order"] = "order"
    what: Literal["start", "kill", "leave"]
    life: str = ""


class Welcome(Message):
    """To an agent that asked: the number of its replica, or `why` it can't join."""

    kind: Literal["welcome"] = "welcome"
    life: str
    replica: NonNegativeInt | None = None
    why: str = ""


class Meeting(Message):
    """Where the ranks of a role that runs on several hosts meet: an address of its first host."""

    kind: Literal["meeting"] = "meeting"
    role: str
    host: str
    port: int


Report = Arrived | Asks | Leaving | Left
REPORT: TypeAdapter[Report] = TypeAdapter(Annotated[Report, Field(discriminator="kind")])
AnyOrder = Order | Welcome | Meeting
ORDER: TypeAdapter[AnyOrder] = TypeAdapter(Annotated[AnyOrder, Field(discriminator="kind")])


def replica_name(role: str, replica: int, host: int) -> str:
    return f"{role}-{replica}" + (f".{host}" if host else "")


def joined_line(name: str) -> str:
    """What the agent of a replica that has joined prints, by which the output of `name` is found."""
    return f"arriero: joined as {name}"
