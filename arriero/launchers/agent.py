"""A replica on a cluster: starts the process of its role, says how it ended, starts it again when told to.

    wait for the hub -> say that we are here -> start -> the process ends -> say so -> order: start | leave
                                                  ^                                       |
                                                  '---------------------------------------'

The scheduler sees one program that ends well when the hub says that the run is over; so a replica that is
killed costs no other its place. An agent that was itself started again (a container's restart) says that its
process is gone and waits for the order. SIGTERM is answered by the hub, which gets it too, and stops the run;
an agent that is told alone (its node is drained) leaves after a while.

An agent that joins a running job (`--join`) asks for its number first. Told to leave, it says so; its replica
answers what it has and ends, and then it leaves.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from arriero.engine.broker import Broker, BrokerError
from arriero.engine.errors import UserError
from arriero.engine.nats import NatsBroker
from arriero.engine.nats_access import credential
from arriero.launchers.child import Child
from arriero.launchers.hub import AGENT, private, wait_for_hub
from arriero.launchers.parent import LAUNCHER, die_with_launcher
from arriero.launchers.place import ATTEMPT, DEAF, HOST, attempt, number, own_address
from arriero.launchers.rundir import RunDir
from arriero.schemas.crew import (
    CREW_LOG,
    ORDER,
    ORDERS_LOG,
    Arrived,
    Asks,
    Leaving,
    Left,
    Meeting,
    Order,
    Welcome,
    joined_line,
    replica_name,
)  # fmt: skip

_THERE_S = 60.0  # for the hub of a run that goes on to be found, and to answer
_ALONE_S = 20.0  # after SIGTERM: less than the 30 s that schedulers give by default


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when the hub said that the run is over, 1 when the hub is lost, 2 for a mistake."""
    die_with_launcher()
    parser = argparse.ArgumentParser(prog="arriero.launchers.agent")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--role", required=True)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--replica", help="number, or the environment variable that holds it")
    which.add_argument("--join", action="store_true", help="one more, whose number the hub says")
    parser.add_argument("--log", type=Path, help="with --join: where its output goes, to be found as others'")
    parser.add_argument("--ranks", type=int, default=1, help="on this host")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--arrive-s", type=float, default=900.0)
    parser.add_argument("--secret", action="append", default=[], metavar="NAME=FILE")
    try:
        return asyncio.run(_serve(parser.parse_args(argv)))
    except (BrokerError, TimeoutError) as error:
        print(f"arriero: error: {error}", file=sys.stderr)
        return 1
    except (UserError, OSError, ValueError) as error:
        print(f"arriero: error: {error}", file=sys.stderr)
        return 2


async def _serve(args: argparse.Namespace) -> int:
    index, several = (0 if args.join else number(args.replica)), args.hosts > 1
    replica, host = (0, index) if several else (index, 0)
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    if args.join:
        hub = await wait_for_hub(args.run_dir, bound_s=_THERE_S, attempt=None)
    else:
        hub = await wait_for_hub(args.run_dir, bound_s=args.arrive_s, attempt=attempt())
    own = {LAUNCHER: str(os.getpid()), HOST: own_address(), DEAF: "1", **private(hub.token, args.role)}
    own[ATTEMPT] = hub.attempt
    environment = {**os.environ, **_secrets(args.secret), **own}
    run_id = RunDir(args.run_dir).read_options().run_id
    broker = await NatsBroker.connect(hub.url, credential(hub.token, AGENT), run=run_id)
    try:
        agent = _Agent(broker, told)
        if args.join:
            replica = await agent.ask(args.role, _THERE_S)
            print(joined_line(replica_name(args.role, replica, 0)), flush=True)
            if args.log is not None:
                _link(args.log, replica_name(args.role, replica, 0))
        agent.name = replica_name(args.role, replica, host)
        program = ["-m", "arriero.launchers.role", "--run-dir", str(args.run_dir), "--role", args.role]
        program += ["--replica", str(replica)]
        meeting = partial(agent.meet, args.role, host, args.arrive_s) if several else None

        async def start() -> Child:
            where = await meeting() if meeting else None
            command = _command(program, where, ranks=args.ranks, hosts=args.hosts, host=host)
            return await Child.start([sys.executable, *command], environment)

        return await agent.live(start)
    finally:
        with suppress(BrokerError, TimeoutError):
            await asyncio.wait_for(broker.close(), 2.0)


def _secrets(given: Sequence[str]) -> dict[str, str]:
    """Environment variables from files. Raises OSError."""
    pairs = (text.partition("=") for text in given)
    return {name: Path(file).expanduser().read_text().strip() for name, _, file in pairs}


def _link(log: Path, name: str) -> None:
    """Let `log` be found as that of the replica `name`, which wasn't known when it was begun."""
    link = log.with_name(f"{name}.log")
    link.unlink(missing_ok=True)
    link.symlink_to(log.name)


