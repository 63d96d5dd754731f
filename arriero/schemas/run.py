"""Options of a run, what its replicas report while it goes on, and what is left when it is over."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from arriero.schemas.evaluation import EvaluationReport
from arriero.schemas.lineage import Anchor
from arriero.schemas.messages import Message

SinkName = Literal["tensorboard", "wandb", "mlflow"]


class RunOptions(Message):
    """How a graph is run, apart from the graph. Written to the run directory, read by every role.

    `wait_bound_s` bounds every wait for a record, a place or a version; `liveness_s` the age of a heartbeat.
    `claims_url`: where the hosts of a cluster find payloads too large for an edge; empty: memory of one host.
    `metrics_port`: where Prometheus finds the run; None: nowhere.
    `elastic`: replicas may join and leave while it goes on (`arriero scale`). `hubs`: message brokers that
    replicate each other; of three, any one may be lost.
    """

    run_id: str
    seed: NonNegativeInt = 0
    deterministic: bool = False
    wait_bound_s: PositiveFloat = 1800.0
    liveness_s: PositiveFloat = 30.0
    heartbeat_s: PositiveFloat = 1.0
    lease_s: PositiveFloat = 30.0
    max_deliveries: PositiveInt = 3
    max_dead_letters: NonNegativeInt = 0
    restarts: NonNegativeInt = 3
    threads: dict[str, PositiveInt] = Field(default_factory=dict)
    record: bool = False
    record_url: str = ""
    claims_url: str = ""
    sinks: tuple[SinkName, ...] = ("tensorboard",)
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    metrics_host: str = "127.0.0.1"
    elastic: bool = False
    hubs: Literal[1, 3] = 1


class NodeStatus(Message):
    """What a node does now and has done so far; times in seconds of the replica's clock.

    `waits_for` is empty while it works. `tokens` counts sampled (generator) or trained (trainer) tokens.
    Of a node that works on single records: the most `at_once`, and the last (origin, seconds from taking to
    answering it, without what held the node up).
    """

    node: str
    waits_for: str = ""
    waits_s: NonNegativeFloat = 0.0
    busy_s: NonNegativeFloat = 0.0
    idle_s: NonNegativeFloat = 0.0
    taken: NonNegativeInt = 0
    given: NonNegativeInt = 0
    tokens: NonNegativeInt = 0
    ended: bool = False
    counts: dict[str, NonNegativeInt] = Field(default_factory=dict)
    at_once: NonNegativeInt = 0
    took: tuple[tuple[int, NonNegativeFloat], ...] = ()


class RoleStatus(Message):
    """Heartbeat of one replica (and rank) of a role."""

    role: str
    replica: NonNegativeInt
    rank: NonNegativeInt = 0
    pid: PositiveInt
    host: str
    lag_s: NonNegativeFloat = 0.0
    nodes: tuple[NodeStatus, ...]


class LastPulse(Message):
    """A replica's last heartbeat, and its age when it was read."""

    status: RoleStatus
    age_s: NonNegativeFloat


class EdgeState(Message):
    """What stands on an edge with room for `capacity` messages; waiting and leased by reading group."""

    messages: NonNegativeInt
    capacity: NonNegativeInt
    bytes: NonNegativeInt
    waiting: dict[str, int]
    leased: dict[str, int]


class VitalsFile(Message):
    """`vitals.json`: the run as its launcher saw it last; `time`: seconds since 1970, `step`: the newest.

    `hubs`: what each of several does, as `Broker.servers` says.
    """

    time: float
    step: NonNegativeInt
    pulses: dict[str, LastPulse]
    edges: dict[str, EdgeState]
    hubs: dict[str, str] = Field(default_factory=dict)


class NodeMoment(Message):
    """A node of a replica ("<role>-<replica>-<rank>"): cumulative seconds, and what it waits for."""

    replica: str
    node: str
    busy_s: NonNegativeFloat = 0.0
    idle_s: NonNegativeFloat = 0.0
    waits_for: str = ""
    ended: bool = False


class Moment(Message):
    """A line of `timeline.jsonl`, `time` in seconds since 1970: a look at all replicas, or a ledger event.

    An event says `what` became of the prompts `origins`; `edges`: the messages on each.
    """

    time: float
    nodes: tuple[NodeMoment, ...] = ()
    edges: dict[str, int] = Field(default_factory=dict)
    what: str = ""
    origins: tuple[int, ...] = ()
    version: NonNegativeInt = 0


class RecordTime(Message):
    """Seconds from taking a record to answering it; `at_once`: the most that a replica had under way.

    `least_s` and `longest_s` are those of the records of a trained batch, in the mean over batches.
    """

    least_s: NonNegativeFloat
    mean_s: NonNegativeFloat
    longest_s: NonNegativeFloat
    at_once: PositiveInt = 1


class RunSummary(Message):
    """`summary.json`. Accuracies are shares of held-out samples with outcome `ok`, sampled as in training.

    `restarts` are those of each replica that was killed and started again; `health`: of how many steps each
    gate has warned.

    `firing_s`: measured seconds of one firing of each node; `record_s`: how long one takes from its beginning
    to its end where several are under way at once. From them alone: the step that the graph is simulated to
    take, and the bound below which no schedule gets, held by `bound_nodes`. `lineage`: the head of the
    record's chain.
    """

    state: Literal["finished", "failed", "stopped"]
    steps: NonNegativeInt
    reward_first: float | None = None
    reward_last: float | None = None
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    evaluations: tuple[EvaluationReport, ...] = ()
    staleness_bound: int | None = None
    staleness_max: NonNegativeInt = 0
    groups_admitted: NonNegativeInt = 0
    groups_trained: NonNegativeInt = 0
    groups_dropped: dict[str, NonNegativeInt] = Field(default_factory=dict)
    counts: dict[str, NonNegativeInt] = Field(default_factory=dict)
    restarts: dict[str, NonNegativeInt] = Field(default_factory=dict)
    health: dict[str, NonNegativeInt] = Field(default_factory=dict)
    tokens_per_s: dict[str, float] = Field(default_factory=dict)
    idle_share: dict[str, float] = Field(default_factory=dict)
    wall_s: NonNegativeFloat = 0.0
    step_s: float | None = None
    firing_s: dict[str, float] = Field(default_factory=dict)
    record_s: dict[str, RecordTime] = Field(default_factory=dict)
    predicted_step_s: float | None = None
    bound_step_s: float | None = None
    bound_nodes: tuple[str, ...] = ()
    lineage: Anchor | None = None
    error: str = ""
