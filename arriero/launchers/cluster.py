"""A graph on a cluster: what each role needs and runs, and all of it as a TorchX app.

The hub is the first role; every other replica finds it by `hub.json` in the run directory, which every node
sees. No port is fixed: whoever listens takes a free one and says which. No secret is in any of it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path

from pydantic import NonNegativeInt, PositiveInt
from torchx.specs import AppDef, BindMount, Resource, Role, VolumeMount, macros, named_resources, resource

from arriero.engine.errors import GraphError, UserError
from arriero.launchers.appdef import HUB, computes, shapes
from arriero.launchers.place import FIRST
from arriero.launchers.profile import Profile, RoleNeeds, Where
from arriero.launchers.rundir import read_json, write_json
from arriero.launchers.ship import FOLDER
from arriero.schemas.graph import GraphSpec, NodeSpec
from arriero.schemas.messages import Message

HUBS = "hubs"  # what schedulers call the hubs beside the first
PLAN = "arriero"  # the plan in the metadata of a TorchX app
JOB_FILE, PLAN_FILE, GUESTS_FILE = "job.json", "plan.json", "guests.json"
BUNDLE_MOUNT = "/arriero"  # where pods find the code and the description of the run
_NAME_CHARS, _HASH_CHARS = 40, 8
_POD_CHARS = 63  # of its name, which holds those of the run and of the role


class Place(Message):
    """One role on a cluster, and what one task of it needs; `memory_mb` 0: not stated.

    A task is what the scheduler starts: a replica, or one host of a role whose ranks don't fit on one host.
    `ranks` are those of a task, `name` is the role's for schedulers. `apart`: on nodes of its own.
    """

    role: str
    name: str
    tasks: PositiveInt = 1
    hosts: PositiveInt = 1
    ranks: PositiveInt = 1
    cpus: PositiveInt
    gpus: NonNegativeInt = 0
    memory_mb: NonNegativeInt = 0
    apart: bool = False
    env: dict[str, str]
    image: str = ""


class Plan(Message):
    """All that a scheduler must know of a run, which it calls `name`; `places` begin with the hub.

    `code`: digest of what is shipped; `start`: the program that checks and unpacks it, as the nodes see it.
    `description`: the folder here that the run is described in. `joins`: the plan is that of one more replica
    for a run that goes on, and has one place.
    """

    run_id: str
    name: str
    run_dir: str
    description: str
    start: str
    code: str
    profile: Profile
    places: tuple[Place, ...]
    joins: bool = False

    @property
    def python(self) -> str:
        return self.profile.python or (sys.executable if self.profile.on == "slurm" else "python3")


class Job(Message):
    """`job.json` in a run directory: how the scheduler calls a run; of a local one, who conducts it."""

    on: Where
    app_id: str
    run_dir: str

    @property
    def handle(self) -> str:
        return f"{self.on}://{self.app_id}"


class Guest(Message):
    """How the scheduler calls the job of a replica that joined, or is to."""

    role: str
    app_id: str


class GuestsFile(Message):
    """`guests.json` in the directory of a run on Slurm, oldest first; Kubernetes knows by itself."""

    guests: tuple[Guest, ...] = ()


def remember(plan: Plan, app_id: str) -> None:
    """Write how the scheduler calls the run where `arriero status` looks for it, and how it was placed."""
    folder = Path(plan.description)
    if plan.joins:
        guests = (*guests_of(folder), Guest(role=plan.places[0].role, app_id=app_id))
        write_json(folder / GUESTS_FILE, GuestsFile(guests=guests))
        return
    write_json(folder / PLAN_FILE, plan, mode=0o600)  # its environment may hold what is nobody's business
    write_json(folder / GUESTS_FILE, GuestsFile())
    write_json(folder / JOB_FILE, Job(on=plan.profile.on, app_id=app_id, run_dir=plan.run_dir))


def guests_of(description: Path) -> tuple[Guest, ...]:
    """The jobs that were submitted for a run later."""
    file = description / GUESTS_FILE
    return read_json(file, GuestsFile).guests if file.exists() else ()


def guest_plan(plan: Plan, role: str) -> Plan:
    """That of one more replica of `role`, beside the job that was submitted by `plan`."""
    place = next(p for p in plan.places if p.role == role)
    return plan.model_copy(update={"places": (place.model_copy(update={"tasks": 1}),), "joins": True})


def plan(
    spec: GraphSpec, profile: Profile, *, run_id: str, run_dir: str, description: Path, code: str, hubs: int
) -> Plan:
    """Where the roles of `spec` go. Raises GraphError and UserError for what the cluster can't take."""
    places = [_place(HUB, HUB, profile, profile.hub, ())]
    names = {HUB: HUB}
    if hubs > 1:
        names[HUBS] = "the other hubs"
        places.append(_peers(places[0], hubs - 1))
    for role, nodes in shapes(spec).items():
        name = scheduler_name(role)
        if name in names:
            raise GraphError(
                f"roles {names[name]} and {role} are both called {name} by schedulers; rename one"
            )
        names[name] = role
        places.append(_place(role, name, profile, profile.roles.get(role, RoleNeeds()), nodes))
    if unknown := sorted(profile.roles.keys() - spec.roles.keys()):
        known = ", ".join(spec.roles)
        raise UserError(f"the profile has needs for {unknown[0]}, which is no role of {spec.name}: {known}")
    _refuse_one_host(spec, profile)
    folder = BUNDLE_MOUNT if profile.on == "kubernetes" else f"{run_dir}/{FOLDER}"
    if profile.on == "kubernetes" and not all(p.image for p in places):
        raise UserError(
            "on Kubernetes a run needs an image with Python and torch: image = ... in the profile"
        )
    return Plan(
        run_id=run_id, name=_run_name(run_id, places), run_dir=run_dir, description=str(description),
        start=f"{folder}/start.py", code=code, profile=profile, places=tuple(places),
    )  # fmt: skip


