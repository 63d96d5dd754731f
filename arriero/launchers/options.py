"""Configuration from its type: defaults, then a TOML file, then the command line; all problems told at once.

Own code and not pydantic-settings or tyro: neither gives the program the source of a value, names the
nearest of all keys (of every union member too), or goes on after the first mistake of a command line.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar, cast

from pydantic import Field, NonNegativeInt, PositiveFloat
from pydantic.dataclasses import dataclass

from arriero.engine.errors import UserError
from arriero.launchers.keys import layout
from arriero.launchers.resolver import COMMAND_LINE, Given, resolve_assignments
from arriero.schemas.run import SinkName

T = TypeVar("T")
C = TypeVar("C")

Assignment = tuple[str, Given]


@dataclass(frozen=True, kw_only=True)
class Hub:
    """The message broker of a run."""

    replicas: Literal[1, 3] = 1  # three replicate every message: any one may be lost, and the run goes on


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the command, which no pipeline may use as keys of its own."""

    config: Path | None = None  # TOML file with keys of the pipeline, tables for sections
    run_dir: str = ""  # directory that records the run; default runs/<pipeline>-<time>
    on: Literal["local", "slurm", "kubernetes"] = "local"  # where: this machine, or a cluster
    profile: str = ""  # of arriero.toml; default the one called like the cluster
    wait: bool = False  # on a cluster: show what the run says until it is over
    overwrite: bool = False  # empty the run directory if it has been used
    resume: Path | None = None  # a run's directory: go on with it, with the options that it had
    allow_change: tuple[str, ...] = ()  # with resume: keys that may differ from what the run was made of
    inline: bool = False  # everything in this process, without servers
    deterministic: bool = False  # the same numbers every time, at some cost in speed
    seed: NonNegativeInt = 0
    port: Annotated[int, Field(ge=0, le=65535)] = 0  # of the (first) hub; 0: a free one
    hub: Hub = Hub()
    wait_bound_s: PositiveFloat = 1800.0  # longest wait for a record, a place or a version
    liveness_s: Annotated[float, Field(ge=3)] = 30.0  # oldest heartbeat of a role that is alive; one a second
    restarts: NonNegativeInt = 3  # times that each process, and the whole run, starts again after a kill
    max_dead_letters: NonNegativeInt = 0  # records that may fail for good before the run does
    record: bool = True  # keep the lineage: every rollout, batch and version, for audit and questions
    record_url: str = ""  # where: any fsspec URL; default lineage/ in the run directory
    sinks: tuple[SinkName, ...] = ("tensorboard",)  # who gets every measure of every step
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None  # for Prometheus; 0: a free one
    metrics_host: str = "127.0.0.1"  # address that it is served on, to whoever can reach it
    quiet: bool = False  # print the final result only
    picture: Path | None = None  # check: write the graph's picture to FILE.svg or FILE.mmd
    json: bool = False  # check: print the graph, eval: the result, as JSON and nothing else
    laws: bool = False  # check: try the losses of the graph against the laws that every loss must hold to


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How the roles of a run are started; `python_path` must be on their module search path."""

    port: Annotated[int, Field(ge=0, le=65535)] = 0
    quiet: bool = False
    result: bool = True  # show the result when it is over
    python_path: tuple[str, ...] = ()


def resolve(config_type: type[T], toml: Path | None, args: Sequence[str]) -> tuple[T, dict[str, str]]:
    """The configuration, and where each value came from by dotted key: "default", the file or "command line".

    Raises UserError with one line per problem.
    """
    problems: list[str] = []
    words = read_words(args, layout(config_type).flags, problems)
    config, sources = resolve_assignments(config_type, [*read_toml(toml), *words], problems)
    if problems:
        raise UserError("\n".join(problems))
    return cast("T", config), sources


def resolve_command(
    config_type: type[T], options_type: type[C], args: Sequence[str], base: Sequence[Assignment] = ()
) -> tuple[C, T, dict[str, str]]:
    """The command's own options, the configuration and its sources. Raises UserError with all problems.

    `base` is what holds where neither a file nor the command line says something else.
    """
    problems: list[str] = []
    own, keys = layout(options_type), layout(config_type)
    if clashes := sorted({*own.names} & {*keys.names, *keys.sections}):
        raise UserError(
            f"{config_type.__name__}: {', '.join(clashes)} is an option of the command; rename the field"
        )
    words = read_words(args, own.flags | keys.flags, problems)
    options, _ = resolve_assignments(options_type, [w for w in words if w[0] in own.names], problems)
    # Read from the words: where another option is wrong there are no `options`, but the file still counts.
    toml = next((Path(given.value[0]) for name, given in reversed(words) if name == "config"), None)
    rest = [*base, *read_toml(toml), *(w for w in words if w[0] not in own.names)]
    config, sources = resolve_assignments(config_type, rest, problems, also=own.names)
    if problems:
        raise UserError("\n".join(problems))
    return cast("C", options), cast("T", config), sources


def read_words(args: Sequence[str], flags: Collection[str], problems: list[str]) -> list[Assignment]:
    """`--key value`, `--key=value` and, for flags, `--key`; what can't be read is added to `problems`."""
    found: list[Assignment] = []
    rest = list(args)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            problems.append(f"{word!r} stands alone; write --key value")
            continue
        name, equals, value = word[2:].partition("=")
        key = name.replace("-", "_")
        if equals:
            pass
        elif key in flags and not (rest and rest[0].lower() in {"true", "false", "none"}):
            value = "true"
        elif rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        else:
            problems.append(
                f"--{name} needs a value: --{name} value, or --{name}=--value if it starts with --"
            )
            continue
        found.append((key, Given(value=[value], source=COMMAND_LINE, words=True)))
    return found


def read_toml(path: Path | None) -> list[Assignment]:
    """Top-level keys of the file. Raises UserError if it can't be read, with the line."""
    if path is None:
        return []
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}; --config takes a TOML file") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not TOML: {error}") from error
    return [(name, Given(value=value, source=str(path))) for name, value in tables.items()]
