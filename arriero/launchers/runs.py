"""`arriero runs`: the runs in a folder, filtered by what they were configured with; two of them compared."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from pydantic import JsonValue

from arriero.engine.errors import UserError, one_line
from arriero.launchers.lineage import text_table
from arriero.launchers.rundir import RunDir
from arriero.schemas.manifest import Ancestor, RunManifest
from arriero.schemas.run import RunSummary

USAGE = """\
usage: arriero runs [DIR] [--where key=value ...] [--json]    the runs below DIR (default: runs)
       arriero runs RUN RUN [--picture FILE] [--json]         two runs: what differs, and the first step
                                                              at which they do

A key is one of the configuration with dots (optimizer.lr), or pipeline, state, seed."""

Numbers = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is left of one run; without a summary it goes on, or was killed."""

    path: Path
    manifest: RunManifest
    summary: RunSummary | None
    steps: dict[int, Numbers] = field(default_factory=dict[int, Numbers])

    @property
    def values(self) -> dict[str, JsonValue]:
        """Configuration by dotted key, and what `--where` knows besides."""
        own: dict[str, JsonValue] = {
            "pipeline": self.manifest.pipeline.function.rpartition(":")[2],
            "state": self.summary.state if self.summary else "unknown",
            "seed": self.manifest.seed,
        }
        return own | dict(flat(self.manifest.config))


def runs(args: Sequence[str], show: Callable[[str], int]) -> int:
    """List or compare on `show`. Raises UserError."""
    if {"--help", "-h"} & {*args}:
        return show(USAGE)
    places, where, picture, as_json = _read(args)
    if len(places) == 2:
        return show(_compared(read(places[0]), read(places[1]), picture, as_json=as_json))
    if len(places) > 2:
        raise UserError(f"two runs can be compared, not {len(places)}")
    folder = places[0] if places else Path("runs")
    known, unread = listed(folder)
    found = [run for run in known if all(_matches(run, k, v) for k, v in where)]
    if as_json:
        return show(json.dumps([_summary(run) for run in found], indent=2, default=str))
    rows = [[_cell(v) for v in _summary(run).values()] for run in found]
    names = ["run", "pipeline", "state", "steps", "reward", "accuracy", "started", "from"]
    told = text_table(names, rows) if rows else _none(folder, known, where)
    return show("\n".join([told, *(f"left out: {why}" for why in unread)]))