def scheduler_name(role: str, chars: int = _NAME_CHARS) -> str:
    """The role's name in at most `chars` letters and digits, the first a letter: every scheduler accepts it.

    One that is too long, or doesn't begin with a letter, is told from others by a hash at its end.
    """
    plain = re.sub(r"[^a-z0-9]", "", role.lower())
    if plain[:1].isalpha():
        return plain if len(plain) <= chars else _hashed(plain, role, chars)
    return _hashed(f"r{plain}", role, chars)


def _run_name(run_id: str, places: Sequence[Place]) -> str:
    """The run's as a DNS label that begins with a letter, with room for the rest of its pods' names."""
    plain = re.sub(r"[^a-z0-9]", "-", run_id.lower()).strip("-")
    name = plain if plain[:1].isalpha() else f"r{plain}"
    chars = _POD_CHARS - max(len(f"-{p.name}-{p.tasks - 1}") for p in places)
    return name if len(name) <= chars else _hashed(name, run_id, chars)


def _hashed(name: str, whole: str, chars: int) -> str:
    """The beginning of `name`, and a hash of what it stands for."""
    return name[: chars - _HASH_CHARS] + sha256(whole.encode()).hexdigest()[:_HASH_CHARS]


def command(plan: Plan, place: Place, replica: str) -> list[str]:
    """What a task runs, after `start_words`; `replica` is its number or the variable that holds it."""
    arrive = ["--run-dir", plan.run_dir, "--arrive-s", f"{plan.profile.arrive_s:g}"]
    if place.name == HUBS:
        hubs = str(1 + place.tasks)
        return ["arriero.launchers.hub_peer", *arrive, "--replica", replica, "--hubs", hubs]
    if place.role == HUB:
        several = [w for p in plan.places if p.hosts > 1 for w in ("--hosts", f"{p.role}={p.hosts}")]
        bundle = [] if plan.start.startswith(plan.run_dir) else ["--bundle", str(Path(plan.start).parent)]
        log = ["--log", f"arriero logs {plan.run_dir} {{}}"]
        return ["arriero.launchers.conduct", *arrive, *several, *bundle, *log]
    ranked = ["--ranks", str(place.ranks)] if place.ranks > 1 else []
    ranked += ["--hosts", str(place.hosts)] if place.hosts > 1 else []
    role = ["--role", place.role, *(["--join"] if plan.joins else ["--replica", replica])]
    return ["arriero.launchers.agent", *arrive, *role, *ranked, *_secret_files(plan.profile)]


