"""A plan for one pipeline: what its graph says about the work, both runs, and how they are shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import JsonValue

from arriero.engine.errors import UserError
from arriero.engine.planner.calibrate import with_replicas, with_staleness
from arriero.engine.planner.dispatch import skew_aware
from arriero.engine.planner.hardware import Hardware
from arriero.engine.planner.lengths import log_normal
from arriero.engine.planner.memory import resident_tokens
from arriero.engine.planner.models import ModelShape
from arriero.engine.planner.placement import Placement
from arriero.engine.planner.plan import asynchronous, by_split, synchronous
from arriero.engine.planner.reallocate import reallocated
from arriero.engine.planner.scenario import Scenario
from arriero.engine.planner.simulation import simulate
from arriero.engine.planner.split import Split, Workload
from arriero.engine.planner.times import Duration, Fixed, Recorded
from arriero.engine.planner.trace import Trace
from arriero.engine.rates import windows
from arriero.schemas.graph import GraphSpec, NodeSpec


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Both runs of `spec` on the cluster; `simulated` is the graph itself in the asynchronous one."""

    spec: GraphSpec
    model: ModelShape
    hardware: Hardware
    generators: Hardware
    gpus: int
    work: Workload
    sync: Split
    late: Split
    simulated: Trace
    placement: Placement | None

    def as_json(self) -> dict[str, JsonValue]:
        sides: dict[str, JsonValue] = {}
        for name, s in (("synchronous", self.sync), ("asynchronous", self.late)):
            more_train, more_generate = s.worth()
            sides[name] = {
                "step_s": s.step_s, "staleness": s.staleness, "bottleneck": s.bottleneck, "sync_s": s.sync_s,
                "train_devices": s.training.layout.devices, "train_layout": str(s.training.layout),
                "train_micro_tokens": s.training.micro_tokens,
                "train_s": s.training.seconds, "train_bytes": s.training.bytes,
                "generate_devices": s.generation.devices,
                "generate_tp": s.generation.tp, "generate_slots": s.generation.slots,
                "generate_s": s.generation.seconds, "one_more_train_device_saves_s": more_train,
                "one_more_generate_device_saves_s": more_generate,
                "usd_per_million_tokens": self.cost(s),
            }  # fmt: skip
        return {"model": self.model.name, "hardware": self.hardware.name, "gpus": self.gpus, **sides}

    def cost(self, s: Split) -> float:
        """US dollars per million trained tokens."""
        if s.staleness == 0:
            return s.cost_per_million(self.work, self.hardware, self.gpus)
        train = s.cost_per_million(self.work, self.hardware, s.training.layout.devices)
        return train + s.cost_per_million(self.work, self.generators, s.generation.devices)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to plan for beside the graph. `mean_tokens` 0: a quarter of the longest response.

    `generators`: other hardware for generation; `generating` 0: as many devices as is best; `skew`: deal a
    synchronous batch out by length (StreamRL); `reallocate`: search a place for every call (ReaL).
    """

    model: ModelShape
    hardware: Hardware
    gpus: int
    generators: Hardware | None = None
    generating: int = 0
    mean_tokens: float = 0.0
    sigma: float = 0.7
    prompt_tokens: float = 200.0
    fp8: bool = False
    skew: bool = False
    reallocate: bool = False


def make(spec: GraphSpec, q: Question) -> Plan:
    """Plan for the work that `spec` says. Raises UserError for a graph without a loop, or if nothing fits."""
    work = workload(spec, q)
    sync = synchronous(q.model, q.hardware, q.gpus, work, offload=True)
    late = asynchronous(
        q.model, q.hardware, q.gpus, work, staleness=max(1, windows(spec)[0].staleness),
        generators=q.generators, generating=q.generating or None,
    )  # fmt: skip
    return Plan(
        spec=spec, model=q.model, hardware=q.hardware, generators=q.generators or q.hardware, gpus=q.gpus,
        work=work, sync=_dealt_by_length(sync, work) if q.skew else sync, late=late,
        simulated=simulated(spec, late, work),
        placement=reallocated(q.model, q.hardware, q.gpus, work) if q.reallocate else None,
    )  # fmt: skip


def workload(spec: GraphSpec, q: Question) -> Workload:
    """Groups, samples and longest response from the graph. Raises UserError if it has no loop."""
    if not (found := windows(spec)):
        raise UserError(f"{spec.name} has no loop: nothing is generated, so there is nothing to split")
    config = [v for node in _readers(spec) for v in _values(node.config)]
    samples = next((v for k, v in config if k == "samples" and isinstance(v, int)), 1)
    longest = next((v for k, v in config if k == "max_new_tokens" and isinstance(v, int)), 1024)
    mean = q.mean_tokens or longest / 4
    if mean >= longest:
        raise UserError(f"--mean-tokens {mean:g} must be below sampling.max_new_tokens={longest}; raise that")
    return Workload(
        groups=found[0].per_version, samples=samples, prompt=q.prompt_tokens,
        generate="fp8" if q.fp8 else "bf16",
        responses=log_normal(mean, sigma=q.sigma, longest=float(longest)),
    )  # fmt: skip


def simulated(spec: GraphSpec, late: Split, work: Workload) -> Trace:
    """The pipeline's own graph with the planned generators: one simulated replica for each group at once.

    A decoding step takes longer the fuller a replica is: its time is that of the share of places that the
    simulation itself finds in use, after a few rounds.
    """
    g, window = late.generation, windows(spec)[0]
    spec = with_staleness(spec, window.loop, late.staleness)
    at_once = min(g.replicas * max(1, g.slots // work.samples), window.per_version * (late.staleness + 1))
    for node in _readers(spec):
        spec = with_replicas(spec, node.name, at_once)
    resident, busy = resident_tokens(work.prompt, work.responses), 1.0
    traces: list[Trace] = []
    for _ in range(4):
        each = g.decoder.per_token(max(1, round(g.slots * busy)), resident)
        times: dict[str, Duration] = {window.producer: Fixed(late.training.seconds)}
        times |= {n.name: Recorded(seconds=_of_groups(work, each)) for n in _readers(spec)}
        traces.append(simulate(spec, Scenario(times=times, steps=30, sync_s=late.sync_s)))
        busy = 1 - max(traces[-1].idle_share()[n.name] for n in _readers(spec))
    return traces[-1]


def _of_groups(work: Workload, each: float, count: int = 512) -> tuple[float, ...]:
    """Seconds of a group, `each` a token: of the longest of its samples, at equal shares of probability."""
    lengths = work.responses.spread(count)
    shares = [((i + 0.5) / count) ** (1 / work.samples) for i in range(count)]
    return tuple(float(lengths[min(count - 1, int(count * s))]) * each for s in shares)


def text(p: Plan) -> str:
    """The plan in a table."""
    w = p.work
    rows = [
        ("", "synchronous, in turns", f"asynchronous, staleness {p.late.staleness}"),
        (
            "devices",
            f"{p.gpus} for both",
            f"{p.late.training.layout.devices} train, {p.late.generation.devices} generate",
        ),
        ("trainer", *(_trainer(s) for s in (p.sync, p.late))),
        ("generators", *(_generators(s) for s in (p.sync, p.late))),
        ("weight sync", *(f"{s.sync_s:.2g} s" for s in (p.sync, p.late))),
        ("step", f"{p.sync.step_s:.4g} s", f"{p.late.step_s:.4g} s ({p.sync.step_s / p.late.step_s:.2f} x)"),
        ("held up by", p.sync.bottleneck, p.late.bottleneck),
        (
            "one more device",
            f"saves {p.sync.worth()[0]:.2g} s",
            "training saves {:.2g} s, generating {:.2g} s".format(*p.late.worth()),
        ),
        ("million tokens", *(f"$ {p.cost(s):.3g}" for s in (p.sync, p.late))),
    ]
    widths = [max(len(r[k]) for r in rows) for k in range(3)]
    table = "\n".join("  ".join(f"{c:<{n}}" for c, n in zip(r, widths, strict=True)).rstrip() for r in rows)
    title = (
        f"{p.spec.name}, {p.model.name} on {p.gpus} x {p.hardware.name}: {w.groups} groups x {w.samples} "
        f"samples a step, responses {w.responses.mean:.0f} tokens (longest {w.responses.longest:.0f})"
    )
    parts = [title, table, f"the graph itself, simulated with these times:\n{p.simulated.table()}"]
    if p.placement is not None:
        places = ", ".join(f"{k} on {v.mesh.size} ({v.layout})" for k, v in p.placement.places.items())
        parts.append(f"reallocated, in turns: {p.placement.seconds:.4g} s: {places}")
    return "\n\n".join(parts)


def draw(p: Plan, path: Path) -> None:
    """Write a picture: seconds of training and generation over the split, and the synchronous step."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = by_split(p.model, p.hardware, p.gpus, p.work)
    figure, axes = plt.subplots(figsize=(7, 4))  # pyright: ignore[reportUnknownMemberType]
    at = [n for n, _, _ in rows]
    axes.plot(at, [t for _, t, _ in rows], label="training")  # pyright: ignore[reportUnknownMemberType]
    axes.plot(at, [g for _, _, g in rows], label="generation")  # pyright: ignore[reportUnknownMemberType]
    axes.axhline(p.sync.step_s, color="grey", linestyle="--", label="synchronous step")  # pyright: ignore[reportUnknownMemberType]
    axes.plot([p.late.generation.devices], [p.late.step_s], "o", label="plan")  # pyright: ignore[reportUnknownMemberType]
    axes.set(
        xlabel=f"generating devices of {p.gpus}", ylabel="seconds a step", yscale="log", title=p.model.name
    )
    axes.legend()  # pyright: ignore[reportUnknownMemberType]
    figure.tight_layout()
    figure.savefig(path)  # pyright: ignore[reportUnknownMemberType]
    plt.close(figure)


def _trainer(s: Split) -> str:
    t = s.training
    return f"{t.layout}, {t.micro_tokens:.0f} tokens at once: {t.seconds:.3g} s"


def _generators(s: Split) -> str:
    g = s.generation
    return f"{g.replicas} x tp{g.tp}, {g.slots} sequences: {g.seconds:.3g} s"


def _dealt_by_length(s: Split, work: Workload) -> Split:
    batch = [float(v) for v in work.responses.spread(work.sequences)]
    dealt = skew_aware(s.generation.decoder, batch, work.prompt, s.generation.replicas, recall=0.87)
    seconds = min(s.generation.seconds, dealt.seconds)
    return replace(
        s, generation=replace(s.generation, seconds=seconds), step_s=s.step_s - s.generation.seconds + seconds
    )


def _readers(spec: GraphSpec) -> list[NodeSpec]:
    """The generators: nodes that follow a loop."""
    return [n for n in spec.nodes if any(i.loop for i in n.inputs)]


def _values(config: JsonValue) -> Iterator[tuple[str, JsonValue]]:
    if isinstance(config, dict):
        for key, value in config.items():
            yield key, value
            yield from _values(value)
