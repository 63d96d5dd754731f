"""`arriero ui RUN`: serves the page until Ctrl-C."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from arriero.engine.errors import UserError
from arriero.launchers.rundir import RunDir

USAGE = """\
usage: arriero ui RUN [--port N]    a page about a run, live, on this machine; Ctrl-C ends it

The address holds a secret: who has it can look at the run, and do nothing else. From another machine:
ssh -L 8080:127.0.0.1:PORT HOST, and the same address with port 8080."""


def ui(args: Sequence[str], show: Callable[[str], int]) -> int:
    """Say the address, and serve it. Raises UserError."""
    if not args or {"--help", "-h"} & {*args}:
        return show(USAGE)
    run = RunDir(Path(args[0]).absolute())
    port = _port(args[1:])
    try:
        from arriero.launchers.ui.answers import Answers
        from arriero.launchers.ui.server import server
    except ImportError as error:
        raise UserError(f"arriero ui needs {error.name}: pip install 'arriero[ui]'") from error
    token, answers = secrets.token_urlsafe(24), Answers(run)
    listening = _listening(port)
    code = show(f"http://127.0.0.1:{listening.getsockname()[1]}/{token}/")
    with suppress(KeyboardInterrupt):
        server(answers, token).run(sockets=[listening])
    return code


def _port(words: Sequence[str]) -> int:
    if not words:
        return 0
    if len(words) != 2 or words[0] != "--port":
        raise UserError(f"{' '.join(words)} isn't understood\n{USAGE}")
    if not words[1].isdecimal() or int(words[1]) > 65535:
        raise UserError(f"--port {words[1]}: a number from 0 (any free one) to 65535")
    return int(words[1])


def _listening(port: int) -> socket.socket:
    """On loopback alone. UserError if the port is taken."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", port))
    except OSError as error:
        listening.close()
        raise UserError(f"--port {port}: {error.strerror}; leave it out for a free one") from error
    return listening
