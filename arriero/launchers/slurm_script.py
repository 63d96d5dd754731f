"""The batch script of a run: a component (heterogeneous) or a step (packed) for each role.

The job lives as long as the hub and ends with its exit code. It is started again, within the budget of the
profile, when the hub was told to stop and may go on, or was killed; never when somebody cancelled the job.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from arriero.launchers.cluster import HUBS, Place, Plan, command, start_words
from arriero.launchers.conduct import PREEMPTED
from arriero.launchers.place import ATTEMPT, FIRST
from arriero.launchers.profile import SlurmNeeds

JOB_LOG = "job.log"
_LEAVE_S = 20  # for agents that have been told to leave

# Not by srun's --output, in which 24.11 doesn't know the number of a task.
_TASK = f"""task='exec "$@" >> "$0$((SLURM_PROCID + ${{{FIRST}:-0}})).log" 2>&1'"""
# On several nodes the largest tasks go first: others would take a part of the place of one.
_BEGUN = """\
begun() {
  for _ in $(seq 300); do squeue -h -s -j "$SLURM_JOB_ID" -o %i | grep -q "[.]$1$" && return; sleep 0.2; done
}"""
_END = """\
# The hub decides; the others leave when it says so, which one that was killed can't. TERM is for the tasks.
trap : TERM
while kill -0 $hub 2>/dev/null; do wait $hub; done
wait $hub; code=$?
[ $code -gt 128 ] || for _ in $(seq {leave}); do [ -z "$(jobs -rp)" ] && break; sleep 1; done
kill -KILL $(jobs -rp) 2>/dev/null
if {{ [ $code -eq {preempted} ] || [ $code -gt 128 ]; }} \\
    && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {requeues} ] \\
    && scontrol show job -o "$SLURM_JOB_ID" | grep -q 'JobState=RUNNING'; then
  echo "the run was stopped (code $code) and may go on: requeue"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


def guest_script(plan: Plan) -> str:
    """The job of one more replica; it becomes the agent, so that what Slurm tells it the agent hears."""
    (place,), needs, logs = plan.places, plan.profile.slurm, Path(plan.run_dir) / "logs"
    log = logs / f"joined-{place.role}-%j.log"
    account = [f"--account={needs.account}"] if needs.account else []
    options = [
        f"--job-name={plan.run_id}.{place.name}", f"--output={log}", "--no-requeue",
        f"--signal=B:TERM@{needs.signal_s}", *account, *_component_options(needs),
        *(f"--{key}={value}" if value else f"--{key}" for key, value in needs.options.items()),
        _resources(place, needs),
    ]  # fmt: skip
    exports = [f"export {key}={shlex.quote(value)}" for key, value in place.env.items()]
    words = shlex.join([*start_words(plan), *command(plan, place, "")])
    own = f'{shlex.quote(str(log).removesuffix("%j.log"))}"$SLURM_JOB_ID.log"'
    return "\n".join(["#!/bin/bash", *_headers(options), "", *exports, f"exec {words} --log {own}"]) + "\n"


def script(plan: Plan) -> str:
    """What sbatch gets on its standard input."""
    needs = plan.profile.slurm
    lines = ["#!/bin/bash", *_headers(_job_options(plan, needs))]
    components = _components(plan)
    for index, places in enumerate(components):
        if index:
            lines += [
                "#SBATCH hetjob",
                *_headers([f"--job-name={places[0].name}", *_component_options(needs)]),
            ]
        lines += _headers([_resources(places[0], needs) if index else _allocation(places, needs)])
    start = shlex.join(start_words(plan))
    common = [f"export {key}={shlex.quote(value)}" for key, value in _common(plan).items()]
    lines += ["", f'export {ATTEMPT}="$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}"', *common]
    lines += ["unset SLURM_MEM_PER_CPU  # steps say what they need"]
    lines += [_TASK, f"logs={shlex.quote(str(Path(plan.run_dir) / 'logs'))}", f"start=({start})"]
    lines += [*([_BEGUN] if needs.nodes > 1 else []), ""]
    shared, *apart = components
    spread = needs.nodes > 1
    group = ["--het-group=0"] * bool(apart)
    for number, p in enumerate(sorted(shared, key=_size, reverse=True) if spread else shared):
        lines.append(_step(plan, p, ["--exact", *group, _shared(p, needs)]))
        if spread:
            lines.append(f"begun {number}")
    for index, (p,) in enumerate(apart, start=1):
        lines.append(_step(plan, p, [f"--het-group={index}", _resources(p, needs)]))
    end = _END.format(leave=_LEAVE_S, preempted=PREEMPTED, requeues=plan.profile.requeues)
    return "\n".join(lines) + "\n\n" + end


