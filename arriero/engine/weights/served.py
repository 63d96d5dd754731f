"""What the transports with buffers of their own share: slots in a source rank's memory, and leases on them.

Every source rank holds the cells that it packs, `slots` times, and answers its receivers (`lease_server`). A
receiver rank speaks to the source ranks that have something for it, and to the first for the newest version.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Client
from secrets import token_hex

import msgspec

from arriero.engine.weights import lease_messages as messages
from arriero.engine.weights.copying import Bytes, warm_buffer
from arriero.engine.weights.layout import SenderGone, StaleWeights, WeightError
from arriero.engine.weights.lease_server import LeaseServer, Welcoming
from arriero.engine.weights.plan import Plan
from arriero.engine.weights.ranks import OneRank, Ranks, first_says
from arriero.engine.weights.ring import SlotRing
from arriero.engine.weights.transport import Outcome, Span, lease_timeout
from arriero.schemas.weights import ALIGNMENT_BYTES, WeightManifest


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How a source rank is reached, and how long it waits. `secret` is the run's; both ends prove it.

    `host` is an address that receivers can reach; nothing on the connection is encrypted. `slots` and
    `keep_every` are those of `SlotRing`.
    """

    secret: bytes
    host: str = "127.0.0.1"
    slots: int = 2
    keep_every: int = 0
    lease_timeout_s: float | None = None


class ServedOutlet:
    """A source rank's slots and receivers. All ranks make theirs together."""

    scheme = ""

    def __init__(self, plan: Plan, serving: Serving, ranks: Ranks | None, welcome: Welcoming) -> None:
        self._ring = SlotRing(serving.slots, serving.keep_every)
        self._ranks = ranks or OneRank()
        self.part_bytes = plan.part_bytes(self._ranks.rank)
        size = max(self.part_bytes, ALIGNMENT_BYTES)
        self.slots: Bytes = warm_buffer(self._ring.total * size).reshape(self._ring.total, size)
        total = sum(plan.part_bytes(rank) for rank in range(plan.num_sources))
        self._lease_timeout_s = lease_timeout(total, serving.lease_timeout_s)
        self.session = first_says(self._ranks, lambda: token_hex(16).encode()).decode()
        self._server = LeaseServer(
            (serving.host, 0), serving.secret, plan.encode(), self.session, self._ring.total, welcome
        )
        said = self._ranks.gather(msgspec.msgpack.encode(self._server.address))
        self._server.addresses = [msgspec.msgpack.decode(data, type=tuple[str, int]) for data in said]
        self.url = "{}://{}:{}".format(self.scheme, *self._server.addresses[0])
        self.overtaken: tuple[str, ...] = ()

    def begin(self, version: int) -> tuple[int, Bytes]:
        slot = self._ring.slot(version)
        self.overtaken = self._server.free(slot, self._lease_timeout_s)
        return slot, self.slots[slot][: self.part_bytes]

    def announce(self, manifest: WeightManifest) -> None:
        self._ring.written(manifest.slot)
        self._server.commit(manifest)

    def outcomes(self) -> Mapping[str, Outcome]:
        return self._server.outcomes()

    def await_left(self, within_s: float) -> None:
        """Wait until every receiver has left or died."""
        self._server.await_left(within_s)

    def await_visitor(self) -> None:
        """Wait until a receiver has joined, unless one has before; no longer than a lease may take."""
        self._server.await_visitor(self._lease_timeout_s)

    def close(self) -> None:
        self._server.close()


class Source:
    """A receiver rank's connection to one source rank."""

    def __init__(self, rank: int, address: tuple[str, int], secret: bytes, bound_s: float) -> None:
        self.rank, self._bound_s = rank, bound_s
        self._where = f"source rank {rank} at {address[0]}:{address[1]}"
        try:
            self._link: messages.Link = Client(address)
            messages.prove(self._link, secret, first=False)
        except (OSError, EOFError) as error:
            raise SenderGone(f"{self._where}: {str(error) or type(error).__name__}") from error

    def ask(self, request: messages.Request, wait_s: float = 0.0) -> messages.Answer:
        """The answer; WeightError if it is a refusal, SenderGone if there is none in time."""
        try:
            messages.send(self._link, request)
            if not self._link.poll(wait_s + self._bound_s):
                raise SenderGone(f"{self._where} has not answered for {wait_s + self._bound_s:.0f} s")
            answer = messages.receive_answer(self._link)
        except (OSError, EOFError) as error:
            raise SenderGone(f"{self._where} is gone: {str(error) or type(error).__name__}") from error
        if isinstance(answer, messages.Refused):
            raise (StaleWeights if answer.stale else WeightError)(answer.error)
        return answer

    @property
    def gone(self) -> bool:
        """Whether the connection has ended; only while no answer is due."""
        try:
            return self._link.poll(0)
        except OSError:
            return True

    def close(self) -> None:
        self._link.close()


