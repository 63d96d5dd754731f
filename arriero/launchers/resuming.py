"""A run that has ended goes on, in its own directory: after Ctrl-C, a crash, or its last step.

    ledger (of the record, if there is one) -> the newest version that all that learns can come back to
        -> `Resumed`: what came after it is undone -> history.jsonl, which the new hub fills the ledger with

Ledger and record keep what was undone. Where there is a record, the ledger file is written anew from it: what
a kill kept from the record never happened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from arriero.engine.broker import Broker
from arriero.engine.component import Recovers
from arriero.engine.elastic import elastic_roles
from arriero.engine.errors import UserError, one_line
from arriero.engine.lineage.chain import ChainError
from arriero.engine.lineage.reader import Lineage
from arriero.engine.portable import resolve
from arriero.engine.runtime.journal import record
from arriero.engine.runtime.ledger import effective
from arriero.engine.runtime.outputs import together
from arriero.launchers.certain import certain
from arriero.launchers.rundir import RunDir
from arriero.schemas.graph import GraphSpec
from arriero.schemas.ledger import EVENT, Admitted, Event, Resumed, Scaled
from arriero.schemas.messages import Weights
from arriero.schemas.run import RunOptions

_AT_ONCE = 64
_MAKES_NO_WEIGHTS = {"steps", "generators", "rewards", "reward", "input"}  # keys of a configuration


def go_on(
    spec: GraphSpec,
    options: RunOptions,
    run: RunDir,
    *,
    why: str = "",
    changed: Mapping[str, str] | None = None,
    anew: bool = False,
    before: GraphSpec | None = None,
) -> Resumed:
    """Prepare the directory of a run that has ended for `launch`; what the run goes on from.

    `before`: its graph until now, if that may have changed. `anew`: prompts that were under way stay dropped,
    for the data have changed. Raises UserError for a graph that can't go on, for changes that it can't take
    over, and for a record or ledger that can't be read.
    """
    check_can_go_on(spec, options)
    _check_older_versions(spec, options, changed or {})
    kept = _record(options, run) if options.record else None
    events = kept.events if kept is not None else _ledger(run.ledger)
    history = effective(events)
    versions, learned = certain(spec, history, options, run, kept, changed=bool(changed))
    number = 1 + sum(isinstance(e, Resumed) for e in events)
    told = tuple(f"{key}: {what}" for key, what in (changed or {}).items())
    resumed = Resumed(
        number=number, versions=versions, learned=learned, anew=anew, changed=told, why=why,
        scaled=_scaled(events, spec, before or spec) if options.elastic and not options.claims_url else {},
    )  # fmt: skip
    history = effective([*events, resumed])
    _write(run.ledger, [*events, resumed])
    _write(run.history, [resumed, *history])
    _cut_metrics(run.metrics, min(versions.values(), default=0))
    run.summary.unlink(missing_ok=True)
    return resumed


def _scaled(events: Sequence[Event], spec: GraphSpec, before: GraphSpec) -> dict[str, int]:
    """Replicas that roles have been given while the run went on, unless their graph has changed that since.

    On a cluster each that joined is a job of its own, with a life of its own.
    """
    found: dict[str, int] = {}
    for event in events:
        if isinstance(event, Scaled):
            found[event.role] = event.number
        elif isinstance(event, Resumed):
            found = dict(event.scaled)
    own, earlier = ({role: nodes[0].replicas for role, nodes in g.roles.items()} for g in (spec, before))
    return {
        role: number
        for role, number in found.items()
        if role in elastic_roles(spec) and own[role] == earlier.get(role) and own[role] != number
    }


def prepared(run: RunDir) -> Resumed | None:
    """What a job goes on from if `--resume` has prepared it; once, for what comes after is another attempt's.

    One that dies before its first event leaves the same directory, but perhaps a record that says more.
    """
    try:
        run.prepared.unlink()
    except FileNotFoundError:
        return None
    resumed, _ = read_history(run)
    return resumed


def check_can_go_on(spec: GraphSpec, options: RunOptions) -> None:
    """UserError naming what couldn't go on from where it was."""
    if options.deterministic and not options.record and any(loop.staleness for loop in spec.loops):
        raise UserError(
            "a deterministic run with staleness above 0 samples with versions before the last, which only a "
            "record brings back; start a new one with --record true"
        )
    for node in spec.nodes:
        kind = resolve(node.component)
        makes_versions = issubclass(resolve(node.output), Weights) and any(not i.loop for i in node.inputs)
        if makes_versions and not issubclass(kind, Recovers):
            raise UserError(
                f"{node.name}: {kind.__name__} learns and keeps no checkpoints, so a run with it can't "
                "go on; start a new one"
            )


def _check_older_versions(spec: GraphSpec, options: RunOptions, changed: Mapping[str, str]) -> None:
    """UserError where versions before the last have to be made again, and would come out as others."""
    if not (options.deterministic and any(loop.staleness for loop in spec.loops)):
        return
    if others := sorted(key for key in changed if key.partition(".")[0] not in _MAKES_NO_WEIGHTS):
        raise UserError(
            f"{', '.join(others)}: a deterministic run with staleness above 0 samples with versions before "
            "the last, made again from the record, and with this change they would be others; begin a new "
            "run --from RUN@STEP"
        )


async def fill_ledger(broker: Broker, run: RunDir) -> None:
    """Write the history of a run that goes on into its new ledger, before anybody reads that."""
    _, events = read_history(run)
    admitted = [e for e in events if isinstance(e, Admitted)]
    for start in range(0, len(admitted), _AT_ONCE):
        await together(*(record(broker, e) for e in admitted[start : start + _AT_ONCE]))
    for event in events:
        if not isinstance(event, Admitted):
            await record(broker, event)


def read_history(run: RunDir) -> tuple[Resumed | None, list[Event]]:
    """What a run that goes on has behind it; nothing in a first life. Raises UserError."""
    if not run.history.exists():
        return None, []
    match _ledger(run.history):
        case [Resumed() as first, *events]:
            return first, events
        case _:
            raise UserError(f"{run.history} doesn't begin with what the run goes on from; resume it again")


def _record(options: RunOptions, run: RunDir) -> Lineage:
    try:
        kept = Lineage(options.record_url or str(run.lineage))
    except ChainError as error:
        raise UserError(f"the run can't go on: {error}") from error
    if kept.broken:
        raise UserError(f"the run can't go on, for its record is damaged: {kept.broken}")
    return kept


def _ledger(path: Path) -> list[Event]:
    """All whole lines. Raises UserError."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
        # A kill may have torn the last one.
        return [EVENT.validate_json(line) for line in lines if line.endswith(b"\n")]
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}; has the run begun?") from error
    except ValidationError as error:
        raise UserError(f"{path} is no ledger of this arriero: {one_line(error)}") from error


def _write(path: Path, events: Sequence[Event]) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(b"".join(EVENT.dump_json(event) + b"\n" for event in events))
    part.replace(path)


def _cut_metrics(path: Path, version: int) -> None:
    """Take off what was measured of steps that are undone."""
    if not path.exists():
        return
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    kept = [line for line in lines if int(json.loads(line)["step"]) <= version]
    part = path.with_name(path.name + ".part")
    part.write_text("".join(kept))
    part.replace(path)
