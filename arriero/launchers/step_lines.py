"""A step as a line of metrics.jsonl, and the numbers of such a line by their tags."""

from __future__ import annotations

import math
import time

from arriero.launchers.vitals import Vitals
from arriero.schemas.ledger import Trained

Number = float | int | None
Line = dict[str, "Number | dict[str, Number] | dict[str, dict[str, Number]]"]
Scalars = list[tuple[str, float]]


def step_line(event: Trained, vitals: Vitals) -> Line:
    """One line of metrics.jsonl: a version and the state of the run when it was made. Not finite is null."""
    return {
        "step": event.version,
        "time": time.time(),
        **measured(event),
        "queues": dict[str, Number](vitals.queues()),
        "roles": roles(vitals),
        "nodes": nodes(vitals),
    }


def measured(event: Trained) -> dict[str, Number]:
    """What of its line the ledger knows."""
    return {
        "reward": event.reward_mean,
        "loss": _finite(event.metrics.get("loss")),
        **{k: _finite(v) for k, v in event.metrics.items() if k != "loss"},
        "staleness_max": event.staleness_max,
        "staleness_mean": event.staleness_mean,
        "tokens": event.tokens,
    }


def roles(vitals: Vitals) -> dict[str, dict[str, Number]]:
    """Busy and idle seconds and tokens per second of each role so far, summed over its replicas."""
    found: dict[str, dict[str, Number]] = {}
    for pulse in vitals.pulses.values():
        if pulse.status.rank:
            continue
        role = found.setdefault(pulse.status.role, {"busy_s": 0.0, "idle_s": 0.0, "tokens_per_s": 0.0})
        for node in pulse.status.nodes:
            span = node.busy_s + node.idle_s
            for key, value in (
                ("busy_s", node.busy_s),
                ("idle_s", node.idle_s),
                ("tokens_per_s", node.tokens / span if span else 0.0),
            ):
                role[key] = (role[key] or 0.0) + value
    return found


def nodes(vitals: Vitals) -> dict[str, dict[str, Number]]:
    """Busy seconds and records taken and given of each node so far, summed over its replicas."""
    found: dict[str, dict[str, Number]] = {}
    for pulse in vitals.pulses.values():
        for node in () if pulse.status.rank else pulse.status.nodes:
            sums = found.setdefault(node.node, {"busy_s": 0.0, "taken": 0, "given": 0})
            for key, value in (("busy_s", node.busy_s), ("taken", node.taken), ("given", node.given)):
                sums[key] = (sums[key] or 0) + value
    return found


def scalars(line: Line) -> Scalars:
    """The numbers of a step under the names that TensorBoard groups by."""
    found: Scalars = []
    for key, value in line.items():
        if key == "nodes":
            continue  # what `roles` shows, in the form that `arriero plan --from` reads
        if isinstance(value, dict):
            for name, inner in value.items():
                pairs = inner.items() if isinstance(inner, dict) else [("", inner)]
                found += [(f"{key}/{name}/{k}".rstrip("/"), float(v)) for k, v in pairs if v is not None]
        elif value is not None and key not in ("step", "time"):
            found.append((f"train/{key}", float(value)))
    return found


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
