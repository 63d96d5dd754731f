"""A page in Markdown about a run: what it was made of, how it went, and how to prove it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from arriero.launchers.evaluations import evaluation_table
from arriero.launchers.exports.subject import Subject
from arriero.schemas.run import RunSummary


def write(about: Subject, path: Path) -> str:
    path.write_text(card(about), encoding="utf-8")
    return str(path)


def card(about: Subject) -> str:
    """The page. What a run hasn't got (evaluations, ancestors) has no section."""
    m = about.manifest
    parts = [
        f"# {m.run_id}",
        (
            f"A run of `{m.pipeline.function}` with arriero {m.packages.get('arriero', '')}, begun "
            f"{m.started:%Y-%m-%d %H:%M} UTC on {m.host}: **{about.state}**."
        ),
    ]
    if about.summary is not None:
        parts += ["## Result", _result(about.summary)]
        if about.summary.evaluations:
            table = evaluation_table(list(about.summary.evaluations))
            parts += ["## Held-out prompts", f"```\n{table}\n```"]
        if about.summary.error:
            parts += ["## Error", f"```\n{about.summary.error}\n```"]
    if m.ancestors:
        rows = [(f"`{a.option}`", a.took, f"`{a.run_id}`", f"`{a.sha256[:16]}`") for a in m.ancestors]
        parts += ["## Made from other runs", _table(("option", "took", "run", "SHA-256"), rows)]
    files = [(f"`{i.key}`", f"`{Path(i.path).name}`", str(i.bytes), f"`{i.sha256[:16]}`") for i in m.inputs]
    if files:
        parts += ["## Files", _table(("option", "file", "bytes", "SHA-256"), files)]
    given = [(f"`{k}`", f"`{v}`", m.sources.get(k, "default")) for k, v in about.parameters().items()]
    parts += ["## Configuration", _table(("key", "value", "from"), given)]
    parts += ["## To do it again", _again(about)]
    return "\n\n".join(parts) + "\n"


def _result(s: RunSummary) -> str:
    dropped = ", ".join(f"{n} {why}" for why, n in sorted(s.groups_dropped.items())) or "none"
    rows = [
        ("steps", str(s.steps)),
        ("reward", f"{_number(s.reward_first)} to {_number(s.reward_last)}"),
        ("accuracy", f"{_number(s.accuracy_before)} to {_number(s.accuracy_after)}"),
        ("prompts", f"{s.groups_admitted} admitted, {s.groups_trained} trained, dropped: {dropped}"),
        ("staleness", f"at most {s.staleness_max} versions, bound {s.staleness_bound}"),
        ("time", f"{s.wall_s:.1f} s"),
        ("restarts", ", ".join(f"{k}: {n}" for k, n in s.restarts.items()) or "none"),
    ]
    return _table(("", ""), rows)


def _again(about: Subject) -> str:
    m = about.manifest
    code = ", ".join(
        f"`{Path(c.root).name}` at `{c.commit[:12]}`{' with changes' if c.dirty else ''}" for c in m.code
    )
    hardware = f"{m.hardware.cpus} CPUs, {m.hardware.memory_mb >> 10} GiB"
    lines = [
        f"- command: `{' '.join(m.argv)}`",
        f"- seed {m.seed}, graph `{m.graph_digest[:16]}`, code of arriero `{m.package_sha256[:16]}`",
        f"- code: {code or 'in no repository'}",
        f"- machine: {hardware}{''.join(f', {gpu}' for gpu in m.hardware.gpus)}; Python {m.python}",
        f"- packages: {', '.join(f'{k} {v}' for k, v in m.packages.items())}",
    ]
    if about.head:
        lines.append(f"- proof: `arriero audit {about.run.path.name} --head {about.head}`")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "not known" if value is None else f"{value:.4g}"


def _table(names: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    cells = [[c.replace("|", "\\|").replace("\n", " ") for c in row] for row in rows]
    lines = [names, ("---",) * len(names), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
