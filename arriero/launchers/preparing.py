"""From a command line to a run that can start: the graph checked, the run directory made, the code packed."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arriero.engine.errors import UserError
from arriero.launchers import catalog, rundir
from arriero.launchers.options import Arguments, resolve_command
from arriero.launchers.ship import FOLDER
from arriero.schemas.run import RunOptions

if TYPE_CHECKING:
    from arriero.launchers.catalog import Pipeline
    from arriero.launchers.cluster import Plan
    from arriero.launchers.options import Assignment
    from arriero.launchers.profile import Profile
    from arriero.launchers.rundir import RunDir
    from arriero.launchers.ship import Code
    from arriero.schemas.graph import GraphSpec


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A pipeline with everything resolved and its graph checked."""

    pipeline: Pipeline
    options: Arguments
    config: Any
    sources: dict[str, str]
    spec: GraphSpec


def prepare(pipeline: Pipeline, args: list[str], base: Sequence[Assignment] = ()) -> Ready:
    """Raises UserError with every mistake of the command line, and GraphError."""
    from arriero.engine.graph import HasRemarks

    options, config, sources = resolve_command(pipeline.config_type, Arguments, args, base)
    graph = catalog.build(pipeline, config)
    spec = graph.check()
    for node in graph.nodes.values() if not options.quiet else ():
        if isinstance(node.component, HasRemarks):
            for remark in node.component.remarks():
                print(f"arriero: note: {node.name}: {remark}", file=sys.stderr)
    return Ready(pipeline=pipeline, options=options, config=config, sources=sources, spec=spec)


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A run that is described in its directory; `seen_as`: that directory for the nodes of a cluster."""

    options: RunOptions
    run: RunDir
    seen_as: str


def begin(ready: Ready, argv: list[str], profile: Profile | None = None, code: Code | None = None) -> Begun:
    """Make the run directory, with what the run is made of; for a cluster (`profile`) that is also its code.

    Raises UserError where that can't be.
    """
    from arriero.launchers import provenance
    from arriero.launchers.content_hashes import content_hashes
    from arriero.launchers.hub import CLAIMS
    from arriero.launchers.sinks import can_write

    given, name, now = ready.options, ready.pipeline.name, datetime.now(UTC)
    if given.record and given.record_url.startswith("memory:"):
        raise UserError(
            f"record_url={given.record_url}: what is in memory goes with the process; name a store that "
            "stays, or start with --record false"
        )
    if profile is None:
        can_write(given.sinks, prometheus=given.metrics_port is not None)
    here, seen_as = _places(name, given.run_dir, now, profile)
    options = RunOptions(
        run_id=f"{name}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}",
        seed=given.seed,
        deterministic=given.deterministic,
        wait_bound_s=given.wait_bound_s,
        liveness_s=given.liveness_s,
        max_dead_letters=given.max_dead_letters,
        restarts=given.restarts,
        record=given.record,
        record_url=given.record_url,
        sinks=given.sinks,
        metrics_port=given.metrics_port,
        metrics_host=given.metrics_host,
        claims_url=f"file://{seen_as}/{CLAIMS}" if profile else "",
        elastic=not (given.inline or given.deterministic),
        hubs=given.hub.replicas,
    )
    manifest = provenance.manifest(
        run_id=options.run_id, pipeline=ready.pipeline, spec=ready.spec, config=ready.config,
        sources=ready.sources, seed=given.seed, started=now, argv=argv,
        content=content_hashes(ready.spec), hubs=given.hub.replicas,
    )  # fmt: skip
    run = rundir.create(here, overwrite=given.overwrite)
    if code is not None:
        manifest = manifest.model_copy(update={"shipped_sha256": code.digest})
        code.write(run.path / FOLDER)
    run.begin(ready.spec, options, manifest)
    provenance.write_diffs(run.path, manifest)
    return Begun(options=options, run=run, seen_as=seen_as)


def unbegun(ready: Ready, profile: Profile) -> Begun:
    """What `begin` would give, with nothing made."""
    here, seen_as = _places(ready.pipeline.name, ready.options.run_dir, datetime.now(UTC), profile)
    return Begun(options=RunOptions(run_id=Path(seen_as).name), run=rundir.RunDir(here), seen_as=seen_as)


def pack(ready: Ready) -> Code:
    """The code of the run: arriero's, and what was imported from here and from the pipeline's folder."""
    from arriero.launchers.ship import code

    own = ready.pipeline.search_path
    return code([Path.cwd(), *([Path(own)] if own else [])])


def placed(ready: Ready, profile: Profile, begun: Begun, code: Code) -> Plan:
    """Raises GraphError and UserError for what the cluster can't take."""
    from arriero.launchers.cluster import plan

    return plan(
        ready.spec, profile, run_id=begun.options.run_id, run_dir=begun.seen_as, description=begun.run.path,
        code=code.digest, hubs=ready.options.hub.replicas,
    )  # fmt: skip


def _places(name: str, given: str, now: datetime, profile: Profile | None) -> tuple[Path, str]:
    """The run directory here, and as the nodes see it."""
    usual = rundir.default_path(name, now)
    if profile is None:
        return (Path(given) if given else usual), ""
    there = Path(given) if given else Path(profile.run_root) / usual.name
    if profile.on == "slurm":
        return there, str(there.absolute())
    if not there.is_absolute():
        raise UserError(
            f'{there}: on Kubernetes a run directory is a path in a volume; give run_root = "/runs" and '
            'mounts = ["CLAIM:/runs"] in the profile'
        )
    return usual, str(there)