def _components(plan: Plan) -> list[list[Place]]:
    """First the roles that share one, with the hub, then each that is apart."""
    if plan.profile.slurm.mode == "packed":
        return [list(plan.places)]
    return [[p for p in plan.places if not p.apart], *([p] for p in plan.places if p.apart)]


def _common(plan: Plan) -> dict[str, str]:
    """The part of the environment that all roles have."""
    first = plan.places[0].env
    return {k: v for k, v in first.items() if all(p.env.get(k) == v for p in plan.places)}


def _headers(options: list[str]) -> list[str]:
    return [f"#SBATCH {option}" for option in options]


def _job_options(plan: Plan, needs: SlurmNeeds) -> list[str]:
    """Of the job as a whole, or of its first component."""
    log = Path(plan.run_dir) / "logs" / JOB_LOG
    account = [f"--account={needs.account}"] if needs.account else []
    return [
        f"--job-name={plan.run_id}", f"--output={log}", "--open-mode=append", "--requeue",
        f"--signal=TERM@{needs.signal_s}", *account, *_component_options(needs),
        *(f"--{key}={value}" if value else f"--{key}" for key, value in needs.options.items()),
    ]  # fmt: skip


def _component_options(needs: SlurmNeeds) -> list[str]:
    given = {
        "partition": needs.partition, "qos": needs.qos, "time": needs.time, "constraint": needs.constraint,
    }  # fmt: skip
    return [f"--{key}={value}" for key, value in given.items() if value]


def _resources(place: Place, needs: SlurmNeeds) -> str:
    """Of a component, and of the step in it."""
    words = [f"--ntasks={place.tasks}", f"--cpus-per-task={place.cpus}"]
    if place.hosts > 1:
        words += [f"--nodes={place.tasks}", "--ntasks-per-node=1"]
    if place.memory_mb:
        words.append(f"--mem-per-cpu={-(-place.memory_mb // place.cpus)}M")
    if place.gpus:
        words.append(f"--gpus-per-task={_gpus(place.gpus, needs)}")
    return " ".join(words)


def _allocation(places: list[Place], needs: SlurmNeeds) -> str:
    """One for several roles: an equal part of what they need on each node, and room to fit them in."""

    def share(total: int) -> int:
        return -(-total // needs.nodes)

    cpus = share(sum(p.cpus * p.tasks for p in places))
    if needs.nodes > 1:  # where a task doesn't fit there is less left than it needs
        cpus += max(p.cpus for p in places) - 1
    words = [f"--nodes={needs.nodes}", "--ntasks-per-node=1", f"--cpus-per-task={cpus}"]
    if memory := sum(p.memory_mb * p.tasks for p in places):
        # As other components say it: sbatch doesn't take --mem of one beside --mem-per-cpu of another.
        words.append(f"--mem-per-cpu={-(-share(memory) // cpus)}M")
    if gpus := sum(p.gpus * p.tasks for p in places):
        words.append(f"--gpus-per-node={_gpus(share(gpus), needs)}")
    return " ".join(words)


def _gpus(count: int, needs: SlurmNeeds) -> str:
    return f"{needs.gpu_type}:{count}" if needs.gpu_type else str(count)


def _size(place: Place) -> tuple[int, int, int]:
    return place.hosts, place.gpus, place.cpus


def _shared(place: Place, needs: SlurmNeeds) -> str:
    """Of a step in the allocation that roles share: its memory is for all of them."""
    words = _resources(place.model_copy(update={"memory_mb": 0}), needs) + " --mem=0"
    if place.name == HUBS and needs.nodes > 1:  # a node that is lost takes one of them with it, not both
        return f"{words} --nodes={min(needs.nodes, place.tasks)} --ntasks-per-node=1"
    return words if place.hosts > 1 else f"{words} --nodes=1-{min(needs.nodes, place.tasks)}"


def _step(plan: Plan, place: Place, where: list[str]) -> str:
    """One srun for all tasks of a role, in the background."""
    common = _common(plan)
    own = [f"{key}={value}" for key, value in place.env.items() if key not in common]
    log = f"{place.role}-0." if place.hosts > 1 else f"{place.role}-"
    srun = ["srun", *where, f"--job-name={place.name}", "--kill-on-bad-exit=0"]
    srun += ["env", shlex.join(own)] if own else []
    srun += ['bash -c "$task"', f'"$logs"/{log}']
    words = shlex.join(command(plan, place, "SLURM_PROCID"))
    text = f'{" ".join(srun)} \\\n    "${{start[@]}}" {words} &'
    return text + "\nhub=$!" if place is plan.places[0] else text
