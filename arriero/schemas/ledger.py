"""The ledger: one append-only log of what became of every prompt.

It balances: every admitted prompt ends trained, evaluated or dropped with a reason, or is in flight.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, FiniteFloat, NonNegativeInt, PositiveInt, TypeAdapter

from arriero.schemas.messages import DropReason, Message, Outcome, Split


class Admitted(Message):
    """A source record was let into the graph: training prompt number `origin` (from 0), or a held-out prompt.

    Held-out prompts have negative origins and take no place in the admission window. `source`: the prompt's
    data set.
    """

    kind: Literal["admitted"] = "admitted"
    id: str
    origin: int
    split: Split
    epoch: NonNegativeInt
    row: NonNegativeInt
    min_version: NonNegativeInt
    source: str = ""


class DroppedEvent(Message):
    """The prompts `origins` go no further: `node` dropped the record `parent` that came from them.

    `right_share`: of their rollouts, where it is known.
    """

    kind: Literal["dropped"] = "dropped"
    node: str
    parent: str
    origins: tuple[int, ...]
    reason: DropReason
    detail: str = ""
    right_share: float | None = None


class Trained(Message):
    """Version `version` was made from the prompts `origins`.

    Staleness is counted in versions: the version about to be replaced minus the one that sampled the token.
    `right_shares` goes with `origins`: the share of each prompt's rollouts that the reward found right.
    """

    kind: Literal["trained"] = "trained"
    node: str
    version: NonNegativeInt
    batch: str
    origins: tuple[int, ...]
    tokens: NonNegativeInt
    staleness_max: NonNegativeInt
    staleness_mean: FiniteFloat
    reward_mean: FiniteFloat
    right_shares: tuple[float, ...] = ()
    metrics: dict[str, float] = Field(default_factory=dict)


class Learned(Message):
    """A node before the trainer learned from `inputs`, as its step `version`, and gave `batch` for them.

    What becomes of the prompts `origins` the trainer says. The event follows the batch: where it stands, the
    batch is durable.
    """

    kind: Literal["learned"] = "learned"
    node: str
    version: PositiveInt
    batch: str
    inputs: tuple[str, ...]
    origins: tuple[int, ...]


class Evaluated(Message):
    """A held-out prompt came back: the scores of its samples. `version` sampled every token of them.

    `lengths`: tokens sampled, by sample; `truncated`: samples that ended at the limit; `source`: its data
    set.
    """

    kind: Literal["evaluated"] = "evaluated"
    id: str
    origin: int
    version: NonNegativeInt
    values: tuple[FiniteFloat, ...]
    outcomes: tuple[Outcome, ...]
    lengths: tuple[NonNegativeInt, ...] = ()
    truncated: NonNegativeInt = 0
    source: str = ""


class Unhealthy(Message):
    """Gate `gate` found a measure of a step of `node` beyond `bound`: it warned, or it ended the run.

    `version` is what the step made; of one that was stopped before, what it would have made. A measure that
    the gate compares with earlier steps is told as that ratio. `detail` is what the user was told.
    """

    kind: Literal["unhealthy"] = "unhealthy"
    node: str
    version: NonNegativeInt
    gate: str
    level: Literal["warn", "stop"]
    measure: str
    value: FiniteFloat
    bound: FiniteFloat
    detail: str = ""


class Started(Message):
    """A node that needs to know what was before it has begun to read: its history ends at this entry."""

    kind: Literal["started"] = "started"
    node: str
    replica: NonNegativeInt
    life: str


class Restarted(Message):
    """A process of the run was started again, the `number`-th time; `why` it had ended."""

    kind: Literal["restarted"] = "restarted"
    name: str
    number: PositiveInt
    why: str


class Scaled(Message):
    """Replicas of `role` joined, and others were told to leave; `id` is that of the request."""

    kind: Literal["scaled"] = "scaled"
    id: str
    role: str
    joined: tuple[NonNegativeInt, ...] = ()
    leaving: tuple[NonNegativeInt, ...] = ()
    number: PositiveInt
    """Of replicas that stay."""


class Resumed(Message):
    """The run goes on after all of it had ended, from these `versions` by trainer; the `number`-th time.

    `learned` is the same of what learns before them. What came after is undone: steps, and evaluations.
    Prompts that were under way are so again, unless `anew`: then they stay dropped. `changed` is what was
    allowed to differ, as `key: before -> now`. `scaled`: the replicas of roles to which `arriero scale` had
    given another number than the graph does.
    """

    kind: Literal["resumed"] = "resumed"
    number: PositiveInt
    versions: dict[str, NonNegativeInt]
    learned: dict[str, NonNegativeInt] = Field(default_factory=dict)
    scaled: dict[str, PositiveInt] = Field(default_factory=dict)
    anew: bool = False
    changed: tuple[str, ...] = ()
    why: str = ""


Step = Trained | Learned
Event = Annotated[
    Admitted
    | DroppedEvent
    | Trained
    | Unhealthy
    | Learned
    | Evaluated
    | Started
    | Restarted
    | Scaled
    | Resumed,
    Field(discriminator="kind"),
]
# A union doesn't take over the setting of its members: a metric that overflowed would be written as null.
EVENT: TypeAdapter[Event] = TypeAdapter(Event, config=ConfigDict(ser_json_inf_nan="strings"))


class Ended(Message):
    """Control: node `node`'s replica ended; `error` is empty if it did what it was to do.

    `user` is true when the error is one line for the user to mend rather than a fault with a traceback.
    `counts` are the node's named counters at its end, which no heartbeat may have told.
    """

    kind: Literal["ended"] = "ended"
    node: str
    replica: NonNegativeInt
    error: str = ""
    traceback: str = ""
    user: bool = False
    counts: dict[str, NonNegativeInt] = Field(default_factory=dict)


class Joined(Message):
    """Control: these replicas have come to those that the graph gives `role`. They are announced first."""

    kind: Literal["joined"] = "joined"
    role: str
    replicas: tuple[NonNegativeInt, ...]


class Leave(Message):
    """Control: replica `replica` of `role` takes nothing more, answers what it has, and ends."""

    kind: Literal["leave"] = "leave"
    role: str
    replica: NonNegativeInt


class Stop(Message):
    """Control: everybody leaves now; what is in flight stays untrained."""

    kind: Literal["stop"] = "stop"
    reason: str


Control = Annotated[Ended | Joined | Leave | Stop, Field(discriminator="kind")]
CONTROL: TypeAdapter[Control] = TypeAdapter(Control)

LEDGER_LOG = "ledger"
CONTROL_LOG = "control"


def lengths_log(node: str) -> str:
    """Name of the log in which a node that puts back notes how long responses were."""
    return f"lengths-{node}"


def loop_log(loop: str) -> str:
    """Name of the log that carries the versions of a loop."""
    return f"loop-{loop}"
