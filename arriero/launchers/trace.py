"""`arriero trace RUN`: the run as a trace for Perfetto (ui.perfetto.dev) or Chrome (about:tracing).

One process per replica and one track per node, with what it waits for; one counter per edge; one span per
prompt, from its admission to what became of it; a mark per version.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from pydantic import JsonValue

from arriero.engine.errors import UserError
from arriero.launchers.rundir import RunDir
from arriero.launchers.timeline import moments
from arriero.schemas.run import Moment, NodeMoment

USAGE = """\
usage: arriero trace RUN [--out FILE]    a trace for ui.perfetto.dev; default: RUN/trace.json"""

TraceEvent = dict[str, JsonValue]
Slice = tuple[float, float, str]  # start, end, what; seconds since 1970

_RUN, _PROMPTS = 1, 2  # process numbers; replicas follow
_SHORTEST_S = 1e-4


def trace(args: Sequence[str], show: Callable[[str], int]) -> int:
    """Write it, and say where. Raises UserError."""
    if not args or {"--help", "-h"} & {*args}:
        return show(USAGE)
    words = list(args[1:])
    if words and (len(words) != 2 or words[0] != "--out"):
        raise UserError(f"{' '.join(words)} isn't understood\n{USAGE}")
    run = RunDir(Path(args[0]).absolute())
    out = Path(words[1]) if words else run.path / "trace.json"
    events = [*trace_events(moments(run.timeline))]
    try:
        out.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}") from error
    return show(f"{out}: {len(events)} events; open it in ui.perfetto.dev")


def trace_events(found: Iterable[Moment]) -> Iterator[TraceEvent]:
    """In the Trace Event Format; times in microseconds since the first moment."""
    told = [*found]
    if not told:
        return
    start = told[0].time
    yield from _name("process_name", _RUN, 0, "versions and edges")
    yield from _name("process_name", _PROMPTS, 0, "prompts")
    replicas = dict.fromkeys(n.replica for m in told for n in m.nodes)
    pids = {replica: 3 + k for k, replica in enumerate(replicas)}
    for replica, pid in pids.items():
        yield from _name("process_name", pid, 0, replica)
    drawn = slices(told)
    tids = {key: k + 1 for k, key in enumerate(drawn)}
    for (replica, node), spans in drawn.items():
        tid = tids[replica, node]
        yield from _name("thread_name", pids[replica], tid, node)
        for begin, end, what in spans:
            yield {
                "ph": "X", "pid": pids[replica], "tid": tid, "ts": _us(begin, start),
                "dur": _us(end, begin), "name": what, "cat": "busy" if what == "busy" else "waits",
            }  # fmt: skip
    for m in told:
        for edge, messages in m.edges.items():
            yield {
                "ph": "C", "pid": _RUN, "tid": 0, "ts": _us(m.time, start), "name": f"edge {edge}",
                "args": {"messages": messages},
            }  # fmt: skip
        yield from _prompts(m, _us(m.time, start))


def slices(told: Sequence[Moment]) -> dict[tuple[str, str], list[Slice]]:
    """By replica and node: when it was busy, and when it waited for what.

    Between two looks the seconds of each are known, their order isn't: work is put first.
    """
    found: dict[tuple[str, str], list[Slice]] = {}
    before: dict[tuple[str, str], tuple[float, NodeMoment]] = {}
    for m in told:
        for n in m.nodes:
            key = (n.replica, n.node)
            at, last = before.get(key, (m.time, n))
            before[key] = (m.time, n)
            span = found.setdefault(key, [])
            if n.busy_s < last.busy_s or m.time <= at:  # the first look, or a replica that started again
                continue
            busy_s, idle_s = n.busy_s - last.busy_s, n.idle_s - last.idle_s
            share = busy_s / (busy_s + idle_s) if busy_s + idle_s > 0 else 0.0
            middle = at + share * (m.time - at) if busy_s + idle_s > 0 else at
            _add(span, at, middle, "busy")
            if not (n.ended and idle_s <= 0):
                _add(span, middle, m.time, n.waits_for or last.waits_for or "waits")
    return found


def _add(span: list[Slice], begin: float, end: float, what: str) -> None:
    if end - begin < _SHORTEST_S:
        return
    if span and span[-1][2] == what and begin - span[-1][1] < _SHORTEST_S:
        begin = span.pop()[0]
    span.append((begin, end, what))


def _prompts(m: Moment, at: float) -> Iterator[TraceEvent]:
    """A span per prompt; a mark per version."""
    if m.what == "trained":
        yield {
            "ph": "i", "s": "g", "pid": _RUN, "tid": 0, "ts": at, "name": f"version {m.version}",
            "args": {"prompts": len(m.origins)},
        }  # fmt: skip
    for origin in m.origins:
        name = f"prompt {origin}" if origin >= 0 else f"held-out prompt {-origin}"
        common: TraceEvent = {"pid": _PROMPTS, "tid": 0, "cat": "prompt", "id": str(origin), "ts": at}
        args: TraceEvent = {"what": m.what}
        if m.version:
            args["version"] = m.version
        yield {**common, "name": name, "ph": "b" if m.what == "admitted" else "e", "args": args}


def _name(kind: str, pid: int, tid: int, name: str) -> Iterator[TraceEvent]:
    yield {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}


def _us(at: float, since: float) -> float:
    return round((at - since) * 1e6, 1)
