"""What a simulation came to: step times, idle shares, staleness, queue depths and a timeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean


@dataclass(frozen=True)
class Interval:
    """One firing of one replica, in seconds of simulated time."""

    node: str
    replica: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Faults:
    """How often what went wrong; `lost_s` is work that was done and thrown away."""

    failures: int = 0
    lost_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Of one simulated run.

    `versions_s`: when each version was made. `busy_s`: per node, summed over replicas. `staleness`: trained
    groups by age in versions. `queues`: per edge, how often it held how many records just after a version.
    """

    versions_s: tuple[float, ...]
    busy_s: Mapping[str, float]
    replica_s: Mapping[str, float]
    staleness: Counter[int]
    dropped: int
    admitted: int
    queues: Mapping[str, Counter[int]]
    timeline: tuple[Interval, ...] = ()
    faults: Faults = field(default_factory=Faults)
    events: int = 0

    @property
    def steps(self) -> int:
        return len(self.versions_s)

    def step_s(self, warm_up: int = 2) -> float:
        """Mean seconds between versions, without the first `warm_up` if enough are left."""
        times = self.versions_s[warm_up:] if len(self.versions_s) > warm_up + 1 else (0.0, *self.versions_s)
        return (times[-1] - times[0]) / (len(times) - 1)

    def steps_s(self) -> list[float]:
        """Seconds of each step."""
        return [b - a for a, b in pairwise((0.0, *self.versions_s))]

    def idle_share(self) -> dict[str, float]:
        """Per node: the share of its replicas' time in which they don't work."""
        return {n: 1 - self.busy_s[n] / t if (t := self.replica_s[n]) else 0.0 for n in self.busy_s}

    @property
    def staleness_mean(self) -> float:
        total = self.staleness.total()
        return sum(age * n for age, n in self.staleness.items()) / total if total else 0.0

    def table(self) -> str:
        """The numbers as text."""
        idle = ", ".join(f"{n} {share:.0%}" for n, share in self.idle_share().items())
        ages = ", ".join(f"{age}: {n}" for age, n in sorted(self.staleness.items()))
        rows = [
            ("step", f"{self.step_s():.4g} s (mean of {self.steps})"),
            ("idle", idle),
            ("staleness", f"{ages} groups (mean {self.staleness_mean:.2f})"),
            ("dropped", f"{self.dropped} of {self.admitted}"),
        ]
        for edge, depths in self.queues.items():
            if depths.total():
                mean = fmean(depths.elements())
                rows.append(
                    (f"edge {edge}", f"{mean:.1f} records held after a version, at most {max(depths)}")
                )
        return "\n".join(f"  {name:<16} {value}" for name, value in rows)


def draw_timeline(trace: Trace, path: Path) -> None:
    """Write the timeline as a picture: a bar for each firing, a row for each replica."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = sorted({(i.node, i.replica) for i in trace.timeline})
    figure, axes = plt.subplots(figsize=(10, 0.4 * len(rows) + 1.5))  # pyright: ignore[reportUnknownMemberType]
    for y, row in enumerate(rows):
        spans = [(i.start, i.end - i.start) for i in trace.timeline if (i.node, i.replica) == row]
        axes.broken_barh(spans, (y - 0.4, 0.8), edgecolor="white")  # pyright: ignore[reportUnknownMemberType]
    axes.set_yticks(range(len(rows)), [f"{node} {replica}" for node, replica in rows])  # pyright: ignore[reportUnknownMemberType]
    axes.set_xlabel("seconds")  # pyright: ignore[reportUnknownMemberType]
    figure.tight_layout()
    figure.savefig(path)  # pyright: ignore[reportUnknownMemberType]
    plt.close(figure)