def _command(
    program: Sequence[str], meeting: Meeting | None, *, ranks: int, hosts: int, host: int
) -> list[str]:
    """What Python is to run: the program, under torchrun where the role has several ranks."""
    if ranks * hosts == 1:
        return list(program)
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    if meeting is not None:
        where = ["--node-rank", str(host), "--master-addr", meeting.host, "--master-port", str(meeting.port)]
    return [
        "-m", "torch.distributed.run", "--nnodes", str(hosts), "--nproc-per-node", str(ranks),
        "--max-restarts", "0", *where, *program,
    ]  # fmt: skip


@dataclass(frozen=True)
class _Ended:
    code: int


class _Agent:
    """One life of a replica's agent. Whatever happens to it comes into one queue."""

    def __init__(self, broker: Broker, told: asyncio.Event) -> None:
        self._broker, self._told = broker, told
        self.name = ""
        self._listening: asyncio.Task[None] | None = None
        self._guest = False
        self._welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self._life = uuid.uuid4().hex
        self._events: asyncio.Queue[Order | _Ended | BrokerError | None] = asyncio.Queue()
        self._meetings: dict[str, asyncio.Future[Meeting]] = {}

    async def live(self, start: Callable[[], Awaitable[Child]]) -> int:
        """From the arrival to the order to leave; the exit code. Raises BrokerError when the hub is lost."""
        leaving = self._leave_in_order() if self._guest else self._leave_alone()
        watching = [self._listening or asyncio.create_task(self._listen()), asyncio.create_task(leaving)]
        child: Child | None = None
        try:
            if await self._arrive():
                child = await self._started(start, watching)
            else:
                await self._report(-signal.SIGKILL, "its agent was started again")
            while True:
                match await self._events.get():
                    case _Ended(code):
                        await self._report(code, child.said() if child else "")
                    case Order(what="start"):
                        child = await self._started(start, watching)
                    case Order(what="kill"):
                        if child:
                            child.kill()
                    case Order():
                        return 0
                    case None:
                        return 1
                    case BrokerError() as error:
                        raise error
        finally:
            if child:
                child.kill()
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    async def ask(self, role: str, bound_s: float) -> int:
        """The number of one more replica of `role`. Raises UserError where the hub says why not."""
        self._guest = True
        self._listening = asyncio.create_task(self._listen())
        asks = Asks(role=role, life=self._life, host=socket.gethostname())
        await self._broker.append(CREW_LOG, f"asks:{self._life}", asks.model_dump_json().encode())
        try:
            welcome = await asyncio.wait_for(asyncio.shield(self._welcome), bound_s)
        except TimeoutError:
            raise TimeoutError(f"the hub didn't say within {bound_s:g} s whether {role} may join") from None
        if welcome.replica is None:
            raise UserError(f"{role} can't join: {welcome.why}")
        return welcome.replica

    async def meet(self, role: str, host: int, bound_s: float) -> Meeting:
        """Where the ranks of `role` meet: its first host says so. Raises TimeoutError."""
        if host == 0:
            here = Meeting(role=role, host=own_address(), port=_free_port())
            await self._broker.append(ORDERS_LOG, f"meeting:{role}", here.model_dump_json().encode())
        try:
            return await asyncio.wait_for(asyncio.shield(self._meeting(role)), bound_s)
        except TimeoutError:
            raise TimeoutError(
                f"{self.name} waited {bound_s:g} s for {role}-0 to say where its ranks meet"
            ) from None

    async def _started(
        self, start: Callable[[], Awaitable[Child]], watching: list[asyncio.Task[None]]
    ) -> Child:
        child = await start()
        watching.append(asyncio.create_task(self._watch(child)))
        return child

    async def _watch(self, child: Child) -> None:
        self._events.put_nowait(_Ended(await child.ended()))

    async def _arrive(self) -> bool:
        """False if this replica has been here before."""
        here = Arrived(name=self.name, life=self._life, host=socket.gethostname())
        return await self._broker.append(CREW_LOG, f"arrived:{self.name}", here.model_dump_json().encode())

    async def _report(self, code: int, said: str) -> None:
        left = Left(name=self.name, life=self._life, code=code, said=said)
        await self._broker.append(CREW_LOG, uuid.uuid4().hex, left.model_dump_json().encode())
        if self._guest and self._told.is_set():
            self._events.put_nowait(Order(what="leave"))

    async def _listen(self) -> None:
        try:
            async for payload in self._broker.follow(ORDERS_LOG):
                match message := ORDER.validate_json(payload):
                    case Order() if message.life in ("", self._life):
                        self._events.put_nowait(message)
                    case Welcome() if message.life == self._life:
                        self._welcome.set_result(message)
                    case Meeting():
                        self._meeting(message.role).set_result(message)
                    case _:
                        pass
        except BrokerError as error:
            self._events.put_nowait(error)

    async def _leave_alone(self) -> None:
        await self._told.wait()
        await asyncio.sleep(_ALONE_S)
        self._events.put_nowait(None)

    async def _leave_in_order(self) -> None:
        """The end of the process follows, or the scheduler's own kill."""
        await self._told.wait()
        leaving = Leaving(name=self.name, life=self._life)
        await self._broker.append(CREW_LOG, f"leaving:{self._life}", leaving.model_dump_json().encode())

    def _meeting(self, role: str) -> asyncio.Future[Meeting]:
        return self._meetings.setdefault(role, asyncio.get_running_loop().create_future())


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
