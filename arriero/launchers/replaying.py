"""`arriero replay` and `arriero fork`: a recorded step once more, as it was, or under another configuration.

Exit code of replay: 0 if all came out as recorded, 1 if something didn't.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from pydantic import JsonValue

from arriero.components.trainer import Trainer
from arriero.engine.errors import GraphError, UserError
from arriero.engine.portable import build, fields_to_json, import_path
from arriero.launchers.lineage import text_table
from arriero.launchers.replay import TOLERANCE, RecordedTrainer, Retaken, retaken

if TYPE_CHECKING:
    from torch import Tensor

REPLAY = f"""\
usage: arriero replay RUN --step K [--until-divergence] [--tolerance T] [--device cpu] [--threads N] [--json]

Takes step K of a recorded run again, from its model directory or a checkpoint through the recorded batches,
and compares loss, gradient norm, all other measures and the fingerprint of the weights: bit for bit where the
run had one rank on the same kind of device, else the measures within T (by default {TOLERANCE:g}, relative).
--until-divergence: all steps from the first (or K) on, up to the first that comes out otherwise. Exit code 1
if something differs. --threads: of a run with --inline, those that it had."""

FORK = """\
usage: arriero fork RUN --step K --change KEY=VALUE ... [--device cpu] [--threads N] [--json]

What step K would have done otherwise: its recorded batch, at the weights and moments of the run, under
another trainer. KEY is a field of the trainer as graph.json has it: loss.rho, optimizer.lr, minibatches."""

_FLAGS = ("until-divergence", "json")
_VALUES = ("step", "tolerance", "device", "threads", "change")
_SHOWN = ("loss", "grad_norm")


@dataclass(frozen=True, kw_only=True)
class _Asked:
    place: str
    step: int | None
    until: bool = False
    tolerance: float | None = None
    threads: int = 0
    as_json: bool = False
    changes: tuple[tuple[str, str], ...] = ()


def replay(args: Sequence[str], show: Callable[[str], int]) -> int:
    """Replay and report on `show`; the exit code. Raises UserError."""
    if not args or {"--help", "-h"} & {*args}:
        return show(REPLAY)
    asked = _asked("replay", args)
    if asked.changes or (asked.step is None and not asked.until):
        raise UserError(
            "replay needs --step K or --until-divergence; to change something is for arriero fork"
        )
    run = RecordedTrainer(asked.place, threads=asked.threads)
    loose = run.loose
    tolerance = (TOLERANCE if loose else 0.0) if asked.tolerance is None else asked.tolerance
    first = asked.step or min(run.steps, default=1)
    last = max(run.steps, default=first) if asked.until else first
    run.batch(first)  # or it is refused now, not after all steps before it
    taken: list[Retaken] = []
    for step in retaken(run, first, last):
        taken.append(step)
        if step.differences(tolerance):
            break
    wrong = [step for step in taken if step.differences(tolerance)]
    text = _as_json(taken, tolerance) if asked.as_json else _told(run, taken, tolerance, loose)
    return show(text) or int(bool(wrong))


def _told(run: RecordedTrainer, taken: Sequence[Retaken], tolerance: float, loose: str) -> str:
    measure = f"within {tolerance:g} (relative; no weights)" if tolerance else "bit for bit"
    lines = [f"{run.node} of {run.record.url}, on {run.threads} threads, compared {measure}"]
    lines += [f"  since {loose}"] if loose else []
    rows = [
        [str(s.version), *(f"{s.now.get(k, math.nan):.9g}" for k in _SHOWN), s.weights[:12] or "not recorded",
         "as recorded" if not s.differences(tolerance) else "DIFFERS"]
        for s in taken
    ]  # fmt: skip
    lines.append(text_table(["step", *_SHOWN, "weights", ""], rows))
    for s in taken:
        if found := s.differences(tolerance):
            about = f"step {s.version}" if s.recorded else f"version {s.version}, which it begins with,"
            lines.append(f"{about} differs from the record:")
            lines += [f"  {name}: recorded {then}, now {now}" for name, (then, now) in sorted(found.items())]
    return "\n".join(lines)


def _as_json(taken: Sequence[Retaken], tolerance: float) -> str:
    return json.dumps(
        [
            {"step": s.version, "same": not s.differences(tolerance), "recorded": dict(s.recorded),
             "now": dict(s.now), "weights": s.weights, "recorded_weights": s.recorded_weights,
             "differences": s.differences(tolerance)}
            for s in taken
        ],
        indent=2,
    )  # fmt: skip


# --- fork ---------------------------------------------------------------------------------------------------


def fork(args: Sequence[str], show: Callable[[str], int]) -> int:
    """Take the step both ways and compare on `show`. Raises UserError."""
    if not args or {"--help", "-h"} & {*args}:
        return show(FORK)
    asked = _asked("fork", args)
    if asked.step is None or not asked.changes or asked.until or asked.tolerance is not None:
        raise UserError("fork needs --step K and at least one --change KEY=VALUE, and nothing else")
    run = RecordedTrainer(asked.place, threads=asked.threads)
    other = changed(run.trainer, asked.changes)
    batch = run.batch(asked.step)
    state = run.load(asked.step - 1)
    while state.version < asked.step - 1:
        state.step(run.batch(state.version + 1))
    before = {name: tensor.clone() for name, tensor in state.checkpoint().items()}
    otherwise = other.load(1, run.followed)
    try:
        otherwise.restore(before)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"the changed trainer can't take over the moments of the run: {error}") from error
    as_it_was, forked = state.step(batch), otherwise.step(batch)
    names = [k for k in (*_SHOWN, *as_it_was) if k in as_it_was and k in forked and not k.endswith("_s")]
    rows = {k: (run.steps[asked.step].metrics.get(k), as_it_was[k], forked[k]) for k in dict.fromkeys(names)}
    updates = distance(before, state.checkpoint(), otherwise.checkpoint())
    if asked.as_json:
        told = {"step": asked.step, "change": dict(asked.changes), "measures": rows, "update": updates}
        return show(json.dumps(told, indent=2))
    table = [[k, *("" if v is None else f"{v:.6g}" for v in values)] for k, values in rows.items()]
    lines = [
        f"step {asked.step} of {run.record.url} with {', '.join(f'{k}={v}' for k, v in asked.changes)}",
        text_table(["measure", "recorded", "replayed", "forked"], table),
    ]
    lengths = f"length {updates['forked']:.6g} instead of {updates['replayed']:.6g}"
    lines.append(f"update: {lengths}, cosine of both {updates['cosine']:.6g}")
    return show("\n".join(lines))


def changed(trainer: Trainer, changes: Sequence[tuple[str, str]]) -> Trainer:
    """The trainer with fields set by their dotted keys. Raises UserError for a key or value that isn't."""
    config = fields_to_json(trainer)
    for key, value in changes:
        *path, last = key.split(".")
        place: dict[str, JsonValue] = config
        for name in path:
            inner = place.get(name)
            if not isinstance(inner, dict):
                raise UserError(f"--change {key}: {name} is no part of the trainer; it has {_names(place)}")
            place = inner
        if last not in place or last.startswith("$"):
            near = difflib.get_close_matches(last, place, n=1)
            hint = f"did you mean {'.'.join((*path, near[0]))}?" if near else f"there are {_names(place)}"
            raise UserError(f"--change {key}: the trainer has no such field; {hint}")
        place[last] = value
        with suppress(ValueError):
            place[last] = cast("JsonValue", json.loads(value))
    try:
        made = build(import_path(type(trainer)), config)
    except GraphError as error:
        raise UserError(f"--change: {error}") from error
    assert isinstance(made, Trainer)
    return made


