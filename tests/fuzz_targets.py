"""What `fuzz` tries: everything that reads what another process, another run or a person has written."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from arriero.components.datasets import open_blocks, read_rows
from arriero.components.prompts import PromptSource
from arriero.engine.broker import BrokerError, EdgeDecl
from arriero.engine.checkpoints import MARK, CheckpointStore
from arriero.engine.claim_stores import FolderStore
from arriero.engine.claims import ClaimChecked
from arriero.engine.codec import CodecError, decode, encode
from arriero.engine.errors import UserError
from arriero.engine.graph import Graph
from arriero.engine.lineage.chain import ChainError, Walk
from arriero.engine.lineage.chain import lines as chain_lines
from arriero.engine.memory import MemoryBroker
from arriero.engine.nats_pulse import read_beat
from arriero.engine.runtime.ledger import Ledger, LedgerError, effective
from arriero.launchers.options import resolve
from arriero.launchers.profile import read_profile
from arriero.launchers.resuming import read_history
from arriero.launchers.rundir import RunDir
from arriero.pipelines.aipo import AIPOConfig
from arriero.schemas.checkpoints import CheckpointFile, CheckpointMark
from arriero.schemas.ledger import EVENT, Admitted, DroppedEvent, Resumed, Trained
from arriero.schemas.lineage import Committed, RunEntry
from arriero.schemas.messages import (
    Batch,
    Message,
    Outcome,
    Prompt,
    RolloutGroup,
    Score,
    ScoredGroup,
    Weights,
)
from arriero.schemas.run import NodeStatus, RoleStatus, RunOptions
from tests.records import manifest
from tests.toys import rollout, samples, toy_graph

Read = Callable[[bytes, Path], object]


@dataclass(frozen=True, kw_only=True)
class Target:
    """`read` takes input and an empty folder; `refusals` are the errors that it may raise."""

    name: str
    examples: tuple[bytes, ...]
    read: Read
    refusals: tuple[type[Exception], ...]


# --- what is right ----------------------------------------------------------------------------------------

_PROMPT = Prompt(id="p-0", text="2+2=", answer="4", row=0, metadata={"level": 1}).stamped(
    id="p-0", parents=(), origins=(0,)
)
_GROUP = RolloutGroup(prompt=_PROMPT, rollouts=(rollout(0), rollout(1))).stamped(
    id="p-0>generator", parents=("p-0",), origins=(0,)
)
_SCORES = (Score(value=1.0, outcome=Outcome.OK), Score(value=0.0, outcome=Outcome.WRONG))
_SCORED = ScoredGroup(group=_GROUP, scores=_SCORES).stamped(id="p-0>reward", parents=(), origins=(0,))
_BATCH = Batch(samples=tuple(samples(_SCORED))).stamped(id="b-1", parents=("p-0>reward",), origins=(0,))
_MESSAGES = (
    _PROMPT,
    _GROUP,
    _SCORED,
    _BATCH,
    Weights(version=3, manifest=manifest(3), metrics={"loss": 0.5}),
)
_EVENTS = (
    Resumed(number=1, versions={"trainer": 0}, why="it was killed"),
    Admitted(id="p-0", origin=0, split="train", epoch=0, row=0, min_version=0),
    Admitted(id="p-1", origin=1, split="train", epoch=0, row=1, min_version=0),
    Trained(
        node="trainer", version=1, batch="b-1", origins=(0,), tokens=3, staleness_max=1, staleness_mean=0.5,
        reward_mean=1.0, metrics={"loss": 0.1},
    ),
    DroppedEvent(node="reward", parent="p-1>generator", origins=(1,), reason="dead_letter", detail="broken"),
    Resumed(number=2, versions={"trainer": 1}, why="it was killed again"),
)  # fmt: skip
_LEDGER = b"".join(EVENT.dump_json(e) + b"\n" for e in _EVENTS)
_MARKED = CheckpointMark(
    run_id="run", node="trainer", version=3, ranks=1,
    files=(CheckpointFile(name="shard-00001-model-00001-of-00001.safetensors", bytes=3, sha256="a" * 64),),
)  # fmt: skip
_STATUS = RoleStatus(
    role="reward", replica=0, pid=1, host="here", nodes=(NodeStatus(node="reward", busy_s=1.5),)
)
_TOML = b"""\
steps = 3
staleness = 1
model = "m"
[optimizer]
lr = 1e-4
betas = [0.9, 0.95]
[sampling]
temperature = 0.7
max_new_tokens = 8
[reward]
kind = "contains"
text = "x"
[data]
path = "rows.jsonl"
"""
_PROFILE = b"""\
[profile.slurm]
on = "slurm"
python = "/usr/bin/python3"
secrets = { HF_TOKEN = "~/.hf" }
[profile.slurm.roles.trainer]
gpus = 2
memory_mb = 1000
[profile.slurm.slurm]
mode = "packed"
nodes = 2
"""
_ROWS = (
    b'{"prompt": "2+2=", "answer": "4"}\n{"prompt": "3+3=", "answer": 6, "metadata": {"level": [1, null]}}\n'
)


_MANIFEST = json.dumps(
    {
        "run_id": "run", "pipeline": {"function": "aipo:aipo", "file": "aipo.py", "sha256": "a" * 64},
        "graph_digest": "b" * 64, "config": {"steps": 3, "optimizer": {"lr": 1e-4}}, "sources": {},
        "seed": 0, "python": "3.11", "platform": "linux", "hardware": {"cpus": 2, "memory_mb": 9},
        "host": "here", "pid": 7, "started": "2026-01-01T00:00:00Z", "argv": ["run", "aipo"],
    }
).encode()  # fmt: skip
_LIST = b"[" + _ROWS.replace(b"}\n{", b"},{") + b"]"
_TABLE = b'prompt,answer\na,1\n"b, c",2\n'
_PAYLOAD = b"what lies in the store"
_CLAIMED = ("0" * 32, len(_PAYLOAD), xxhash.xxh3_128_digest(_PAYLOAD))


def _parquet() -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    library: tuple[Any, Any] = (pa, parquet)
    out = io.BytesIO()
    library[1].write_table(library[0].table({"prompt": ["a", "b"], "answer": ["1", "2"]}), out)
    return out.getvalue()


# --- who reads it -----------------------------------------------------------------------------------------


def _message(kind: type[Message]) -> Read:
    return lambda data, folder: decode(data, kind)


def _claim(data: bytes, folder: Path) -> None:
    """A message with this payload, taken off an edge whose large payloads lie in a folder."""

    async def take() -> None:
        inner, store = MemoryBroker(), FolderStore(folder / "claims")
        store.write("e", _CLAIMED[0], ("g",), _PAYLOAD)
        broker = ClaimChecked(inner.connect(), store)
        await broker.declare([EdgeDecl(name="e", groups=("g",))], [])
        await inner.producer("e", 0).put("id", data)
        lease = await broker.consumer("e", "g").lease(wait_s=0)
        assert lease is not None
        await lease.ack()
        await broker.close()

    asyncio.run(take())


def _beat(data: bytes, folder: Path) -> None:
    read_beat(data)


def _graph(data: bytes, folder: Path) -> None:
    (folder / "graph.json").write_bytes(data)
    spec = RunDir(folder).read_graph()
    # Whatever can be imported is: names of modules aren't made up here.
    if all(n.component.startswith(("tests.toys:", "arriero.")) for n in spec.nodes):
        Graph.from_spec(spec).check()


def _ledger(data: bytes, folder: Path) -> None:
    for name in ("ledger.jsonl", "history.jsonl"):
        (folder / name).write_bytes(data)
    run = RunDir(folder)
    _, events = read_history(run)
    ledger = Ledger()
    for event in effective(events):
        ledger.apply(event)
    assert ledger.in_flight_origins is not None


def _mark(data: bytes, folder: Path) -> None:
    place = folder / "000000003"
    place.mkdir()
    (place / MARK).write_bytes(data)
    store = CheckpointStore(str(folder))
    assert store.newest() is None  # its file isn't there, whatever it says
    store.mark(3)


def _chain(data: bytes, folder: Path) -> None:
    (folder / "chain").mkdir()
    (folder / "chain" / "000000000000.jsonl").write_bytes(data)
    walk = Walk()
    for line in chain_lines(str(folder)):
        walk.take(line)


def _run_file(name: str) -> Read:
    def read(data: bytes, folder: Path) -> None:
        (folder / f"{name}.json").write_bytes(data)
        getattr(RunDir(folder), f"read_{name}")()

    return read


def _options(data: bytes, folder: Path) -> None:
    (folder / "config.toml").write_bytes(data)
    resolve(AIPOConfig, folder / "config.toml", [])


def _words(data: bytes, folder: Path) -> None:
    resolve(AIPOConfig, None, data.decode(errors="replace").split("\n"))


def _profile(data: bytes, folder: Path) -> None:
    (folder / "arriero.toml").write_bytes(data)
    read_profile("slurm", "slurm", folder / "arriero.toml")


def _rows(ending: str) -> Read:
    def read(data: bytes, folder: Path) -> None:
        path = folder / f"rows.{ending}"
        path.write_bytes(data)
        read_rows(str(path))
        if ending in ("jsonl", "parquet"):
            blocks = open_blocks(str(path), in_memory=False)
            assert sum(blocks.sizes) > 0
        asyncio.run(_first(PromptSource(path=str(path), epochs=1)))

    return read


async def _first(source: PromptSource) -> None:
    async for _ in source.run():
        return


def targets() -> list[Target]:
    """Everything that reads what another process, another run or a person has written."""
    entry = RunEntry(what="started", detail="x").model_dump_json().encode()
    end = Committed().model_dump_json().encode()
    line = b"".join(e[:-1] + b',"hash":"' + b"0" * 64 + b'"}\n' for e in (entry, end))
    options = RunOptions(run_id="run").model_dump_json().encode()
    messages = [
        Target(
            name=f"message {type(m).__name__}", examples=(encode(m),), read=_message(type(m)),
            refusals=(CodecError,),
        )
        for m in _MESSAGES
    ]  # fmt: skip
    claim = b"\x00arriero claim\x00" + msgspec.msgpack.encode([*_CLAIMED])
    beat = msgspec.msgpack.encode([_STATUS.model_dump_json().encode(), [["$JS.ACK.a", 1.0]]])
    spec = toy_graph().check().model_dump_json().encode()
    words = b"--steps\n3\n--optimizer.lr=1e-4\n--reward\ncontains\n--reward.text\nx"
    words += b"\n--data\nrows.jsonl\n--model=m"
    summary, mark = b'{"state": "finished", "steps": 3}', _MARKED.model_dump_json().encode()
    user = (UserError,)
    return [
        *messages,
        Target(name="claim", examples=(claim, b"x"), read=_claim, refusals=(BrokerError,)),
        Target(name="heartbeat", examples=(beat,), read=_beat, refusals=(BrokerError,)),
        Target(name="graph", examples=(spec,), read=_graph, refusals=user),
        Target(name="run options", examples=(options,), read=_run_file("options"), refusals=user),
        Target(name="manifest", examples=(_MANIFEST,), read=_run_file("manifest"), refusals=user),
        Target(name="summary", examples=(summary,), read=_run_file("summary"), refusals=user),
        Target(name="ledger", examples=(_LEDGER,), read=_ledger, refusals=(UserError, LedgerError)),
        Target(name="checkpoint mark", examples=(mark,), read=_mark, refusals=(ValueError,)),
        Target(name="record", examples=(line * 3,), read=_chain, refusals=(ChainError,)),
        Target(name="configuration", examples=(_TOML,), read=_options, refusals=user),
        Target(name="command line", examples=(words,), read=_words, refusals=user),
        Target(name="profile", examples=(_PROFILE,), read=_profile, refusals=user),
        Target(name="rows jsonl", examples=(_ROWS,), read=_rows("jsonl"), refusals=user),
        Target(name="rows json", examples=(_LIST,), read=_rows("json"), refusals=user),
        Target(name="rows csv", examples=(_TABLE,), read=_rows("csv"), refusals=user),
        Target(name="rows parquet", examples=(_parquet(),), read=_rows("parquet"), refusals=user),
    ]  # fmt: skip
