"""`arriero lineage redact RUN ...`: texts and tokens out of the record of a run that is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from arriero.engine.errors import UserError
from arriero.engine.lineage.reader import Lineage
from arriero.engine.lineage.redaction import redact
from arriero.engine.lineage.tables import origins_of
from arriero.launchers.rundir import RunDir, running

USAGE = """\
usage: arriero lineage redact RUN WHAT [--reason TEXT]

  --prompt ID    an admitted prompt, and all that came of it
  --row N        a row of the training data, in all epochs
  --group ID     a rollout group and its prompt
  --all          everything

Takes away prompts, responses, tokens and log-probabilities, for good. Rewards, masks, versions and advantages
stay, and the chain holds: `arriero audit` proves what is left and says what is gone, and why. The head of the
chain moves on; one that was kept before is still known."""

# Of a run directory, what may quote the same texts: made of the record, and so removed, or else.
_DERIVED = ("report.html",)
_COPIES = ("exports", "logs", "attempts", "broker", "claims", "branches", "checkpoints", "evaluation.json")
_CHOICES = ("prompt", "row", "group", "all")


def redacting(args: Sequence[str], show: Callable[[str], int]) -> int:
    """Redact, and say what is gone. Raises UserError."""
    from arriero.launchers.lineage import opened

    if not args or {"--help", "-h"} & {*args}:
        return show(USAGE)
    place, (kind, value, reason) = args[0], _options(args[1:])
    run = RunDir(Path(place))
    if run.manifest.exists() and (pid := running(run)) is not None:
        raise UserError(f"{place} is in use by process {pid}; wait until the run is over")
    record = opened(place)
    done = redact(record, _origins(record, kind, value), reason=reason)
    entry = done.entry
    gone = f"{len(entry.groups)} groups, {len(entry.records)} other records, parts of {len(entry.batches)}"
    lines = [f"redacted {gone} batches; the head of the chain is now {done.anchor.head}"]
    for name in _DERIVED:
        if (run.path / name).exists():
            (run.path / name).unlink()
            lines.append(
                f"removed {run.path / name}, which was made of the record; arriero report makes it anew"
            )
    copies = [run.path / name for name in _COPIES if (run.path / name).exists()]
    if copies:
        lines.append(f"not looked through: {', '.join(map(str, copies))}")
    return show("\n".join(lines))


def _origins(record: Lineage, kind: str, value: str) -> set[int]:
    if kind == "all":
        return {a.origin for a in record.admitted}
    if kind == "group":
        found = {k for name, g in record.groups.items() if value in (name, g.id) for k in origins_of(g)}
    elif kind == "prompt":
        found = {a.origin for a in record.admitted if a.id == value}
    else:
        found = {a.origin for a in record.admitted if str(a.row) == value and a.split == "train"}
    if not found:
        raise UserError(f"no {kind} {value} is on record; see --sql 'select id, row from prompts'")
    return found


def _options(words: Sequence[str]) -> tuple[str, str, str]:
    found: dict[str, str] = {}
    rest = list(words)
    while rest:
        name, equals, value = rest.pop(0).removeprefix("--").partition("=")
        if name not in (*_CHOICES, "reason"):
            raise UserError(f"unknown option --{name}; see arriero lineage redact --help")
        if name != "all" and not equals and not rest:
            raise UserError(f"--{name} needs a value")
        found[name] = value if equals or name == "all" else rest.pop(0)
    reason = found.pop("reason", "no reason given")
    if len(found) != 1:
        raise UserError("say what to redact: one of --prompt ID, --row N, --group ID, --all")
    ((kind, value),) = found.items()
    return kind, value, reason