class ServedInlet:
    """A receiver rank's end, but for the bytes. `name` is what the senders call it, e.g. generator-0/1."""

    stable = carried = False

    def __init__(self, url: str, name: str, secret: bytes, bound_s: float = 60.0) -> None:
        self._name, self._secret, self._bound_s = name, secret, bound_s
        self._plan: tuple[str, Plan] | None = None
        host, _, port = url.partition("://")[2].rpartition(":")
        self.sources: dict[int, Source] = {}
        self._addresses = [(host, int(port))]
        self.source(0)

    def newest(self, after: int = -1, wait_s: float = 0.0) -> WeightManifest | None:
        found = self.source(0).ask(messages.Newest(after, wait_s), wait_s)
        assert isinstance(found, messages.Found), "what Newest is answered with"
        return WeightManifest.model_validate_json(found.manifest) if found.manifest else None

    def plan(self, session: str) -> Plan:
        self.source(0)
        assert self._plan is not None, "told by the first source"
        if self._plan[0] != session:
            raise SenderGone(f"{self._name}: the manifest is of another run: its session was {session}")
        return self._plan[1]

    @contextmanager
    def lease(self, manifest: WeightManifest, spans: Sequence[Span]) -> Generator[None, None, None]:
        held: list[Source] = []
        try:
            for rank in dict.fromkeys(span.source for span in spans):
                granted = self.source(rank).ask(messages.Take(manifest.session, manifest.version))
                assert isinstance(granted, messages.Granted), "what Take is answered with"
                held.append(self.source(rank))
                if granted.slot != manifest.slot:
                    raise StaleWeights(f"version {manifest.version} is in another slot")
            yield
        except StaleWeights:
            self._release(held)
            raise
        except Exception as error:
            # What was under way may still arrive: with new connections nothing can be taken for it.
            for source in held:
                self.disconnect(source.rank)
            if self._lost(manifest, [source.rank for source in held]):
                raise self._overtaken(manifest) from error
            raise
        if self._release(held):
            raise self._overtaken(manifest)

    def report(self, version: int, error: str) -> None:
        self.source(0).ask(messages.Report(version, error))

    def close(self) -> None:
        for rank, source in list(self.sources.items()):
            with suppress(WeightError):  # it may be gone already
                source.ask(messages.Leave())
            self.disconnect(rank)

    def _release(self, held: Sequence[Source]) -> bool:
        """Whether a lease had been taken from us. What a source that is gone had sent is verified or not."""
        overtaken = False
        for source in held:
            try:
                answer = source.ask(messages.Release())
                overtaken |= isinstance(answer, messages.Done) and not answer.valid
            except WeightError:
                self.disconnect(source.rank)
        return overtaken

    def _overtaken(self, manifest: WeightManifest) -> StaleWeights:
        return StaleWeights(
            f"{self._name} was overtaken: version {manifest.version} was overwritten as it was read"
        )

    def _lost(self, manifest: WeightManifest, ranks: Sequence[int]) -> bool:
        """Whether one of the source ranks no longer has this version."""
        try:
            for rank in ranks:
                self.source(rank).ask(messages.Take(manifest.session, manifest.version))
                self.source(rank).ask(messages.Release())
        except StaleWeights:
            return True
        except WeightError:
            pass
        return False

    def source(self, rank: int) -> Source:
        """The connection to a source rank, made when it is first needed, and anew after an error."""
        if rank not in self.sources:
            source = Source(rank, self._addresses[rank], self._secret, self._bound_s)
            welcome = source.ask(messages.Join(self._name))
            assert isinstance(welcome, messages.Welcome), "what Join is answered with"
            if self._plan is None or self._plan[0] != welcome.session:
                self._plan = welcome.session, Plan.decode(welcome.plan)
            self._addresses = welcome.addresses
            self.sources[rank] = source
            self.welcomed(rank, welcome.extra)
        return self.sources[rank]

    def disconnect(self, rank: int) -> None:
        """End a connection without a word."""
        if rank in self.sources:
            self.sources.pop(rank).close()

    def welcomed(self, rank: int, extra: bytes) -> None:
        """What this transport does with a source rank's answer."""
