"""No orphans: a process of a local launch dies with the `arriero run` that started it, however that dies."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from contextlib import suppress

LAUNCHER = "ARRIERO_LAUNCHER"  # its process id, set by a local launch only
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_launcher(how: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send us `how` when our parent dies; call it first, from the main thread.

    A rank's parent is torchrun, which doesn't watch the launcher, so a thread of the rank does. Does nothing
    when another scheduler started us: it ends its own processes.
    """
    launcher = int(os.environ.get(LAUNCHER, "0"))
    if not launcher or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, how)
    if os.getppid() == launcher:
        return
    try:
        handle = os.pidfd_open(launcher)
    except ProcessLookupError:  # it died before we asked
        os._exit(1)
    threading.Thread(
        target=_follow_into_death, args=(handle, how), name="launcher watch", daemon=True
    ).start()


def _follow_into_death(handle: int, how: signal.Signals) -> None:
    watch = select.poll()
    watch.register(handle, select.POLLIN)
    watch.poll()
    os.kill(os.getpid(), how)


def signal_tree(pid: int, number: signal.Signals) -> None:
    """To a process and everything it has started, ranks and sandboxes in sessions of their own too."""
    import psutil

    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                one.send_signal(number)
