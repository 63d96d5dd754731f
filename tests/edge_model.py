"""The protocol of edges as a state machine, and a search through all of its states.

    source -> edge A -> 2 producers -> edge B -> 2 consumers -> results -> trainer -> versions -> gate

| step of the model | in the code                                                                        |
|-------------------|------------------------------------------------------------------------------------|
| admit, then send  | `SourceRunner._send`: `Admitted` is durable, then `Producer.put`                   |
| the source again  | `SourceRunner._admit_all`: sends what `History.open` has, under the same ids       |
| take              | `Consumer.lease`, by any replica; the producer reads the newest version            |
| put               | `Outbox._publish`: waits while the edge is full, is let go when the id is known    |
| acknowledge       | `Outbox._acknowledged`: only after the put; good even if the lease ran out         |
| run out           | `lease_s` has passed, or `Broker.evict`: the message waits again                   |
| crash             | a process loses all that it had in memory, and starts again                        |
| train, drop       | `Intake.accept` (the guard) and `Trained` in the ledger; a group makes a version   |

Every step is atomic, and any step that is possible may come next: so the search covers all orders in which
processes can run. A lease may run out at any time, whether its holder is dead or merely slow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

Message = tuple[int, int]  # prompt, and the version that sampled it (-1: none has)


@dataclass(frozen=True)
class Edge:
    """`held`: messages without acknowledgement; `leases`: who holds which; `known`: ids of all that came."""

    held: frozenset[Message] = frozenset()
    leases: frozenset[tuple[str, Message]] = frozenset()
    known: frozenset[int] = frozenset()

    def put(self, message: Message) -> Edge:
        if message[0] in self.known:
            return self
        return replace(self, held=self.held | {message}, known=self.known | {message[0]})

    def lease(self, who: str, message: Message) -> Edge:
        return replace(self, leases=self.leases | {(who, message)})

    def run_out(self, who: str, message: Message) -> Edge:
        return replace(self, leases=self.leases - {(who, message)})

    def acknowledge(self, message: Message) -> Edge:
        left = frozenset(lease for lease in self.leases if lease[1] != message)
        return replace(self, held=self.held - {message}, leases=left)

    def waiting(self) -> frozenset[Message]:
        return self.held - {message for _, message in self.leases}


@dataclass(frozen=True)
class State:
    """All that is durable, and what each process has in memory."""

    a: Edge = Edge()
    b: Edge = Edge()
    results: frozenset[Message] = frozenset()
    result_ids: frozenset[int] = frozenset()
    admitted: int = 0  # the ledger
    trained: frozenset[int] = frozenset()
    dropped: frozenset[int] = frozenset()
    version: int = 0
    source: tuple[int, ...] = ()  # admitted and not sent yet
    # Of each worker: what it took, what it gives, and how far it is ("took" or "put").
    workers: tuple[tuple[str, Message, Message, str] | None, ...] = (None, None, None, None)
    crashes: int = 0


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How large the model is; the flags break a rule, for the search to find out."""

    prompts: int = 3
    capacity: int = 1
    staleness: int = 1
    crashes: int = 1
    acknowledges_first: bool = False
    forgets_ids: bool = False
    gate: bool = True
    guard: bool = True
    sends_again: bool = True

    def window(self, state: State) -> int:
        """Prompts that may have been admitted; a group is one prompt."""
        return state.version + self.staleness + 1 + len(state.dropped)


class Broken(AssertionError):
    """A rule doesn't hold; the steps that lead there."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the search went through."""

    states: int
    steps: int
    ends: int
    stalest: int


def explore(protocol: Protocol) -> Found:
    """All states that can be reached. Raises Broken for a prompt lost or trained twice, a token beyond the
    bound, a deadlock, and a state from which no end can be reached.
    """
    start = State()
    before: dict[State, tuple[State, str] | None] = {start: None}
    after: dict[State, list[State]] = {}
    todo = deque([start])
    steps = stalest = 0
    while todo:
        state = todo.popleft()
        after[state] = []
        for name, reached in moves(protocol, state):
            following = _alike(reached)
            steps += 1
            after[state].append(following)
            if following not in before:
                before[following] = (state, name)
                try:
                    stalest = max(stalest, _check(protocol, state, following))
                except AssertionError as error:
                    raise Broken(f"{error}: {_path(before, following)}") from None
                todo.append(following)
        if not after[state] and not done(protocol, state):
            raise Broken(f"deadlock: {_path(before, state)}")
    ends = {state for state in after if done(protocol, state)}
    stuck = after.keys() - _reaching(after, ends)
    if stuck:
        raise Broken(f"no end can be reached: {_path(before, next(iter(stuck)))}")
    return Found(states=len(after), steps=steps, ends=len(ends), stalest=stalest)


def done(protocol: Protocol, state: State) -> bool:
    """Every prompt has come to one end, and nothing is left on the way."""
    return len(state.trained) + len(state.dropped) == protocol.prompts and not (state.a.held or state.b.held)


def moves(protocol: Protocol, state: State) -> Iterator[tuple[str, State]]:
    """Every step that is possible now."""
    yield from _source(protocol, state)
    for number in range(4):
        yield from _worker(protocol, state, number)
    yield from _trainer(protocol, state)
    for who, message in state.a.leases:
        yield f"lease of {message} by {who} runs out", replace(state, a=state.a.run_out(who, message))
    for who, message in state.b.leases:
        yield f"lease of {message} by {who} runs out", replace(state, b=state.b.run_out(who, message))
    if state.crashes < protocol.crashes:
        yield from _crashes(protocol, state)


