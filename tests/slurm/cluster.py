"""A real Slurm on loopback: slurmctld, four slurmd, munge; as root, from Debian's packages.

    apt-get install --no-install-recommends slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins

No systemd, no cgroups, no accounting. Each node has eight CPUs and two GPUs, which are empty files. Jobs of
the partition `urgent` preempt those of `main`.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

NODES, CPUS, MEMORY_MB, GPUS = 4, 8, 8000, 2
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
_CONTROL_PORT, _NODE_PORTS = 16817, f"17001-{17000 + NODES}"


def missing() -> str:
    """Why there can be no Slurm here; empty if there can."""
    if os.getuid() != 0:
        return "slurmd and munged need root"
    absent = [p for p in PROGRAMS if shutil.which(p) is None and not Path("/usr/sbin", p).exists()]
    return (
        f"{', '.join(absent)} not installed (Debian: slurmctld slurmd slurm-client munge)" if absent else ""
    )


@contextmanager
def slurm(folder: Path) -> Generator[dict[str, str]]:
    """The environment in which sbatch finds the cluster."""
    for name in ("state", "log", *(f"spool/n{k}" for k in range(1, NODES + 1))):
        (folder / name).mkdir(parents=True)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    environment["PATH"] += ":/usr/sbin"
    _write_configuration(folder)
    before = signal.signal(signal.SIGTERM, _interrupt)  # or the daemons would outlive a time limit
    with _named_nodes(), _munge():
        try:
            subprocess.run(["slurmctld", "-c"], env=environment, check=True)
            for k in range(1, NODES + 1):
                subprocess.run(["slurmd", "-N", f"n{k}"], env=environment, check=True)
            _until_idle(environment)
            yield environment
        finally:
            subprocess.run(["scancel", "--full", "--user=root"], env=environment, check=False)
            time.sleep(0.5)
            for file in (*folder.glob("slurmd-*.pid"), *folder.glob("slurmctld.pid")):
                with suppress(ProcessLookupError, FileNotFoundError, ValueError):
                    os.kill(int(file.read_text()), 15)
            signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _write_configuration(folder: Path) -> None:
    for k in range(GPUS):
        (folder / f"gpu{k}").touch()
    (folder / "gres.conf").write_text(f"NodeName=n[1-{NODES}] Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n")
    said = subprocess.run(["/usr/sbin/slurmctld", "-V"], capture_output=True, text=True, check=True).stdout
    major, minor = (int(part) for part in said.split()[1].split(".")[:2])
    if (major, minor) >= (23, 11):  # older ones don't know the word
        (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(f"""\
ClusterName=ci
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
MpiDefault=none
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,defer_batch=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPort={_CONTROL_PORT}
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
KillWait=30
AuthInfo=cred_expire=5
MinJobAge=300
InactiveLimit=0
SlurmctldTimeout=30
SlurmdTimeout=60
GresTypes=gpu
NodeName=n[1-{NODES}] NodeHostname={host} NodeAddr=127.0.1.[1-{NODES}] Port=[{_NODE_PORTS}] \
CPUs={CPUS} RealMemory={MEMORY_MB} Gres=gpu:{GPUS} State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
""")


@contextmanager
def _named_nodes() -> Generator[None]:
    """The nodes reach each other by name."""
    hosts = Path("/etc/hosts")
    before = hosts.read_text()
    hosts.write_text(before + "".join(f"127.0.1.{k} n{k}\n" for k in range(1, NODES + 1)))
    try:
        yield
    finally:
        hosts.write_text(before)


@contextmanager
def _munge() -> Generator[None]:
    for name in ("/run/munge", "/var/log/munge"):
        Path(name).mkdir(exist_ok=True)
        shutil.chown(name, "munge", "munge")
        Path(name).chmod(0o755)
    if not _munged():
        subprocess.run(["runuser", "-u", "munge", "--", "/usr/sbin/munged", "--force"], check=True)
    deadline = time.monotonic() + 10
    while not _munged():
        assert time.monotonic() < deadline, "munged doesn't answer"
        time.sleep(0.1)
    yield  # it stays: it holds nothing of ours, and another test run may use it


def _munged() -> bool:
    return subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode == 0


def _until_idle(environment: dict[str, str]) -> None:
    deadline = time.monotonic() + 30
    words = ["sinfo", "-h", "-o", "%D", "-t", "idle"]
    while True:
        found = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if found.stdout.strip() == str(NODES):
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
