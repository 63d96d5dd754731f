"""`arriero export RUN --to FORMAT`: a run for OpenLineage, MLflow, TensorBoard, W&B, PROV, or as a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from arriero.engine.errors import UserError, one_line
from arriero.launchers.exports.subject import Subject, subject

USAGE = """\
usage: arriero export RUN --to FORMAT [--out PATH]

  openlineage   run events as JSON lines, made by its own client        PATH.jsonl  (arriero[export])
  prov          W3C PROV-JSON: versions, batches, steps, data           PATH.json   (arriero[export])
  mlflow        an MLflow store: parameters, measures, files            a folder    (arriero[export])
  wandb         an offline run of Weights & Biases, for `wandb sync`    a folder    (arriero[export])
  tensorboard   event files                                             a folder
  card          a page about the run and its model                      PATH.md
  rollouts      the scored training groups, for `offline` and others    PATH.jsonl

Without --out: exports/ in the run directory. Nothing is sent anywhere."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """Where an export is made, and how what it makes is called."""

    module: str
    name: str


FORMATS = {
    "openlineage": Format(module="open_lineage", name="openlineage.jsonl"),
    "prov": Format(module="w3c_prov", name="prov.json"),
    "mlflow": Format(module="ml_flow", name="mlflow"),
    "wandb": Format(module="weights_and_biases", name="wandb"),
    "tensorboard": Format(module="boards", name="tensorboard"),
    "card": Format(module="card", name="card.md"),
    "rollouts": Format(module="rollouts", name="rollouts.jsonl"),
}


def export(args: Sequence[str], show: Callable[[str], int]) -> int:
    """Write what was asked for, and say where. Raises UserError."""
    if not args or {"--help", "-h"} & {*args}:
        return show(USAGE)
    kind, out = _options(args[1:])
    about = subject(args[0])
    path = Path(out) if out else about.run.path / "exports" / FORMATS[kind].name
    return show(f"{kind}: {written(kind, about, path.absolute())}")


def written(kind: str, about: Subject, path: Path) -> str:
    """Write the run at `path`; what was written, in a line. Raises UserError."""
    make: Callable[[Subject, Path], str]
    try:
        make = import_module(f"arriero.launchers.exports.{FORMATS[kind].module}").write
        path.parent.mkdir(parents=True, exist_ok=True)
        return make(about, path)
    except ImportError as error:
        raise UserError(f"--to {kind} needs {error.name}: pip install 'arriero[export]'") from error
    except OSError as error:
        raise UserError(f"--to {kind}: {path} can't be written: {one_line(error)}") from error


def _options(words: Sequence[str]) -> tuple[str, str]:
    found: dict[str, str] = {}
    rest = list(words)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name not in ("--to", "--out"):
            raise UserError(f"unknown option {name}; see arriero export --help")
        if not equals and not rest:
            raise UserError(f"{name} needs a value")
        found[name] = value if equals else rest.pop(0)
    if (kind := found.get("--to", "")) not in FORMATS:
        raise UserError(f"--to {kind or 'FORMAT'}: one of {', '.join(FORMATS)}")
    return kind, found.get("--out", "")
