"""What there is to say about a run, as rows of text and lists of numbers: for its report and its page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from arriero.launchers.exports.subject import Subject
from arriero.schemas.ledger import EVENT, Unhealthy
from arriero.schemas.run import RunSummary

if TYPE_CHECKING:
    from arriero.engine.lineage.index import Index

Rows = list[tuple[str, str]]

CURVES = {
    "reward": "mean reward of the batch",
    "loss": "loss",
    "entropy": "entropy of the policy (nats)",
    "grad_norm": "norm of the gradient",
    "staleness_mean": "mean staleness of a trained token (versions)",
    "mismatch": "mean |log-prob of trainer - generator| (nats)",
    "kl": "KL from behaviour to policy (nats)",
    "effective_samples": "effective share of samples",
}
TIMELINE = (
    "Blue: at work; orange: waits for weights; grey: waits for something else. Looked at twice a second; "
    "in between, work is drawn first."
)
DISTRIBUTIONS = {
    "staleness": "staleness of a rollout's oldest token (versions)",
    "lengths": "tokens sampled in a rollout",
}


def result(about: Subject) -> Rows:
    """How the run was begun and what it came to, as far as that is known."""
    m, s = about.manifest, about.summary
    rows = [
        ("state", about.state), ("command", " ".join(m.argv)),
        ("started", f"{m.started:%Y-%m-%d %H:%M:%S} UTC"),
        ("machine", f"{m.host}, {m.hardware.cpus} CPUs" + "".join(f", {gpu}" for gpu in m.hardware.gpus)),
    ]  # fmt: skip
    if s is not None:
        dropped = ", ".join(f"{n} {why}" for why, n in sorted(s.groups_dropped.items())) or "none"
        rows += [
            ("steps", f"{s.steps} in {s.wall_s:.1f} s"),
            ("reward", f"{_number(s.reward_first)} to {_number(s.reward_last)}"),
            ("accuracy on held-out prompts", f"{_number(s.accuracy_before)} to {_number(s.accuracy_after)}"),
            ("staleness", f"at most {s.staleness_max}, bound {s.staleness_bound}"),
            ("prompts", f"{s.groups_admitted} admitted, {s.groups_trained} trained, dropped: {dropped}"),
            ("seconds per step", f"{_number(s.step_s)}, predicted {_number(s.predicted_step_s)}"),
            ("idle", ", ".join(f"{k} {v:.0%}" for k, v in s.idle_share.items())),
            ("error", s.error),
        ]
    return [row for row in rows if row[1]]


def health(about: Subject) -> Rows:
    """The gates that have warned or stopped the run: of which steps, and what was found last."""
    found: dict[str, list[Unhealthy]] = {}
    text = about.run.ledger.read_bytes() if about.run.ledger.exists() else b""
    for line in text.rpartition(b"\n")[0].splitlines():  # the last one may be in the making
        if b'"unhealthy"' in line and isinstance(event := EVENT.validate_json(line), Unhealthy):
            found.setdefault(event.gate, []).append(event)
    return [(gate, _found(events)) for gate, events in found.items()]


def _found(events: list[Unhealthy]) -> str:
    first, last, steps = events[0], events[-1], len({e.version for e in events})
    times = f"step {last.version}" if steps == 1 else f"{steps} steps, {first.version} to {last.version}"
    said = "STOPPED the run" if last.level == "stop" else "warned"
    return f"{said}: {times}; {last.measure} {last.value:.3g}, bound {last.bound:g}"


def record(about: Subject, index: Index) -> Rows:
    """What the record of the run holds, and how it is proven."""
    o = index.overview
    dropped = index.rows(
        "select dropped, count(*) as n from prompts where dropped is not null group by 1 order by 2 desc"
    )
    rows = [
        ("head of the chain", o.anchor.head), ("entries", str(o.anchor.entries)),
        ("closed", o.state or "no: the run goes on, or was killed"), ("broken", o.broken),
        ("groups", str(o.groups)), ("rollouts", str(o.rollouts)), ("steps", str(o.steps)),
        ("admitted", str(o.admitted)),
        ("dropped", ", ".join(f"{r['n']} {r['dropped']}" for r in dropped)),
        ("redacted", str(o.redacted or "")),
        ("made from", ", ".join(f"{a.option} {a.took} of {a.run_id}" for a in about.manifest.ancestors)),
        ("prove it", f"arriero audit {about.run.path.name} --head {o.anchor.head}"),
    ]  # fmt: skip
    return [row for row in rows if row[1]]


def held_out(summary: RunSummary | None) -> list[tuple[float, float]]:
    """Of each version that was evaluated: the chance that a rollout of a held-out prompt is right."""
    return [
        (float(r.version), r.pass_at[1].value)
        for r in (summary.evaluations if summary else ())
        if not r.source and 1 in r.pass_at
    ]


def distribution(index: Index, name: str) -> list[float]:
    """Of every trained rollout one of `DISTRIBUTIONS`."""
    value = {"staleness": "s.version - 1 - r.oldest", "lengths": "r.sampled"}[name]
    rows = index.rows(
        f"select {value} as value from samples s join rollouts r on r.id = s.rollout "
        "where s.version is not null and r.oldest >= 0 order by value"
    )
    return [float(r["value"]) for r in rows]


def tokenizer(about: Subject) -> Path | None:
    """That of the model which the run left, or began with."""
    begun = about.manifest.config.get("model")
    folders = [about.run.model, *([Path(begun)] if isinstance(begun, str) else [])]
    return next((f for d in folders if (f := d / "tokenizer.json").is_file()), None)


def _number(value: float | None) -> str:
    return "not known" if value is None else f"{value:.4g}"