def _names(place: dict[str, JsonValue]) -> str:
    return ", ".join(name for name in place if not name.startswith("$"))


def distance(
    before: Mapping[str, Tensor], one: Mapping[str, Tensor], other: Mapping[str, Tensor]
) -> dict[str, float]:
    """Lengths of two updates of the same weights, and the cosine of their angle (1 if one is 0)."""
    dot = square_one = square_other = 0.0
    for name in (n for n in before if n.startswith("model.") and before[n].is_floating_point()):
        a, b = ((after[name] - before[name]).double().flatten() for after in (one, other))
        dot += float(a @ b)
        square_one += float(a @ a)
        square_other += float(b @ b)
    lengths = square_one**0.5 * square_other**0.5
    return {
        "replayed": square_one**0.5, "forked": square_other**0.5, "cosine": dot / lengths if lengths else 1.0,
    }  # fmt: skip


# --- words --------------------------------------------------------------------------------------------------


def _asked(command: str, args: Sequence[str]) -> _Asked:
    place, rest = args[0], list(args[1:])
    if place.startswith("-"):
        raise UserError(f"{command} needs a run directory first: arriero {command} RUN --step K")
    found: dict[str, list[str]] = {}
    while rest:
        name, equals, value = rest.pop(0).removeprefix("--").partition("=")
        if name not in (*_FLAGS, *_VALUES):
            raise UserError(f"unknown option --{name}; see arriero {command} --help")
        if name not in _FLAGS and not equals:
            if not rest:
                raise UserError(f"--{name} needs a value")
            value = rest.pop(0)
        found.setdefault(name, []).append(value)
    last = {name: values[-1] for name, values in found.items()}
    if last.get("device", "cpu") != "cpu":
        raise UserError(f"--device {last['device']}: cpu, or leave it out for what this machine has")
    if "device" in last:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks
    return _Asked(
        place=place,
        step=_number("step", last["step"], 1) if "step" in last else None,
        until="until-divergence" in last,
        tolerance=_decimal(last["tolerance"]) if "tolerance" in last else None,
        threads=_number("threads", last.get("threads", "0"), 0),
        as_json="json" in last,
        changes=tuple(_change(text) for text in found.get("change", ())),
    )


def _change(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"--change {text}: write KEY=VALUE, such as loss.rho=4")
    return key, value


def _number(name: str, text: str, least: int) -> int:
    with suppress(ValueError):
        if (number := int(text)) >= least:
            return number
    raise UserError(f"--{name} takes a whole number from {least} on, not {text!r}")


def _decimal(text: str) -> float:
    with suppress(ValueError):
        if 0 <= (number := float(text)) < 1:
            return number
    raise UserError(f"--tolerance takes a number from 0 to below 1, not {text!r}")
