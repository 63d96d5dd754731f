"""A generator that was taken over sends what it likes, within its rights: the run goes on, and counts it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from arriero.engine.codec import encode
from arriero.engine.nats_access import credential
from arriero.engine.nats_link import Link
from arriero.engine.nats_names import Names
from arriero.launchers.audit import audited
from arriero.launchers.rundir import RunDir
from arriero.schemas.ledger import EVENT, DroppedEvent
from arriero.schemas.messages import Prompt, RolloutGroup
from tests.test_launch import Launch
from tests.toys import rollout

STEPS = 30


def replayed(origin: int) -> bytes:
    """The rollouts of a prompt that was trained long ago, as the generator sent them then."""
    prompt = Prompt(id=f"prompt-{origin}", text="?", row=origin).stamped(
        id=f"prompt-{origin}", parents=(), origins=(origin,)
    )
    group = RolloutGroup(prompt=prompt, rollouts=(rollout(0), rollout(0)))
    return encode(group.stamped(id=f"prompt-{origin}>generator", parents=(prompt.id,), origins=(origin,)))


def of_other_code(payload: bytes) -> bytes:
    """The same with the schema of another version of arriero."""
    kind, _, fields = msgspec.msgpack.decode(payload)
    return msgspec.msgpack.encode((kind, "0badc0de", fields))


HOSTILE = {
    "noise": b"\xff" * 5000,
    "pickle": b"\x80\x04\x95\x17\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93.",
    "half": replayed(0)[:-40],
    "other-code": of_other_code(replayed(0)),
    "a-prompt": encode(Prompt(id="x", text="not rollouts", row=0)),
    "claim": b"\x00arriero claim\x00" + msgspec.msgpack.encode(["../../etc/passwd", 9, b"0" * 16]),
    "half-claim": b"\x00arriero claim\x00\xc1",
}


async def attack(run: Launch) -> None:
    """With what a generator knows."""
    (hub,) = run.processes("arriero.launchers.hub")
    address = json.loads((run.path / "hub.json").read_text())["url"]
    token = credential(hub.environ()["ARRIERO_TOKEN"], "generator")
    link = await Link.open(address, token, name="taken over", timeout_s=20)
    edge = Names(run.path.name).edge_subject("generator")
    for name, payload in HOSTILE.items():
        assert await link.store(edge, payload, name, what=name)
    assert not await link.store(edge, HOSTILE["noise"], "noise", what="the same once more")
    for number in range(5):
        assert await link.store(edge, replayed(0), f"again-{number}", what="replay")
    await link.close()


@pytest.mark.timeout(180)
def test_malformed_foreign_and_replayed_messages_are_refused_and_counted(tmp_path: Path) -> None:
    options = {"max_dead_letters": 10, "record": True}
    run = Launch(tmp_path, trainer={"steps": STEPS, "seconds": 0.2}, options=options)
    run.until(lambda: run.steps() >= 3)
    asyncio.run(attack(run))
    assert run.wait(120) == 0, run.errors
    events = [EVENT.validate_json(line) for line in RunDir(run.path).ledger.read_bytes().splitlines()]
    buried = Counter(e.parent for e in events if isinstance(e, DroppedEvent) and e.reason == "dead_letter")
    assert buried == dict.fromkeys(HOSTILE, 1)
    s = run.summary
    assert (s.state, s.steps, s.groups_trained) == ("finished", STEPS, STEPS * 4)
    assert s.staleness_max <= 1
    assert [f"{f.check}: {f.where}: {f.what}" for f in audited(str(run.path)).findings] == []
