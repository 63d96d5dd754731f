"""A run for Prometheus: what its replicas, edges and ledger say now, at http://HOST:PORT/metrics.

`prometheus.json` in the run directory names the place as Prometheus's file-based discovery reads it; it is
there as long as the run is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from arriero.engine.errors import UserError
from arriero.engine.runtime.ledger import Ledger
from arriero.launchers.place import own_address
from arriero.launchers.rundir import RunDir
from arriero.launchers.step_lines import Line, scalars
from arriero.launchers.vitals import Pulse, Vitals, rooms
from arriero.schemas.graph import GraphSpec
from arriero.schemas.run import EdgeState, NodeStatus, RunOptions

if TYPE_CHECKING:
    from prometheus_client import Metric

FILE = "prometheus.json"
_TARGETS: TypeAdapter[list[dict[str, list[str] | dict[str, str]]]] = TypeAdapter(
    list[dict[str, list[str] | dict[str, str]]]
)
_ANY = ("0.0.0.0", "::", "")
_PLACE = ("role", "replica", "rank")


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """The run at one moment; never changed, so that the server's threads can read it."""

    pulses: Mapping[str, Pulse]
    edges: Mapping[str, EdgeState]
    admitted: int
    trained: int
    dropped: Mapping[str, int]
    in_flight: int
    staleness_max: int
    line: Line
    warned: Mapping[str, int]


class Exposition:
    """Serves what it has seen last, until it is closed. UserError if the port can't be had."""

    def __init__(self, spec: GraphSpec, options: RunOptions, run: RunDir, port: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._spec, self._options = spec, options
        self._room = rooms(spec)
        self._seen: _Seen | None = None
        self._file = run.path / FILE
        registry = CollectorRegistry()
        registry.register(self)
        host = options.metrics_host
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise UserError(f"--metrics-port {port} of {host}: {error.strerror}; choose another") from error
        # Where all addresses of this host are listened at, others need one of them.
        place = f"{own_address() if host in _ANY else host}:{self._server.server_port}"
        labels = {"run": options.run_id, "graph": spec.name}
        self._file.write_bytes(_TARGETS.dump_json([{"targets": [place], "labels": labels}]))

    def look(self, vitals: Vitals, ledger: Ledger, line: Line, warned: Mapping[str, int]) -> None:
        """The run now."""
        edges = vitals.written(self._spec, 0).edges
        self._seen = _Seen(
            pulses=dict(vitals.pulses), edges=edges, admitted=ledger.admitted, trained=ledger.trained,
            dropped=dict(ledger.dropped), in_flight=ledger.in_flight, staleness_max=ledger.staleness_max,
            line=line, warned=dict(warned),
        )  # fmt: skip

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._file.unlink(missing_ok=True)

    def collect(self) -> Iterator[Metric]:
        """For the client library: asked at every scrape."""
        if (seen := self._seen) is None:
            return
        yield from _ledger(seen)
        yield from _edges(seen)
        yield from _replicas(seen)
        yield from _nodes(seen)
        measures = _gauge("measure", "A number of the newest step, by its tag in TensorBoard.", ("tag",))
        for tag, value in scalars(seen.line):
            measures.add_metric([tag], value)
        yield measures


def exposition(spec: GraphSpec, options: RunOptions, run: RunDir) -> Exposition | None:
    """None if the run isn't to be seen by Prometheus."""
    return None if options.metrics_port is None else Exposition(spec, options, run, options.metrics_port)


def _ledger(seen: _Seen) -> Iterator[Metric]:
    step = _gauge("step", "The newest version: optimizer steps so far.")
    step.add_metric([], float(str(seen.line.get("step", 0))))
    flight = _gauge("prompts_in_flight", "Prompts admitted and neither trained nor dropped.")
    flight.add_metric([], seen.in_flight)
    stale = _gauge("staleness_max_versions", "The stalest token that was trained so far.")
    stale.add_metric([], seen.staleness_max)
    admitted = _counter("prompts_admitted", "Training prompts admitted.")
    admitted.add_metric([], seen.admitted)
    trained = _counter("prompts_trained", "Prompts whose groups were trained on.")
    trained.add_metric([], seen.trained)
    dropped = _counter("prompts_dropped", "Prompts dropped, by reason.", ("reason",))
    for reason, count in seen.dropped.items():
        dropped.add_metric([reason], count)
    warned = _counter("health_warned_steps", "Steps that a health gate warned of.", ("gate",))
    for gate, count in seen.warned.items():
        warned.add_metric([gate], count)
    yield from (step, flight, stale, admitted, trained, dropped, warned)


def _edges(seen: _Seen) -> Iterator[Metric]:
    told: dict[str, tuple[str, Callable[[EdgeState], float]]] = {
        "edge_messages": ("Messages on an edge.", lambda e: e.messages),
        "edge_capacity_messages": ("Messages that an edge has room for.", lambda e: e.capacity),
        "edge_bytes": ("Bytes on an edge.", lambda e: e.bytes),
        "edge_leased_messages": ("Messages that a reader works on.", lambda e: sum(e.leased.values())),
    }  # fmt: skip
    for name, (text, value) in told.items():
        found = _gauge(name, text, ("edge",))
        for edge, state in seen.edges.items():
            found.add_metric([edge], value(state))
        yield found


def _replicas(seen: _Seen) -> Iterator[Metric]:
    age = _gauge("heartbeat_age_seconds", "Since the last heartbeat of a replica.", _PLACE)
    lag = _gauge("loop_lag_seconds", "For how long a replica's event loop hasn't come round.", _PLACE)
    for p in seen.pulses.values():
        age.add_metric(_place(p), p.age_s)
        lag.add_metric(_place(p), p.status.lag_s)
    yield from (age, lag)


def _nodes(seen: _Seen) -> Iterator[Metric]:
    told: dict[str, tuple[str, Callable[[NodeStatus], float]]] = {
        "node_busy_seconds": ("Seconds at work.", lambda n: n.busy_s),
        "node_idle_seconds": ("Seconds of waiting.", lambda n: n.idle_s),
        "node_records_taken": ("Records taken.", lambda n: n.taken),
        "node_records_given": ("Records given.", lambda n: n.given),
        "node_tokens": ("Tokens sampled or trained on.", lambda n: n.tokens),
    }  # fmt: skip
    for name, (text, value) in told.items():
        found = _counter(name, text, (*_PLACE, "node"))
        for p in seen.pulses.values():
            for n in p.status.nodes:
                found.add_metric([*_place(p), n.node], value(n))
        yield found
    waits = _gauge("node_wait_seconds", "How long a node has been waiting; 0 at work.", (*_PLACE, "node"))
    for p in seen.pulses.values():
        for n in p.status.nodes:
            waits.add_metric([*_place(p), n.node], _waits_s(n))
    yield waits


def _waits_s(node: NodeStatus) -> float:
    return node.waits_s if node.waits_for and not node.ended else 0.0


def _place(pulse: Pulse) -> list[str]:
    s = pulse.status
    return [s.role, str(s.replica), str(s.rank)]


def _gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Any:
    library: Any = import_module("prometheus_client.core")
    return library.GaugeMetricFamily(f"arriero_{name}", text, labels=labels)


def _counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Any:
    library: Any = import_module("prometheus_client.core")
    return library.CounterMetricFamily(f"arriero_{name}", text, labels=labels)
