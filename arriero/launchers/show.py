"""What `arriero check` and `--help` print."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from arriero.engine.errors import UserError
from arriero.launchers.catalog import Pipeline
from arriero.launchers.keys import MISSING, Key, documented, layout
from arriero.schemas.graph import GraphSpec

PIPE_WIDTH = 160  # columns of a table where the output is no terminal


def report(
    pipeline: Pipeline, config: object, sources: Mapping[str, str], spec: GraphSpec, hubs: int, out: IO[str]
) -> None:
    """The resolved configuration, who waits for whom, the roles, and the graph as Mermaid."""
    from arriero.engine import picture

    print(f"{pipeline.name}: {pipeline.doc.partition(chr(10))[0]}\ngraph {spec.digest}", file=out)
    table("configuration", [("key", "value", "from"), *_config_rows(config, sources)], out)
    table("graph", picture.table(spec), out)
    table("roles", _role_rows(spec, hubs), out)
    print(picture.mermaid(spec), end="", file=out)


def write_picture(spec: GraphSpec, path: Path) -> None:
    """Raises UserError for another suffix than .svg and .mmd, or where nothing can be written."""
    from arriero.engine import picture

    drawers = {".svg": picture.svg, ".mmd": picture.mermaid}
    if path.suffix not in drawers:
        raise UserError(f"--picture {path}: the name must end in {' or '.join(drawers)}")
    try:
        path.write_text(drawers[path.suffix](spec), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--picture {path}: {error.strerror}") from error


def help_text(command: str, pipeline: Pipeline, options_type: type[Any]) -> str:
    """Every key of the pipeline and every option of the command: type, default and what the source says."""
    lines = [f"usage: arriero {command} {pipeline.name} [--key value ...] [--config FILE.toml] [options]", ""]
    lines += [pipeline.doc, "", "keys (in a TOML file, tables are sections):"]
    owner = pipeline.config_type
    for key, doc in sorted(documented(layout(pipeline.config_type)), key=lambda item: "." in item[0].name):
        if key.owner is not None and key.owner is not owner:
            owner = key.owner
            lines += ["", f"  {key.name.removesuffix('.' + key.field)}{_when(key)}: {_class_doc(owner)}"]
        lines += _help_lines(key, doc)
    lines += ["", "options:"]
    for key, doc in documented(layout(options_type)):
        lines += _help_lines(key, doc)
    parts = [name.partition(".") for name in layout(pipeline.config_type).names]
    short = [f"--{section} {key.upper()}" for section, _, key in parts if key in ("path", "kind")]
    return "\n".join([*lines, "", f"A section takes its path or kind directly: {', '.join(short)}."])


def words(value: object) -> str:
    """A value as one would give it on the command line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ",".join(words(v) for v in cast("Sequence[object]", value)) or "''"
    return str(value) if value != "" else "''"


def _help_lines(key: Key, doc: str) -> list[str]:
    default = "required" if key.default is MISSING else f"default {words(key.default)}"
    line = f"  --{key.name} {key.takes}  [{default}]"
    return [line, f"      {doc}"] if doc else [line]


def _when(key: Key) -> str:
    return f" ({key.when})" if key.when else ""


def _class_doc(cls: type[Any]) -> str:
    doc = cls.__doc__ or ""
    # A dataclass without a docstring is given its signature as one.
    return cls.__name__ if not doc or doc.startswith(f"{cls.__name__}(") else doc.strip().partition("\n")[0]


def _config_rows(config: object, sources: Mapping[str, str]) -> Iterable[tuple[str, ...]]:
    from arriero.launchers.provenance import MASK, is_secret
    from arriero.launchers.resolver import flatten

    for key, value in flatten(config).items():
        yield key, MASK if value and is_secret(key) else words(value), sources[key]


def _role_rows(spec: GraphSpec, hubs: int) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("role", "nodes", "replicas", "ranks", "cpus", "gpus", "memory")]
    rows.append(("hub", "the message broker", str(hubs), "1", "1", "0", "-"))
    for role, nodes in spec.roles.items():
        needs = [n.resources for n in nodes]
        memory = sum(r.memory_mb for r in needs)
        cpus, gpus = sum(r.cpus for r in needs), sum(r.gpus for r in needs)
        rows.append(
            (
                role, ", ".join(n.name for n in nodes), str(max(n.replicas for n in nodes)),
                str(max(n.ranks for n in nodes)), str(cpus), str(gpus),
                f"{memory} MB" if memory else "-",
            )
        )  # fmt: skip
    return rows


def table(title: str, rows: Sequence[Sequence[str]], out: IO[str]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*rows[0], title=title, title_justify="left", box=SIMPLE_HEAD)
    for row in rows[1:]:
        table.add_row(*(Text(cell) for cell in row))  # not markup: cells hold brackets
    Console(file=out, width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)
