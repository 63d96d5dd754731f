"""`arriero report RUN`: what a run was and did, as one HTML file that needs nothing else.

No script, no address: the file shows what is in it, and its content security policy forbids all else, so that
what a model has written stays text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from arriero.engine.errors import UserError
from arriero.launchers import charts, facts
from arriero.launchers.exports.subject import Subject, subject
from arriero.launchers.report_rollouts import CHOICES, STYLE, rollouts_html
from arriero.launchers.timeline import moments
from arriero.launchers.trace import slices

if TYPE_CHECKING:
    from arriero.engine.lineage.index import Index
    from arriero.engine.lineage.reader import Lineage

USAGE = """\
usage: arriero report RUN [--out FILE]    one HTML file; default: RUN/report.html"""

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

    record, index = _recorded(about)
    warned = _rows(facts.health(about)) or ("<p>no gate has warned</p>" if about.lines else "")
    sections = {
        "Result": _rows(facts.result(about)),
        "Graph": svg(about.run.read_graph()),
        "Curves": f'<div class="charts">{_curves(about)}</div>',
        "Health": warned,
        "Staleness and lengths": f'<div class="charts">{_histograms(index)}</div>' if index else "",
        "Who was busy when": _timeline(about),
        "Rollouts": rollouts_html(record, facts.tokenizer(about)) if record else "",
        "Lineage": _rows(facts.record(about, index)) if index else "",
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


def _curves(about: Subject) -> str:
    found: list[str] = []
    for key, title in facts.CURVES.items():
        points = [
            (float(line["step"]), float(line[key]))  # type: ignore[arg-type]  # numbers, by `step_line`
            for line in about.lines
            if isinstance(line.get(key), int | float)
        ]
        marks = facts.held_out(about.summary) if key == "reward" else []
        found.append(charts.line(title + (", held out (dots)" if marks else ""), points, marks=marks))
    return "".join(found)


def _timeline(about: Subject) -> str:
    if not about.run.timeline.exists():
        return ""
    found = slices([*moments(about.run.timeline)])
    drawn = charts.timeline({f"{replica} {node}": spans for (replica, node), spans in found.items()})
    return f'{drawn}<p class="note">{facts.TIMELINE}</p>' if drawn else ""


def _histograms(index: Index) -> str:
    return "".join(
        charts.histogram(title, facts.distribution(index, name))
        for name, title in facts.DISTRIBUTIONS.items()
    )


def _recorded(about: Subject) -> tuple[Lineage, Index] | tuple[None, None]:
    """The record of the run and its tables, wherever it was put; None if it has none."""
    from arriero.engine.lineage.chain import ChainError
    from arriero.engine.lineage.index import Index
    from arriero.engine.lineage.reader import Lineage

    options = about.run.read_options()
    place = options.record_url or str(about.run.path)
    try:
        return (Lineage(place), Index(place)) if options.record else (None, None)
    except ChainError:
        return None, None


def _rows(rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in rows)
    return f"<table>{cells}</table>" if cells else ""
