"""Profiles: what a cluster needs to be told, from `arriero.toml` in the current directory.

[profile.NAME]              on, python, image, run_root, gpus, gpus_per_node, env, secrets, mounts, ...
[profile.NAME.roles.ROLE]   what one rank of a role needs
[profile.NAME.slurm]        partition, account, time, mode, ...
[profile.NAME.kubernetes]   namespace, queue, tolerations, ...
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass

from arriero.engine.errors import UserError
from arriero.launchers.keys import nearest

FILE = Path("arriero.toml")
Cluster = Literal["slurm", "kubernetes"]
Where = Literal["local", "slurm", "kubernetes"]
STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RoleNeeds:
    """What one rank of a role needs, instead of what the graph and the profile say; `cpus` cores of one node.

    `resource`: a named resource of TorchX, of which a replica gets all. `apart`: on nodes of its own in a
    heterogeneous job of Slurm; by default roles with GPUs are.
    """

    cpus: PositiveInt | None = None
    gpus: NonNegativeInt | None = None
    memory_mb: PositiveInt | None = None
    resource: str = ""
    apart: bool | None = None
    env: dict[str, str] = Field(default_factory=dict)
    image: str = ""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SlurmNeeds:
    """What goes to sbatch. `mode`: `heterogeneous`, a component for each role that is apart and one for the
    rest, or `packed`, one allocation for all. `nodes`: of the allocation that roles share.

    `signal_s`: seconds before the end of the time limit at which the run is told to stop and requeue.
    `options`: any others of sbatch, by name.
    """

    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""
    constraint: str = ""
    gpu_type: str = ""
    mode: Literal["heterogeneous", "packed"] = "heterogeneous"
    nodes: PositiveInt = 1
    signal_s: PositiveInt = 120
    options: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Toleration:
    """As in a pod: lets it run on nodes with this taint."""

    key: str = ""
    operator: Literal["Exists", "Equal"] = "Exists"
    value: str = ""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class KubernetesNeeds:
    """What goes into the Volcano job. `topology`: the node label whose value all pods should share, such as
    `topology.kubernetes.io/zone`. `shm_gb`: size of /dev/shm. `gpu_resource`: what the nodes call their GPUs.
    """

    namespace: str = "default"
    queue: str = "default"
    service_account: str = ""
    priority_class: str = ""
    topology: str = ""
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    image_pull_secrets: tuple[str, ...] = ()
    gpu_resource: str = "nvidia.com/gpu"
    shm_gb: PositiveInt = 8
    run_as_user: NonNegativeInt | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Profile:
    """How a run is placed on a cluster.

    `run_root`: where run directories lie, the same path on every node. `gpus`: of each rank that computes,
    where the graph doesn't say; `gpus_per_node`: more ranks than fit on a node are spread over several.
    `secrets`: environment variables by reference, `secret/key` of Kubernetes or a file on Slurm.
    `mounts`: `claim:/path`, `/host/path:/path`, with `:ro` at the end for read-only (Kubernetes).
    `arrive_s` bounds the wait for all replicas to start. `requeues`: times that a preempted run starts again.
    """

    on: Cluster = "slurm"
    python: str = ""
    image: str = ""
    run_root: str = "runs"
    gpus: NonNegativeInt = 0
    gpus_per_node: PositiveInt = 8
    env: dict[str, str] = Field(default_factory=dict)
    secrets: dict[str, str] = Field(default_factory=dict)
    mounts: tuple[Annotated[str, Field(pattern=r"^[^:]+:/[^:]*(:ro)?$")], ...] = ()
    arrive_s: PositiveFloat = 900.0
    requeues: NonNegativeInt = 3
    hub: RoleNeeds = RoleNeeds(cpus=2, memory_mb=4096)
    roles: dict[str, RoleNeeds] = Field(default_factory=dict)
    slurm: SlurmNeeds = SlurmNeeds()
    kubernetes: KubernetesNeeds = KubernetesNeeds()


def read_profile(on: Cluster | None, name: str, file: Path = FILE) -> Profile:
    """The profile `name`, by default the one called like the scheduler; without a file, one of defaults.

    Raises UserError with one line per mistake.
    """
    wanted = name or on or "slurm"
    tables: Mapping[str, dict[str, Any]] = _tables(file) if file.exists() or name else {}
    if wanted not in tables:
        if name:
            known = ", ".join(tables) or "none"
            raise UserError(f"{file} has no [profile.{name}]; there are: {known}")
        return Profile(on=on or "slurm")
    table = {"on": on or "slurm", **tables[wanted]}
    try:
        profile = TypeAdapter(Profile).validate_python(table)
    except ValidationError as error:
        raise UserError("\n".join(_explain(error, f"{file}: profile.{wanted}"))) from error
    if on and profile.on != on:
        raise UserError(
            f"{file}: profile.{wanted}.on = {profile.on!r}, but --on {on}; name another --profile"
        )
    return profile


def needs_of(profile: Profile, role: str) -> RoleNeeds:
    return profile.roles.get(role, RoleNeeds())


def _tables(file: Path) -> Mapping[str, dict[str, Any]]:
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file} can't be read: {error.strerror}; it holds the profiles") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not TOML: {error}") from error
    tables = found.get("profile", {})
    if extra := sorted(found.keys() - {"profile"}):
        raise UserError(f"{file}: unknown table {extra[0]}; a profile is a table [profile.NAME]")
    return cast("Mapping[str, dict[str, Any]]", tables)


def _explain(error: ValidationError, place: str) -> list[str]:
    lines: list[str] = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            close = nearest(key, _keys(Profile))
            hint = (
                f"did you mean {close}?"
                if close
                else f"keys are {', '.join(f.name for f in fields(Profile))}"
            )
            lines.append(f"{place}.{key}: unknown key; {hint}")
        else:
            text = item["msg"].replace("Input should", "should", 1)
            lines.append(f"{place}.{key} = {item['input']!r} {text}")
    return lines


def _keys(cls: type[Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for f in fields(cls):
        found.append(prefix + f.name)
        default: Any = f.default
        if is_dataclass(default):
            found += _keys(cast("type[Any]", type(default)), f"{prefix}{f.name}.")
    return found
