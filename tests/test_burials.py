"""A record that kills or outlasts its holders ends in the ledger, with the prompts it came from."""

from __future__ import annotations

import pytest

from arriero.engine.broker import EdgeDecl
from arriero.engine.codec import encode
from arriero.engine.lineage.recorder import RECORD
from arriero.engine.memory import MemoryBroker
from arriero.launchers.burials import Burials
from arriero.schemas.ledger import CONTROL_LOG, EVENT, LEDGER_LOG, DroppedEvent
from arriero.schemas.messages import Prompt
from tests.toys import toy_graph


async def ledger(broker: MemoryBroker, number: int) -> list[DroppedEvent]:
    found: list[DroppedEvent] = []
    async for payload in broker.follow(LEDGER_LOG):
        event = EVENT.validate_json(payload)
        assert isinstance(event, DroppedEvent)
        found.append(event)
        if len(found) == number:
            break
    return found


async def test_what_the_broker_gave_up_is_in_the_ledger_once_with_its_origins() -> None:
    broker = MemoryBroker()
    edge = EdgeDecl(name="prompts", groups=("generator-prompts",), max_deliveries=2)
    await broker.declare([edge], [LEDGER_LOG, CONTROL_LOG])
    put = broker.producer("prompts", 0)
    await put.put("a", encode(Prompt(id="a", text="1+1=", origins=(4,))))
    await put.put("b", b"no prompt")
    consumer = broker.consumer("prompts", "generator-prompts")
    for _ in range(4):  # both are given back twice
        lease = await consumer.lease(wait_s=1)
        assert lease is not None
        await lease.nack("its holder died")
    burials = Burials(toy_graph().check())
    await burials.write(broker)
    await burials.write(broker)
    events = {e.parent: e for e in await ledger(broker, 2)}
    assert events["a"].origins == (4,)
    assert events["b"].origins == ()
    assert {e.node for e in events.values()} == {"generator"}
    assert {e.reason for e in events.values()} == {"dead_letter"}
    assert {e.detail for e in events.values()} == {"its holder died"}
    await Burials(toy_graph().check()).write(broker)  # another supervisor: the event's id is the same
    assert len(await ledger(broker, 2)) == 2
    await broker.close()


async def test_what_the_recorder_gave_up_is_no_loss_of_the_broker() -> None:
    broker = MemoryBroker()
    edge = EdgeDecl(name="reward", groups=("collect-scored", RECORD), max_deliveries=1)
    await broker.declare([edge], [LEDGER_LOG, CONTROL_LOG])
    await broker.producer("reward", 0).put("a", b"a group")
    lease = await broker.consumer("reward", RECORD).lease(wait_s=1)
    assert lease is not None
    await lease.nack("its payload can't be read")
    with pytest.raises(TimeoutError, match="the record lacks a of edge reward: its payload can't be read"):
        await Burials(toy_graph().check()).write(broker)
    await broker.close()