def listed(folder: Path) -> tuple[list[Run], list[str]]:
    """All runs below `folder`, oldest first, and why others can't be read. UserError for no folder."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no directory; name the one that holds the runs")
    found, unread = list[Run](), list[str]()
    for path in sorted(folder.glob("**/manifest.json")):
        try:
            found.append(read(path.parent))
        except (UserError, ValueError, KeyError) as error:
            unread.append(f"{path.parent}: {one_line(error)}")
    return sorted(found, key=lambda run: run.manifest.started), unread


def read(path: Path) -> Run:
    """Raises UserError if `path` is no run directory."""
    run = RunDir(path)
    manifest = run.read_manifest()
    summary = run.read_summary() if run.summary.exists() else None
    steps: dict[int, Numbers] = {}
    lines = run.metrics.read_text().splitlines() if run.metrics.exists() else []
    for text in lines:
        line = cast("dict[str, JsonValue]", json.loads(text))
        numbers = {
            k: float(v) for k, v in line.items() if isinstance(v, int | float) and k not in ("step", "time")
        }
        steps[int(cast("int", line["step"]))] = numbers
    return Run(path=path, manifest=manifest, summary=summary, steps=steps)


def _read(args: Sequence[str]) -> tuple[list[Path], list[tuple[str, str]], Path | None, bool]:
    places: list[Path] = []
    where: list[tuple[str, str]] = []
    picture, as_json = None, False
    rest = list(args)
    while rest:
        word = rest.pop(0)
        if word == "--json":
            as_json = True
        elif word in ("--where", "--picture"):
            if not rest:
                raise UserError(f"{word} needs a value")
            value = rest.pop(0)
            if word == "--picture":
                picture = Path(value)
                continue
            key, equals, wanted = value.partition("=")
            if not equals:
                raise UserError(f"--where {value}: write key=value")
            where.append((key, wanted))
        elif word.startswith("--"):
            raise UserError(f"unknown option {word}; see arriero runs --help")
        else:
            places.append(Path(word))
    return places, where, picture, as_json


def _none(folder: Path, runs: Sequence[Run], where: Sequence[tuple[str, str]]) -> str:
    """Why the list is empty."""
    known = {key for run in runs for key in run.values}
    for key in (key for key, _ in where if key not in known):
        close = difflib.get_close_matches(key, known, n=1)
        return f"no run below {folder} has a key {key}" + (f"; did you mean {close[0]}?" if close else "")
    return f"no such run below {folder}"


def _matches(run: Run, key: str, wanted: str) -> bool:
    if key not in (values := run.values):
        return False
    value = values[key]
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(ValueError):
            return float(wanted) == value
    return wanted in (str(value), json.dumps(value))


def flat(value: Mapping[str, JsonValue], before: str = "") -> list[tuple[str, JsonValue]]:
    """The values of a configuration by dotted key."""
    found: list[tuple[str, JsonValue]] = []
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            found += flat(inner, f"{before}{key}.")
        else:
            found.append((f"{before}{key}", inner))
    return found


def _summary(run: Run) -> dict[str, JsonValue]:
    s = run.summary
    return {
        "run": str(run.path),
        "pipeline": run.values["pipeline"],
        "state": run.values["state"],
        "steps": s.steps if s else len(run.steps),
        "reward": s.reward_last if s else None,
        "accuracy": s.accuracy_after if s else None,
        "started": f"{run.manifest.started:%Y-%m-%d %H:%M:%S}",
        "from": ", ".join(_told(a) for a in run.manifest.ancestors),
    }


def _told(a: Ancestor) -> str:
    return a.run_id if a.step is None else f"{a.run_id}@{a.step}"


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def differences(a: Run, b: Run) -> dict[str, tuple[JsonValue, JsonValue]]:
    """What differs in configuration, seed, graph, code and the contents of what decides prompts and rewards
    (data, tokenizers, templates, the file of a reward), by key; None where one has no such key.
    """
    first, second = _made_of(a), _made_of(b)
    keys = dict.fromkeys((*first, *second))
    return {k: (first.get(k), second.get(k)) for k in keys if first.get(k) != second.get(k)}


def _made_of(run: Run) -> dict[str, JsonValue]:
    m = run.manifest
    code: dict[str, JsonValue] = {
        f"code.{Path(c.root).name}": f"{c.commit[:12]} {c.diff_sha256[:12]}" for c in m.code
    }
    packages: dict[str, JsonValue] = {f"packages.{k}": v for k, v in m.packages.items()}
    values = {k: v for k, v in run.values.items() if k != "state"}
    content = {**m.content.model_dump(), "inputs": {f.key: f.sha256 or f"{f.bytes} bytes" for f in m.inputs}}
    code |= {f"{what}.{place}": h[:16] for what, hashes in content.items() for place, h in hashes.items()}
    return values | {"graph": m.graph_digest[:12]} | code | packages


def first_difference(a: Run, b: Run) -> tuple[int, dict[str, tuple[float, float]]] | None:
    """The first step of which a measure differs, and which; None if all that both made are equal."""
    for step in sorted(a.steps.keys() & b.steps.keys()):
        first, second = a.steps[step], b.steps[step]
        if found := {
            k: (v, second[k]) for k, v in first.items() if k in second and second[k] != v and "_s" not in k
        }:
            return step, found
    return None


def _compared(a: Run, b: Run, picture: Path | None, *, as_json: bool) -> str:
    changed, step = differences(a, b), first_difference(a, b)
    if picture is not None:
        _overlay(a, b, picture)
    if as_json:
        told = {
            "first": str(a.path),
            "second": str(b.path),
            "configuration": changed,
            "step": None,
            "measures": {},
        }
        return json.dumps(told | ({"step": step[0], "measures": step[1]} if step else {}), indent=2)
    rows = [[key, _cell(x), _cell(y)] for key, (x, y) in changed.items()]
    parts = [text_table(["configuration", str(a.path), str(b.path)], rows) if rows else "made of the same"]
    both = len(a.steps.keys() & b.steps.keys())
    if step is None:
        parts.append(f"no difference in the {both} steps that both have made")
    else:
        rows = [[key, _cell(x), _cell(y)] for key, (x, y) in step[1].items()]
        parts += [
            f"the first step at which they differ is {step[0]} (of {both})",
            text_table(["measure", "", ""], rows),
        ]
    return "\n\n".join(parts)


def _overlay(a: Run, b: Run, path: Path) -> None:
    """The curves of reward and loss of both runs, one over the other."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    plots: Any = pyplot  # its signatures are partly unknown
    figure, axes = plots.subplots(2, 1, figsize=(9, 6), sharex=True)
    for place, key in zip(axes, ("reward", "loss"), strict=True):
        for run in (a, b):
            known = {step: numbers[key] for step, numbers in run.steps.items() if key in numbers}
            place.plot(list(known), list(known.values()), label=str(run.path))
        place.set_ylabel(key)
        place.legend(fontsize=7)
    axes[-1].set_xlabel("step")
    figure.savefig(path, bbox_inches="tight")
    plots.close(figure)
