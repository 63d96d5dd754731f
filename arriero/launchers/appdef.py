"""A graph as a TorchX app: `hub` first, so that TorchX's rank-0 address finds it, then one role per role.

No secret is in it: what opens the broker reaches the processes through the launcher's environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torchx.specs import AppDef, Resource, Role, macros

from arriero.engine.errors import GraphError
from arriero.engine.portable import resolve
from arriero.schemas.graph import GraphSpec, NodeSpec
from arriero.schemas.run import RunOptions

HUB = "hub"
REPLICA = "ARRIERO_REPLICA"  # "<role>-<replica>"


def app_def(
    spec: GraphSpec, options: RunOptions, run_dir: Path, *, port: int = 0, cores: int | None = None
) -> AppDef:
    """The app that runs `spec` from `run_dir`; its threads share `cores` (None: those we may use).

    Raises GraphError for roles that can't be one process.
    """
    threads = thread_counts(spec, options, cores or len(os.sched_getaffinity(0)))
    place = ["--run-dir", str(run_dir)]
    server = ["-m", "arriero.launchers.hub", *place, "--replica", macros.replica_id, "--port", str(port)]
    hub = _role(HUB, server, threads=1, replicas=options.hubs)
    return AppDef(
        name=spec.name, roles=[hub, *(_graph_role(n, g, place, threads[n]) for n, g in shapes(spec).items())]
    )


def shapes(spec: GraphSpec) -> dict[str, tuple[NodeSpec, ...]]:
    """Nodes by role, all of one shape. Raises GraphError if they aren't, or for a role named like the hub."""
    for role, nodes in spec.roles.items():
        if role == HUB:
            raise GraphError(
                f"{nodes[0].name}: the role name {HUB} is taken by the message broker; choose another"
            )
        if len({(n.replicas, n.ranks) for n in nodes}) > 1:
            each = ", ".join(f"{n.name} {n.replicas} x {n.ranks}" for n in nodes)
            raise GraphError(
                f"role {role}: its nodes share a process but differ in replicas x ranks ({each}); "
                "give them equal numbers or roles of their own"
            )
    return spec.roles


def thread_counts(spec: GraphSpec, options: RunOptions, cores: int) -> dict[str, int]:
    """Threads of one process of each role: those that compute share the cores, the others get one."""
    computing = {role: nodes for role, nodes in spec.roles.items() if any(computes(n) for n in nodes)}
    processes = sum(nodes[0].replicas * nodes[0].ranks for nodes in computing.values())
    share = max(1, cores // max(1, processes))
    return {role: options.threads.get(role, share if role in computing else 1) for role in spec.roles}


def visible_devices(spec: GraphSpec, gpus: Sequence[str]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES by "<role>-<replica>", on a host with these `gpus` (numbers or UUIDs).

    One GPU for each rank of a role that computes, in the order of the graph; when there are too few they are
    shared round robin. Roles that take turns (`placement.devices`) begin at the same GPU. Other roles see
    none. Without GPUs nothing is set.
    """
    devices: dict[str, str] = {}
    taken, turns = 0, -1
    for role, nodes in shapes(spec).items() if gpus else ():
        ranks = min(nodes[0].ranks, len(gpus)) if any(computes(n) for n in nodes) else 0
        first = taken
        if any(_takes_turns(n) for n in nodes):
            turns = first = turns if turns >= 0 else taken
        for replica in range(nodes[0].replicas):
            devices[f"{role}-{replica}"] = ",".join(gpus[(first + i) % len(gpus)] for i in range(ranks))
            first += ranks
        taken = max(taken, first)
    return devices


def computes(node: NodeSpec) -> bool:
    """Whether the component's class says `computes: ClassVar[bool] = True`: it keeps cores busy."""
    return bool(getattr(resolve(node.component), "computes", False))


def _takes_turns(node: NodeSpec) -> bool:
    placement = node.config.get("placement")
    return isinstance(placement, dict) and placement.get("devices") == "turns"


def _graph_role(name: str, nodes: tuple[NodeSpec, ...], place: list[str], threads: int) -> Role:
    first = nodes[0]
    program = ["-m", "arriero.launchers.role", *place, "--role", name, "--replica", macros.replica_id]
    if first.ranks > 1:
        program = [
            "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(first.ranks),
            "--max-restarts", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *program,
        ]  # fmt: skip
    resource = Resource(
        cpu=sum(n.resources.cpus for n in nodes) * first.ranks,
        gpu=sum(n.resources.gpus for n in nodes) * first.ranks,
        memMB=sum(n.resources.memory_mb for n in nodes) * first.ranks,
    )
    return _role(name, program, threads=threads, replicas=first.replicas, resource=resource)


def _role(
    name: str, args: list[str], *, threads: int, replicas: int = 1, resource: Resource | None = None
) -> Role:
    return Role(
        name=name,
        image="",
        entrypoint=sys.executable,
        args=args,
        env={
            REPLICA: f"{name}-{macros.replica_id}",
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",  # a waiting thread must not take the core from another role
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        },
        num_replicas=replicas,
        resource=resource or Resource(cpu=1, gpu=0, memMB=0),
    )