def _source(protocol: Protocol, state: State) -> Iterator[tuple[str, State]]:
    k = state.admitted
    if k < protocol.prompts and not state.source and (k < protocol.window(state) or not protocol.gate):
        yield f"admit {k}", replace(state, admitted=k + 1, source=(k,))
    if state.source:
        first, *rest = state.source
        room = len(state.a.held) < protocol.capacity or first in state.a.known
        if room:
            yield f"send {first}", replace(state, a=state.a.put((first, -1)), source=tuple(rest))


def _worker(protocol: Protocol, state: State, number: int) -> Iterator[tuple[str, State]]:
    """0 and 1 take from A and put on B, 2 and 3 take from B and give results."""
    name, producer = f"{'producer' if number < 2 else 'consumer'} {number % 2}", number < 2
    source: Edge = state.a if producer else state.b
    now = state.workers[number]
    key = "a" if producer else "b"
    if now is None:
        for message in source.waiting():
            if producer and state.version < message[0] - len(state.dropped) - protocol.staleness:
                continue  # its `min_version` isn't there yet
            gives = (message[0], state.version) if producer else message
            taken = source.lease(name, message)
            if protocol.acknowledges_first:
                taken = source.acknowledge(message)
            yield (
                f"{name} takes {message}",
                _with(state, number, (key, message, gives, "took"), **{key: taken}),
            )
        return
    _, message, gives, stage = now
    if stage == "took":
        if (sent := _sent(protocol, state, gives, producer=producer)) is not None:
            yield f"{name} puts {gives}", _with(sent, number, (key, message, gives, "put"))
    else:
        yield (
            f"{name} acknowledges {message}",
            _with(state, number, None, **{key: source.acknowledge(message)}),
        )


def _sent(protocol: Protocol, state: State, message: Message, *, producer: bool) -> State | None:
    """With the output where its readers find it; None while there is no room."""
    if producer:
        if message[0] not in state.b.known and len(state.b.held) >= protocol.capacity:
            return None
        return replace(state, b=state.b.put(message))
    known = message[0] in state.result_ids
    if known and not protocol.forgets_ids:
        return state
    return replace(state, results=state.results | {message}, result_ids=state.result_ids | {message[0]})


def _trainer(protocol: Protocol, state: State) -> Iterator[tuple[str, State]]:
    for message in state.results:
        k, sampled = message
        left = replace(state, results=state.results - {message})
        if protocol.guard and state.version - sampled > protocol.staleness:
            yield f"drop {message}", replace(left, dropped=state.dropped | {k})
        else:
            trained = state.trained | {k}
            yield f"train {message}", replace(left, trained=trained, version=state.version + 1)


def _crashes(protocol: Protocol, state: State) -> Iterator[tuple[str, State]]:
    for number, now in enumerate(state.workers):
        if now is not None:
            key, message, _, _ = now
            edge: Edge = getattr(state, key)
            name = f"{'producer' if number < 2 else 'consumer'} {number % 2}"
            lost = _with(state, number, None, **{key: edge.run_out(name, message)})
            yield f"{name} crashes", replace(lost, crashes=state.crashes + 1)
    settled = state.trained | state.dropped
    again = tuple(k for k in range(state.admitted) if k not in settled) if protocol.sends_again else ()
    yield "the source crashes", replace(state, source=again, crashes=state.crashes + 1)


def _with(state: State, number: int, now: tuple[str, Message, Message, str] | None, **edges: Edge) -> State:
    workers = (*state.workers[:number], now, *state.workers[number + 1 :])
    changed = replace(state, workers=workers)
    return replace(changed, a=edges.get("a", changed.a), b=edges.get("b", changed.b))


def _check(protocol: Protocol, state: State, following: State) -> int:
    """The staleness of what was trained in this step, 0 for any other step."""
    assert len(following.trained) == following.version, "a prompt is trained twice"
    assert not following.trained & following.dropped, "a prompt is trained and dropped"
    if following.version == state.version:
        return 0
    ((_, sampled),) = state.results - following.results
    stale = state.version - sampled
    assert stale <= protocol.staleness, f"a token {stale} versions old is trained"
    return stale


def _reaching(after: dict[State, list[State]], ends: set[State]) -> set[State]:
    """The states from which one of `ends` can be reached."""
    into: dict[State, list[State]] = {}
    for state, followings in after.items():
        for following in followings:
            into.setdefault(following, []).append(state)
    found, todo = set(ends), list(ends)
    while todo:
        for earlier in into.get(todo.pop(), ()):
            if earlier not in found:
                found.add(earlier)
                todo.append(earlier)
    return found


def _alike(state: State) -> State:
    """The same with the two producers, and the two consumers, in one order: they don't differ."""
    for first, key in ((0, "a"), (2, "b")):
        one, other = state.workers[first : first + 2]
        if (other is None, other or ()) < (one is None, one or ()):
            edge: Edge = getattr(state, key)
            renamed = frozenset((f"{who[:-1]}{1 - int(who[-1])}", message) for who, message in edge.leases)
            workers = (*state.workers[:first], other, one, *state.workers[first + 2 :])
            state = replace(state, workers=workers)
            state = _with(state, first, other, **{key: replace(edge, leases=renamed)})
    return state


def _path(before: dict[State, tuple[State, str] | None], state: State) -> str:
    names: list[str] = []
    while (came := before[state]) is not None:
        state, name = came
        names.append(name)
    return ", ".join(reversed(names))
