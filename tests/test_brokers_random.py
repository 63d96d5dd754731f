"""Random interleavings of everything a broker can do, against a model of a few sets. Both brokers."""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from arriero.engine.broker import Broker, Consumer, EdgeEnded, Lease, Producer
from arriero.engine.nats_server import NatsServer
from tests.brokers import Engine, assert_depth, edge, take

T = TypeVar("T")

CAPACITY = 4
LEASE_S = 0.6
GROUPS = ("trainer", "record")
PRODUCERS = 2
REPLICAS = 2


@dataclass
class Held:
    """A lease and what the model knows of it."""

    lease: Lease
    group: str
    replica: int
    since: float
    valid: bool = True


class Interleavings(RuleBasedStateMachine):
    """`open`: id -> groups that haven't acknowledged it; `waiting`: per group, ids that nobody holds."""

    kind = "memory"
    server: NatsServer | None = None
    count = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).count += 1
        self.runner = asyncio.Runner()
        self.engine = Engine(self.kind, f"random{type(self).count}", self.server)
        self.known: set[str] = set()
        self.open: dict[str, set[str]] = {}
        self.waiting: dict[str, set[str]] = {group: set() for group in GROUPS}
        self.acked: set[tuple[str, str]] = set()
        self.held: list[Held] = []
        self.ended: set[int] = set()
        self.ran_out = False

    def run(self, what: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(what)

    @initialize()
    def declare(self) -> None:
        self.run(self._declare())

    async def _declare(self) -> None:
        decl = edge(
            groups=GROUPS, messages=CAPACITY, producers=PRODUCERS, lease_s=LEASE_S, max_deliveries=1000
        )
        self.broker: Broker = await self.engine.declare(decl)
        self.producers: list[Producer] = [self.broker.producer("rollouts", i) for i in range(PRODUCERS)]
        self.consumers: dict[tuple[str, int], Consumer] = {
            (group, replica): (await self.engine.connect()).consumer("rollouts", group)
            for group in GROUPS
            for replica in range(REPLICAS)
        }

    @rule(replica=st.integers(0, PRODUCERS - 1), number=st.integers(0, 9))
    def put(self, replica: int, number: int) -> None:
        self.run(self._put(replica, f"m{number}"))

    async def _put(self, replica: int, name: str) -> None:
        await self._keep_alive()
        if replica in self.ended and name not in self.known:
            return
        put = asyncio.ensure_future(self.producers[replica].put(name, name.encode()))
        full = len(self.open) == CAPACITY and name not in self.known
        done, _ = await asyncio.wait({put}, timeout=0.02 if full else 5)
        assert bool(done) != full
        if full:
            put.cancel()
            await asyncio.gather(put, return_exceptions=True)
            return
        assert put.result() == (name not in self.known)
        if name not in self.known:
            self.known.add(name)
            self.open[name] = set(GROUPS)
            for group in GROUPS:
                self.waiting[group].add(name)

    @rule(group=st.sampled_from(GROUPS), replica=st.integers(0, REPLICAS - 1))
    def lease(self, group: str, replica: int) -> None:
        self.run(self._lease(group, replica))

    async def _lease(self, group: str, replica: int) -> None:
        await self._keep_alive()
        consumer = self.consumers[group, replica]
        others = any(h.valid and h.group == group and h.replica != replica for h in self.held)
        if self.waiting[group]:
            lease = await take(consumer)
            assert lease.id in self.waiting[group]
            assert (group, lease.id) not in self.acked
            assert lease.payload == lease.id.encode()
            self.waiting[group].remove(lease.id)
            self.held.append(Held(lease, group, replica, time.monotonic()))
        elif len(self.ended) == PRODUCERS and not others:
            with pytest.raises(EdgeEnded):
                await consumer.lease(wait_s=5)
        else:
            assert await consumer.lease(wait_s=0.01) is None

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100))
    def ack(self, which: int) -> None:
        self.run(self._ack(self.held.pop(which % len(self.held))))

    async def _ack(self, held: Held) -> None:
        await self._keep_alive()
        await held.lease.ack()
        name, group = held.lease.id, held.group
        for other in self.held:
            if (other.lease.id, other.group) == (name, group):
                other.valid = False
        self.waiting[group].discard(name)
        self.acked.add((group, name))
        if name in self.open:
            self.open[name].discard(group)
            if not self.open[name]:
                del self.open[name]

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100))
    def give_back(self, which: int) -> None:
        self.run(self._give_back(self.held.pop(which % len(self.held))))

    async def _give_back(self, held: Held) -> None:
        await self._keep_alive()
        await held.lease.nack("again")
        if held.valid:
            self.waiting[held.group].add(held.lease.id)

    @precondition(lambda self: not self.ran_out and any(h.valid for h in self.held))
    @rule()
    def run_out(self) -> None:
        """All leases, once an example: it takes as long as a lease."""
        self.ran_out = True
        self.run(asyncio.sleep(1.3 * LEASE_S))
        for held in self.held:
            if held.valid:
                held.valid = False
                self.waiting[held.group].add(held.lease.id)

    @rule(replica=st.integers(0, PRODUCERS - 1))
    def end(self, replica: int) -> None:
        if len(self.known) > 5:
            self.run(self.producers[replica].end())
            self.ended.add(replica)

    async def _keep_alive(self) -> None:
        """Only `run_out` lets leases run out, however slow this machine is."""
        for held in self.held:
            if held.valid and time.monotonic() - held.since > LEASE_S / 6:
                held.since = time.monotonic()
                await held.lease.extend()

    @invariant()
    def holds_what_is_open(self) -> None:
        if hasattr(self, "broker"):
            self.run(self._keep_alive())
            self.run(assert_depth(self.broker, "rollouts", len(self.open)))
            assert len(self.open) <= CAPACITY

    def teardown(self) -> None:
        try:
            if hasattr(self, "broker"):
                self.run(self._drain())
        finally:
            self.run(self.engine.close())
            self.runner.close()

    async def _drain(self) -> None:
        """Everything put arrives and is acknowledged exactly once in each group; then the edge is empty."""
        for producer in self.producers:
            await producer.end()
        while self.held:
            await self._ack(self.held.pop())
        for group in GROUPS:
            while self.waiting[group]:
                lease = await take(self.consumers[group, 0])
                await self._ack(Held(lease, group, 0, 0.0))
            for replica in range(REPLICAS):
                with pytest.raises(EdgeEnded):
                    await self.consumers[group, replica].lease(wait_s=5)
        assert self.acked == {(group, name) for group in GROUPS for name in self.known}
        await self.engine.assert_empty()


@pytest.mark.parametrize("kind", ["memory", "nats"])
def test_random_interleavings_lose_nothing_and_repeat_nothing(kind: str, nats_server: NatsServer) -> None:
    class Machine(Interleavings):
        pass

    Machine.kind, Machine.server = kind, nats_server if kind == "nats" else None
    run_state_machine_as_test(  # pyright: ignore[reportUnknownMemberType]  # partly annotated
        Machine,
        settings=settings(
            max_examples=25 if kind == "memory" else 12,
            stateful_step_count=30,
            suppress_health_check=[
                HealthCheck.too_slow,
                HealthCheck.data_too_large,
                HealthCheck.filter_too_much,
            ],
        ),
    )
