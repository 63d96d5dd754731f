"""Where a process of a cluster stands: what others call this host, and which attempt of the job this is."""

from __future__ import annotations

import os
import socket

HOST = "ARRIERO_HOST"  # the address of this host, where the job's description sets it
ATTEMPT = "ARRIERO_ATTEMPT"
FIRST = "ARRIERO_FIRST"  # the number of the first replica that a task of the scheduler starts, if not 0
DEAF = "ARRIERO_DEAF"  # a role that an agent started: SIGTERM, which Slurm sends to all, is for the hub


def own_address() -> str:
    """A name or address by which the other hosts of the run reach this one."""
    return os.environ.get(HOST) or os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def attempt() -> str:
    """Which run of a job that may start again this is, so that nobody takes an old hub for the new one."""
    return os.environ.get(ATTEMPT, "")


def number(text: str) -> int:
    """A number, or that in the environment variable of this name. Raises ValueError."""
    value = text if text.isdecimal() else os.environ.get(text, "")
    if not value.isdecimal():
        raise ValueError(f"{text} is neither a number nor an environment variable that holds one")
    return int(value)