def start_words(plan: Plan) -> list[str]:
    """What checks the code and becomes the program that `command` names."""
    return [plan.python, plan.start, plan.code]


def cluster_app(plan: Plan) -> AppDef:
    """The plan as a TorchX app, for its schedulers, and with the plan itself for ours."""
    mounts = [_mount(text) for text in plan.profile.mounts]
    roles = [
        Role(
            name=place.name,
            image=place.image,
            entrypoint=words[0],
            args=words[1:],
            env=dict(place.env),
            num_replicas=place.tasks,
            resource=Resource(cpu=place.cpus, gpu=place.gpus, memMB=place.memory_mb),
            mounts=list(mounts),
        )
        for place in plan.places
        for words in [[*start_words(plan), *command(plan, place, macros.replica_id)]]
    ]
    return AppDef(name=scheduler_name(plan.run_id, 20), roles=roles, metadata={PLAN: plan.model_dump_json()})


def _place(role: str, name: str, profile: Profile, needs: RoleNeeds, nodes: tuple[NodeSpec, ...]) -> Place:
    resources = [n.resources for n in nodes]
    cpus = needs.cpus or max(1, sum(r.cpus for r in resources))
    memory = needs.memory_mb or sum(r.memory_mb for r in resources)
    wanted = profile.gpus if any(computes(n) for n in nodes) else 0
    gpus = needs.gpus if needs.gpus is not None else sum(r.gpus for r in resources) or wanted
    ranks, replicas = (nodes[0].ranks, nodes[0].replicas) if nodes else (1, 1)
    hosts = _hosts(role, ranks, gpus, profile.gpus_per_node)
    ranks //= hosts
    cpus, gpus, memory = cpus * ranks, gpus * ranks, memory * ranks
    if needs.resource:
        if needs.resource not in named_resources:
            raise UserError(
                f"roles.{role}.resource = {needs.resource!r}: TorchX knows no such named resource"
            )
        named = resource(h=needs.resource)
        cpus, gpus, memory = int(named.cpu), named.gpu, named.memMB
    threads = str(max(1, cpus // ranks))
    return Place(
        role=role, name=name, tasks=replicas * hosts, hosts=hosts, ranks=ranks,
        apart=bool(gpus) if needs.apart is None else needs.apart,
        cpus=cpus, gpus=gpus, memory_mb=memory, image=needs.image or profile.image,
        env={
            "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1", **profile.env, **needs.env,
        },
    )  # fmt: skip


def _peers(hub: Place, count: int) -> Place:
    """The hubs that replicate the first one."""
    return hub.model_copy(update={"name": HUBS, "tasks": count, "env": {**hub.env, FIRST: "1"}})


def _hosts(role: str, ranks: int, gpus: int, gpus_per_node: int) -> int:
    """How many hosts the ranks of a replica need."""
    if gpus > gpus_per_node:
        raise UserError(f"role {role}: a rank needs {gpus} GPUs, a node has {gpus_per_node} (gpus_per_node)")
    hosts = -(-ranks * gpus // gpus_per_node) or 1
    while ranks % hosts:
        hosts += 1
    return hosts


def _refuse_one_host(spec: GraphSpec, profile: Profile) -> None:
    """Shared memory reaches one host only."""
    if profile.on == "slurm" and profile.slurm.mode == "packed" and profile.slurm.nodes == 1:
        return
    for node in spec.nodes:
        weights = node.config.get("weights")
        if (
            isinstance(weights, dict)
            and weights.get("transport", "shm") == "shm"
            and "lease_timeout_s" in weights
        ):
            raise UserError(
                f"{node.name}: weights.transport = shm, shared memory, reaches one host only; "
                "take nixl, gloo, nccl or store"
            )


def _secret_files(profile: Profile) -> Iterable[str]:
    """On Slurm a secret is a file; Kubernetes puts it into the environment itself."""
    for name, reference in profile.secrets.items() if profile.on == "slurm" else ():
        yield from ("--secret", f"{name}={reference}")


def _mount(text: str) -> BindMount | VolumeMount:
    source, target, *rest = text.split(":")
    kind = BindMount if source.startswith("/") else VolumeMount
    return kind(source, target, read_only=rest == ["ro"])
