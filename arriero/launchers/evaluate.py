"""`arriero eval`: what a model, or the model of a run, makes of held-out prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from pydantic import TypeAdapter

from arriero.components.environments.episodes import Episodes
from arriero.components.generator import Generator
from arriero.components.prompts import PromptSource
from arriero.components.verifiers.reward import RolloutReward
from arriero.engine.errors import UserError
from arriero.engine.graph import Graph
from arriero.launchers.evaluations import INTERVALS, evaluation_table
from arriero.launchers.options import Assignment
from arriero.launchers.provenance import as_text
from arriero.launchers.resolver import Given
from arriero.launchers.rundir import RunDir, write_json
from arriero.schemas.evaluation import Evaluation


def target_of(word: str) -> tuple[Path, int, list[Assignment]]:
    """Model directory, version and settings that a model directory or a run directory stands for.

    A run gives its data, reward or environment, sampling and chat template. Raises UserError.
    """
    path = Path(word)
    run = RunDir(path.absolute())
    if not path.is_dir():
        raise UserError(
            f"{path}: no such directory; eval takes a model directory or the directory of a run "
            "(`arriero runs` lists those)"
        )
    if not run.graph.is_file():
        return path, 0, [("model", Given(value=word, source="command line"))]
    if not run.model.is_dir():
        raise UserError(f"{path} is a run without a model/; it ended before it saved one")
    version = run.read_summary().steps
    source = str(run.graph)
    found: list[Assignment] = [("model", Given(value=str(run.model), source=source))]
    for node in Graph.from_spec(run.read_graph()).nodes.values():
        component: object = node.component
        match component:
            case PromptSource():
                names = {f.name for f in fields(PromptSource)}
                found.append(("data", Given(value=_table(component, names), source=source)))
            case RolloutReward():
                found.append(("reward", Given(value=_table(component), source=source)))
            case Generator():
                found += _sampled(component, source)
            case Episodes():
                found += _sampled(component.generator, source)
                own = _table(component, ("turns", "tokens", "seconds", "observation"))
                own |= {"environment": _table(component.environment)}
                found += [(name, Given(value=value, source=source)) for name, value in own.items()]
            case _:
                pass
    return run.model, version, found


def _sampled(generator: Generator, source: str) -> list[Assignment]:
    parts = {name: _table(getattr(generator, name)) for name in ("sampling", "chat")}
    return [(name, Given(value=part, source=source)) for name, part in parts.items()]


def conclude(run: RunDir, *, model: Path, version: int, as_json: bool) -> str:
    """Write `evaluation.json` into the run directory; what to print. Raises UserError without a summary."""
    summary = run.read_summary()
    result = Evaluation(
        model=str(model), weights_sha256=weights_sha256(model), version=version, intervals=INTERVALS,
        reports=tuple(r.model_copy(update={"version": version}) for r in summary.evaluations),
    )  # fmt: skip
    write_json(run.path / "evaluation.json", result)
    if as_json:
        return result.model_dump_json(indent=2)
    return f"{evaluation_table(result.reports)}\n{INTERVALS}; weights {result.weights_sha256[:16]} of {model}"


def weights_sha256(model: Path) -> str:
    """Hash of the safetensors files in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _table(component: object, names: Sequence[str] | set[str] = ()) -> dict[str, object]:
    """The fields of a component as a configuration file has them."""
    adapter: TypeAdapter[object] = TypeAdapter(type(component))
    dumped = adapter.dump_python(component, mode="json", fallback=as_text, exclude_none=True)
    found: dict[str, object] = json.loads(json.dumps(dumped))
    return {k: v for k, v in found.items() if not names or k in names}
