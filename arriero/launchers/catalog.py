"""Finding pipelines: a module or file with a function of the same name, `(cfg: Config) -> Graph`."""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import os
import pkgutil
import sys
import traceback
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import arriero.pipelines
from arriero.engine.errors import UserError, one_line

if TYPE_CHECKING:
    from arriero.engine.graph import Graph

EVALUATION = "evaluate"  # what `arriero eval` runs
SHAPE = "a function named like its file: def name(cfg: Config) -> Graph (Config: a pydantic dataclass)"


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A pipeline that was found. `search_path` must be on the search path of every process of its run."""

    name: str
    function: Callable[[Any], Graph]
    config_type: type[Any]
    file: Path
    search_path: str

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.function) or ""


def listed() -> dict[str, str]:
    """Pipelines that come with arriero and train: name and first line of the docstring; none is imported."""
    found: dict[str, str] = {}
    for folder in arriero.pipelines.__path__:
        for module in pkgutil.iter_modules([folder]):
            file = Path(folder) / f"{module.name}.py"
            if module.name.startswith("_") or module.name == EVALUATION or not file.exists():
                continue
            tree = ast.parse(file.read_text(encoding="utf-8"))
            own = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == module.name]
            if own:
                doc = ast.get_docstring(own[0]) or ast.get_docstring(tree) or ""
                found[module.name] = doc.partition("\n")[0]
    return dict(sorted(found.items()))


def find(name: str) -> Pipeline:
    """The pipeline with this name, of this module (`package.module`) or in this file.

    A file's search path is put in front of `sys.path`. Raises UserError if there is none, or not of the
    right shape.
    """
    if name.endswith(".py") or os.sep in name:
        module, search_path = _load_file(Path(name))
    else:
        dotted = name.replace("-", "_")
        dotted = dotted if "." in dotted else f"{arriero.pipelines.__name__}.{dotted}"
        module, search_path = _import(dotted, name), ""
    return _pipeline(module, search_path)


def _load_file(path: Path) -> tuple[ModuleType, str]:
    if not path.is_file():
        raise UserError(f"{path} is not a file; `arriero list` shows the pipelines that come with arriero")
    file = path.resolve()
    if not file.stem.isidentifier() or file.suffix != ".py":
        raise UserError(
            f"{path}: a pipeline's file is a Python module; name it like its function, my_algo.py"
        )
    # Inside a package the module has the package's name, so that no module exists twice.
    root, dotted = file.parent, file.stem
    while (root / "__init__.py").exists():
        root, dotted = root.parent, f"{root.name}.{dotted}"
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    module = _import(dotted, str(path))
    if (loaded := getattr(module, "__file__", None)) is None or Path(loaded).resolve() != file:
        raise UserError(
            f"{path}: the module name {dotted} belongs to {loaded or 'Python itself'}; rename the file"
        )
    return module, str(root)


def _import(dotted: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError as error:
        if error.name is not None and (dotted == error.name or dotted.startswith(f"{error.name}.")):
            close = difflib.get_close_matches(name, listed(), n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(listed()) or 'none'}"
            raise UserError(f"no pipeline {name}; {hint} A file is given as path/to/my_algo.py") from error
        raise UserError(f"{name} imports {error.name}, which is not installed here") from error
    except SyntaxError as error:
        raise UserError(f"{error.filename}:{error.lineno}: {error.msg}") from error
    except ImportError as error:
        raise UserError(f"{name} can't be imported: {error}") from error
    except (Exception, SystemExit) as error:
        raise _in_file(error, dotted.rpartition(".")[2]) from error


def _in_file(error: Exception | SystemExit, stem: str) -> Exception | SystemExit:
    """`error` in one line, with the place in the user's file `stem`.py; itself if it isn't from there."""
    ours = str(Path(arriero.pipelines.__path__[0]).parent)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).stem == stem]
    if isinstance(error, UserError) or not frames or frames[-1].filename.startswith(ours):
        return error
    what = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else one_line(error)
    return UserError(f"{frames[-1].filename}:{frames[-1].lineno}: {type(error).__name__}: {what}")


def _pipeline(module: ModuleType, search_path: str) -> Pipeline:
    from arriero.engine.graph import Graph

    file, name = Path(str(module.__file__)), module.__name__.rpartition(".")[2]
    function = getattr(module, name, None)
    if not inspect.isfunction(function):
        raise UserError(f"{file} has no function {name}; a pipeline is {SHAPE}")
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise UserError(f"{file}: {name} is annotated with something unknown there: {error}") from error
    gives = hints.pop("return", None)
    config_type = next(iter(hints.values()), None)
    parameters = len(inspect.signature(function).parameters)
    if gives is not Graph or parameters != 1 or not hasattr(config_type, "__pydantic_fields__"):
        raise UserError(f"{file}: {name}{inspect.signature(function)} is not a pipeline, which is {SHAPE}")
    return Pipeline(
        name=name,
        function=function,
        config_type=cast("type[Any]", config_type),
        file=file,
        search_path=search_path,
    )


def build(pipeline: Pipeline, config: object) -> Graph:
    """The pipeline's graph. Raises UserError for what goes wrong in a pipeline of the user's own, and for a
    component that refuses what a pipeline gives it.
    """
    from pydantic import ValidationError

    from arriero.engine.graph import Graph
    from arriero.launchers.resolver import explain

    try:
        graph = pipeline.function(config)
    except ValidationError as error:
        lines = [f"{pipeline.name}: {error.title}.{place}: {text}" for place, text in explain(error).items()]
        raise UserError("\n".join(lines) or f"{pipeline.name}: {error}") from error
    except (Exception, SystemExit) as error:
        raise _in_file(error, pipeline.file.stem) from error
    if not isinstance(cast("object", graph), Graph):  # the annotation of a user's function is a promise only
        raise UserError(f"{pipeline.name} returned {type(graph).__name__}, not a Graph")
    return graph
