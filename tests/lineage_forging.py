"""Records changed and hashed anew from end to end, as a patient forger would."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from arriero.engine.lineage.chain import GENESIS, lines, link
from arriero.engine.lineage.content import SALT_BYTES, arrays_sha256, sha256
from arriero.engine.lineage.reader import Lineage
from arriero.launchers.rundir import RunDir, write_json
from arriero.schemas.lineage import Anchor, Entry, GroupEntry, Noted
from tests.lineage_runs import overwrite

Entries = list[Entry]
Array = np.ndarray[Any, Any]


def rechained(run: RunDir, change: Callable[[Entries], Entries]) -> None:
    """Change entries and hash everything anew: chain, summary and ledger.jsonl."""
    entries = change([line.entry for line in lines(str(run.lineage))])
    head, written = GENESIS, list[bytes]()
    for entry in entries:
        body = entry.model_dump_json().encode()
        head = link(head, body)
        written.append(body[:-1] + b',"hash":"' + head.encode() + b'"}\n')
    (segment,) = (run.lineage / "chain").iterdir()
    segment.write_bytes(b"".join(written))
    anchor = Anchor(entries=len(entries), head=head)
    write_json(run.summary, run.read_summary().model_copy(update={"lineage": anchor}))
    events = [e.event.model_dump_json() + "\n" for e in entries if isinstance(e, Noted)]
    run.ledger.write_text("".join(events))


def hashes(record: Lineage, entry: GroupEntry, arrays: dict[str, Array]) -> dict[str, str]:
    salt = record.text(entry.text)[:16]
    return {
        "shape_sha256": arrays_sha256({k: arrays[k] for k in ("mask", "versions")}),
        "tokens_sha256": arrays_sha256({k: arrays[k] for k in ("tokens", "logprobs")}, salt),
    }


def with_arrays(run: RunDir, number: int, name: str, change: Callable[[Array], None]) -> None:
    """Change an array of a training group and all hashes of it."""
    record = Lineage(str(run.lineage))
    key, group = [(k, g) for k, g in record.groups.items() if g.prompt.split == "train"][number]
    arrays = {k: v.copy() for k, v in record.arrays(group).items()}
    change(arrays[name])
    overwrite(str(run.lineage), "rollouts", group.arrays, arrays)

    def rehash(entries: Entries) -> Entries:
        for k, e in enumerate(entries):
            if isinstance(e, GroupEntry) and e.scores and e.scores.id == key:
                entries[k] = e.model_copy(update=hashes(record, e, arrays))
        return entries

    rechained(run, rehash)


def with_texts(run: RunDir, old: str, new: str) -> None:
    """Change what the first training group that says `old` in its texts says, and all hashes of it."""
    assert len(old.encode()) == len(new.encode())
    record = Lineage(str(run.lineage))
    texts = {k: (g, record.text(g.text)) for k, g in record.groups.items() if g.prompt.split == "train"}
    key, (group, text) = next((k, v) for k, v in texts.items() if old.encode() in v[1])
    other = text[:SALT_BYTES] + text[SALT_BYTES:].replace(old.encode(), new.encode(), 1)
    overwrite(str(run.lineage), "text", group.text, {"bytes": np.frombuffer(other, np.uint8)})
    prompt = json.dumps(json.loads(other[SALT_BYTES:])["prompt"], ensure_ascii=False, separators=(",", ":"))
    told = {
        "text_sha256": sha256(other),
        "prompt_sha256": sha256(other[:SALT_BYTES] + prompt.encode()),
    }

    def rehash(entries: Entries) -> Entries:
        for k, e in enumerate(entries):
            if isinstance(e, GroupEntry) and (e.scores.id if e.scores else e.id) == key:
                entries[k] = e.model_copy(update=told)
        return entries

    rechained(run, rehash)
