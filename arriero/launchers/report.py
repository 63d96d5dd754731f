"""`arriero report RUN`: what a run was and did, as one HTML file that needs nothing else.

No script, no address: the file shows what is in it, and its content security policy forbids all else, so that
what a model has written stays text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from arriero.engine.errors import UserError
from arriero.launchers import charts
from arriero.launchers.exports.subject import Subject, subject
from arriero.launchers.report_rollouts import CHOICES, STYLE, rollouts_html
from arriero.launchers.timeline import moments
from arriero.launchers.trace import slices

if TYPE_CHECKING:
    from arriero.engine.lineage.reader import Lineage

USAGE = """\
usage: arriero report RUN [--out FILE]    one HTML file; default: RUN/report.html"""

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
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_STYLE = """
body{font:14px/1.5 Helvetica,Arial,sans-serif;margin:0 auto;max-width:960px;padding:1em}
body{color:#1a202c;background:#fff}
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em;border-bottom:1px solid #e2e8f0}
svg{max-width:100%;background:#fff}.charts svg{width:440px}.wide{width:100%}
table{border-collapse:collapse}td,th{padding:.15em .8em .15em 0;text-align:left;vertical-align:top}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:#f7fafc;padding:.6em;margin:.3em 0}
.prompt{background:#ebf4ff}.note{color:#4a5568;margin:.4em 0 0}summary{cursor:pointer}label{margin-right:1em}
"""


def report(args: Sequence[str], show: Callable[[str], int]) -> int:
    """Write it, and say where. Raises UserError."""
    if not args or {"--help", "-h"} & {*args}:
        return show(USAGE)
    words = list(args[1:])
    if words and (len(words) != 2 or words[0] != "--out"):
        raise UserError(f"{' '.join(words)} isn't understood\n{USAGE}")
    about = subject(args[0])
    out = Path(words[1]) if words else about.run.path / "report.html"
    try:
        out.write_text(page(about), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}") from error
    return show(str(out))


def page(about: Subject) -> str:
    """The whole file. What a run hasn't got (a record, a timeline) has no section."""
    from arriero.engine.picture import svg

    record = _record(about)
    sections = {
        "Result": _result(about),
        "Graph": svg(about.run.read_graph()),
        "Curves": f'<div class="charts">{_curves(about)}</div>',
        "Health": _health(about),
        "Staleness and lengths": f'<div class="charts">{_histograms(record)}</div>' if record else "",
        "Who was busy when": _timeline(about),
        "Rollouts": rollouts_html(record, _tokenizer(about)) if record else "",
        "Lineage": _lineage(about, record),
        "Configuration": _rows(sorted(about.parameters().items())),
    }
    body = "\n".join(f"<section><h2>{name}</h2>\n{text}</section>" for name, text in sections.items() if text)
    title = escape(about.manifest.run_id)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{title}</title><style>{_STYLE}{STYLE}</style></head><body>\n<h1>{title}</h1>\n"
        f"{CHOICES if record else ''}\n<main>{body}</main></body></html>\n"
    )


def _result(about: Subject) -> str:
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
    return _rows([row for row in rows if row[1]])


def _curves(about: Subject) -> str:
    held_out = [
        (float(r.version), r.pass_at[1].value)
        for r in (about.summary.evaluations if about.summary else ())
        if not r.source and 1 in r.pass_at
    ]
    found: list[str] = []
    for key, title in CURVES.items():
        points = [
            (float(line["step"]), float(line[key]))  # type: ignore[arg-type]  # numbers, by `step_line`
            for line in about.lines
            if isinstance(line.get(key), int | float)
        ]
        marks = held_out if key == "reward" else []
        found.append(charts.line(title + (", held out (dots)" if marks else ""), points, marks=marks))
    return "".join(found)


def _health(about: Subject) -> str:
    warned: Counter[str] = Counter()
    first: dict[str, int] = {}
    for line in about.lines:
        gates = line.get("health")
        for gate in gates if isinstance(gates, dict) else ():
            warned[gate] += 1
            first.setdefault(gate, int(str(line["step"])))
    rows = [(gate, f"{n} steps, first at {first[gate]}") for gate, n in warned.items()]
    return _rows(rows) if rows else "<p>no gate has warned</p>" if about.lines else ""


def _histograms(record: Lineage) -> str:
    """Of every trained rollout: how stale its oldest token was, and how many tokens were sampled."""
    staleness: list[float] = []
    lengths: list[float] = []
    for step in record.steps:
        for name in record.batches[step.batch].groups if step.batch in record.batches else ():
            if (group := record.groups.get(name)) is not None:
                staleness += [float(step.version - 1 - v) for v in group.oldest if v >= 0]
                lengths += [float(n) for n in group.sampled]
    return charts.histogram("staleness of a rollout's oldest token (versions)", staleness) + charts.histogram(
        "tokens sampled in a rollout", lengths
    )


def _timeline(about: Subject) -> str:
    if not about.run.timeline.exists():
        return ""
    found = slices([*moments(about.run.timeline)])
    drawn = charts.timeline({f"{replica} {node}": spans for (replica, node), spans in found.items()})
    note = "blue: at work; grey: waits. Looked at twice a second; in between, work is drawn first."
    return f'{drawn}<p class="note">{note}</p>' if drawn else ""


def _lineage(about: Subject, record: Lineage | None) -> str:
    if record is None:
        return ""
    dropped = Counter(d.reason for d in record.dropped)
    rows = [
        ("head of the chain", record.anchor.head), ("entries", str(record.anchor.entries)),
        ("closed", record.closed.state if record.closed else "no: the run goes on, or was killed"),
        ("broken", record.broken),
        ("groups", str(len(record.groups))), ("steps", str(len(record.steps))),
        ("admitted", str(len(record.admitted))),
        ("dropped", ", ".join(f"{n} {why}" for why, n in dropped.items())),
        ("redacted", str(len(record.redacted) or "")),
        ("made from", ", ".join(f"{a.option} {a.took} of {a.run_id}" for a in about.manifest.ancestors)),
        ("prove it", f"arriero audit {about.run.path.name} --head {record.anchor.head}"),
    ]  # fmt: skip
    return _rows([row for row in rows if row[1]])


def _record(about: Subject) -> Lineage | None:
    """The record of the run, wherever it was put; None if it has none."""
    from arriero.engine.lineage.chain import ChainError
    from arriero.engine.lineage.reader import Lineage

    options = about.run.read_options()
    try:
        return Lineage(options.record_url or str(about.run.path)) if options.record else None
    except ChainError:
        return None


def _tokenizer(about: Subject) -> Path | None:
    """That of the model which the run left, or began with."""
    begun = about.manifest.config.get("model")
    folders = [about.run.model, *([Path(begun)] if isinstance(begun, str) else [])]
    return next((f for d in folders if (f := d / "tokenizer.json").is_file()), None)


def _rows(rows: Sequence[tuple[str, str]] | Mapping[str, str]) -> str:
    pairs = rows.items() if isinstance(rows, Mapping) else rows
    cells = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in pairs)
    return f"<table>{cells}</table>"


def _number(value: float | None) -> str:
    return "not known" if value is None else f"{value:.4g}"
