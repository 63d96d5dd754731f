"""Entry point of a replica (and rank) of a role: `python -m arriero.launchers.role --role generator ...`."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from arriero.launchers.parent import die_with_launcher
from arriero.launchers.place import DEAF, attempt

_HUB_BOUND_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when the role's nodes ended or the run was stopped, 2 for a mistake of the user, else 1."""
    die_with_launcher()
    if os.environ.get(DEAF):
        signal.signal(signal.SIGTERM, _ignore)  # a handler isn't inherited by what we start
    parser = argparse.ArgumentParser(prog="arriero.launchers.role")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--role", required=True)
    parser.add_argument("--replica", type=int, default=0)
    args = parser.parse_args(argv)
    import uvloop

    from arriero.engine.errors import UserError

    try:
        uvloop.run(_run(args.run_dir, args.role, args.replica))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except Exception:  # noqa: BLE001  # the last boundary: the launcher shows it
        traceback.print_exc()
        return 1
    return 0


def _ignore(number: int, frame: FrameType | None) -> None:
    pass


async def _run(run_dir: Path, role: str, replica: int) -> None:
    from arriero.engine.broker import BrokerError
    from arriero.engine.claims import ClaimChecked
    from arriero.engine.nats import NatsBroker
    from arriero.engine.runtime.role import Stopped, run_role
    from arriero.launchers.hub import TOKEN, WEIGHTS_SECRET, claim_store, wait_for_hub
    from arriero.launchers.rundir import RunDir

    run = RunDir(run_dir)
    spec, options = run.read_graph(), run.read_options()
    address = await wait_for_hub(run_dir, bound_s=_HUB_BOUND_S, attempt=attempt())
    # Taken out: what a component starts (a reward's worker) has no business with the broker.
    token, secret = os.environ.pop(TOKEN, ""), os.environ.pop(WEIGHTS_SECRET, "")
    link = await NatsBroker.connect(address.url, token, run=options.run_id)
    broker = ClaimChecked(link, claim_store(options))
    try:
        with suppress(Stopped):
            await run_role(
                spec, options, role=role, replica=replica, rank=int(os.environ.get("RANK", "0")),
                ranks=int(os.environ.get("WORLD_SIZE", "1")), run_dir=run_dir, broker=broker,
                secret=secret.encode(),
            )  # fmt: skip
    finally:
        with suppress(BrokerError, TimeoutError):
            await asyncio.wait_for(broker.close(), 2.0)


if __name__ == "__main__":
    sys.exit(main())
