"""A further hub of a run on a cluster, beside the first, which conducts the run: a server that replicates it.

    meet the others -> start nats-server -> hub.json is there -> hub.json is gone: the run is over -> stop

SIGTERM is answered by the first hub, which gets it too, and stops the run; one that is told alone (its node
is drained) leaves after a while, and the two others go on.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from arriero.engine.broker import BrokerError
from arriero.engine.errors import UserError
from arriero.launchers.conduct import cluster_access
from arriero.launchers.hub import BROKER, HUB_FILE, HubAddress
from arriero.launchers.hubs import Site, meet
from arriero.launchers.place import FIRST, attempt, number, own_address
from arriero.launchers.rundir import RunDir

_EVERY_S = 0.2
_START_S = 60.0
_ALONE_S = 20.0  # after SIGTERM: less than the 30 s that schedulers give by default


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when the run is over, 1 when it was told to leave or a hub is lost, 2 for a mistake."""
    parser = argparse.ArgumentParser(prog="arriero.launchers.hub_peer")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--replica", required=True, help="number, or the environment variable that holds it")
    parser.add_argument("--hubs", type=int, required=True)
    parser.add_argument("--arrive-s", type=float, default=900.0)
    args = parser.parse_args(argv)
    told = _Told()
    try:
        own = number(args.replica) + int(os.environ[FIRST])
        site = meet(
            args.run_dir / BROKER, own, args.hubs, token="", public=own_address(), attempt=attempt(),
            bound_s=args.arrive_s, told=lambda: told.long_ago,
        )  # fmt: skip
        # As those of the first hub: the messages stay on this host.
        with TemporaryDirectory(prefix="arriero-broker-") as store:
            return _serve(RunDir(args.run_dir), site, Path(store), told, args.arrive_s)
    except BrokerError as error:
        print(f"arriero: error: {error}", file=sys.stderr)
        return 1
    except (UserError, OSError, ValueError, KeyError) as error:
        print(f"arriero: error: {error}", file=sys.stderr)
        return 2


class _Told:
    """Whether SIGTERM has come so long ago that it was for us alone."""

    def __init__(self) -> None:
        self._at: float | None = None
        signal.signal(signal.SIGTERM, self._on_signal)

    @property
    def long_ago(self) -> bool:
        return self._at is not None and time.monotonic() - self._at > _ALONE_S

    def _on_signal(self, signal_number: int, frame: FrameType | None) -> None:
        self._at = self._at or time.monotonic()


def _serve(run: RunDir, site: Site, store: Path, told: _Told, arrive_s: float) -> int:
    """Until the run is over; a server that ends by itself is started again. Raises BrokerError."""
    spec, options = run.read_graph(), run.read_options()
    access = cluster_access(spec, options)
    servers = [site.start(access, store=store, timeout_s=_START_S)]
    deadline, begun = time.monotonic() + arrive_s, False
    try:
        while not told.long_ago:
            here = _announced(run)
            begun = begun or here
            if begun and not here:
                return 0
            if not begun and time.monotonic() > deadline:
                raise BrokerError(f"waited {arrive_s:g} s for the first hub to write {run.path / HUB_FILE}")
            if (code := servers[-1].process.poll()) is not None:
                if len(servers) > options.restarts:
                    raise BrokerError(f"nats-server ended with code {code}; see {servers[-1].log}")
                print(f"arriero: nats-server ended with code {code}; it starts again", file=sys.stderr)
                servers.append(site.start(access, store=store, timeout_s=_START_S))
            time.sleep(_EVERY_S)
        return 1
    finally:
        servers[-1].stop(timeout_s=2.0)


def _announced(run: RunDir) -> bool:
    """Whether the run of this attempt goes on."""
    try:
        found = HubAddress.model_validate_json((run.path / HUB_FILE).read_bytes())
    except FileNotFoundError:
        return False
    return found.attempt == attempt()


if __name__ == "__main__":
    sys.exit(main())
