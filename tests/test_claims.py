"""Large payloads by claim check, on both stores; the contract itself is tested in test_brokers."""

import asyncio
import contextlib
import stat
import time
from pathlib import Path

import pytest

from arriero.engine.broker import BrokerError, EdgeEnded
from arriero.engine.claim_stores import ClaimStore, FolderStore, UrlStore
from arriero.engine.claims import ClaimChecked
from arriero.engine.memory import MemoryBroker
from arriero.engine.nats import NatsBroker
from arriero.engine.nats_server import NatsServer
from tests.brokers import edge, take

LARGE = bytes(range(256)) * 2000  # 512,000 bytes


@pytest.fixture(params=["folder", "url"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ClaimStore:
    if request.param == "folder":
        return FolderStore(tmp_path / "claims")
    return UrlStore(f"file://{tmp_path / 'claims'}")


def objects(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


async def checked(store: ClaimStore, *groups: str) -> tuple[ClaimChecked, MemoryBroker]:
    inner = MemoryBroker()
    broker = ClaimChecked(inner, store)
    await broker.declare([edge(groups=groups or ("reward",), bytes=2 << 20)], ["ledger"])
    return broker, inner


async def test_only_payloads_above_the_limit_go_to_the_store(store: ClaimStore, tmp_path: Path) -> None:
    broker, inner = await checked(store)
    producer = broker.producer("rollouts", 0)
    await producer.put("small", bytes(256 << 10))
    assert objects(tmp_path) == []
    await producer.put("large", LARGE)
    assert sum(path.stat().st_size for path in objects(tmp_path)) == len(LARGE)
    assert (await inner.depth("rollouts")).bytes < (256 << 10) + 200
    consumer = broker.consumer("rollouts", "reward")
    for expected in (bytes(256 << 10), LARGE):
        lease = await take(consumer)
        assert lease.payload == expected
        await lease.ack()
    assert objects(tmp_path) == []


async def test_a_payload_stays_until_the_last_group_has_acknowledged(
    store: ClaimStore, tmp_path: Path
) -> None:
    broker, _ = await checked(store, "trainer", "record")
    await broker.producer("rollouts", 0).put("large", LARGE)
    first = await take(broker.consumer("rollouts", "trainer"))
    await first.nack()
    again = await take(broker.consumer("rollouts", "trainer"))
    assert (again.payload, again.deliveries) == (LARGE, 2)
    await again.extend()
    await again.ack()
    other = await take(broker.consumer("rollouts", "record"))
    assert other.payload == LARGE
    await other.ack()
    await other.ack()
    assert objects(tmp_path) == []


class SlowStore(FolderStore):
    """Reads in a thread, and slowly, as one far away does."""

    bounded = False

    def read(self, edge: str, name: str, group: str) -> bytes:
        time.sleep(0.1)
        return super().read(edge, name, group)


async def test_a_lease_cancelled_on_its_last_delivery_is_no_dead_letter(tmp_path: Path) -> None:
    broker, inner = await checked(SlowStore(tmp_path / "claims"))
    await broker.producer("rollouts", 0).put("large", LARGE)
    consumer = broker.consumer("rollouts", "reward")
    for _ in range(2):
        await (await take(consumer)).nack()
    call = asyncio.ensure_future(consumer.lease(wait_s=5))
    while not (await inner.depth("rollouts")).leased["reward"]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert await inner.dead_letters() == []


async def test_a_known_id_leaves_nothing_in_the_store(store: ClaimStore, tmp_path: Path) -> None:
    broker, _ = await checked(store)
    producer = broker.producer("rollouts", 0)
    assert await producer.put("large", LARGE)
    assert not await producer.put("large", LARGE)
    assert len(objects(tmp_path)) == 1
    lease = await take(broker.consumer("rollouts", "reward"))
    assert lease.payload == LARGE
    await lease.ack()
    assert not await producer.put("large", LARGE)
    assert objects(tmp_path) == []


@pytest.mark.parametrize("damage", ["missing", "shorter", "changed"])
async def test_a_missing_or_damaged_payload_is_an_error_that_names_it(
    store: ClaimStore, tmp_path: Path, damage: str
) -> None:
    broker, _ = await checked(store)
    await broker.producer("rollouts", 0).put("gsm8k/17", LARGE)
    (path,) = objects(tmp_path)
    if damage == "missing":
        path.unlink()
    else:
        path.chmod(0o600)
        path.write_bytes(LARGE[:-1] if damage == "shorter" else b"\xff" + LARGE[1:])
    said = {"missing": "can't be read", "shorter": "has 511999 bytes, 512000 were put", "changed": "its hash"}
    consumer = broker.consumer("rollouts", "reward")
    with pytest.raises(BrokerError, match=rf"payload of message gsm8k/17 in file://.*{said[damage]}"):
        await consumer.lease(wait_s=1)
    assert await consumer.lease(wait_s=0.05) is None
    assert (await broker.depth("rollouts")).messages == 0
    (dead,) = await broker.broker.dead_letters()
    assert said[damage] in dead.error


async def test_a_dead_letter_keeps_its_payload_and_gives_its_place_back(
    store: ClaimStore, tmp_path: Path
) -> None:
    broker, _ = await checked(store)
    await broker.producer("rollouts", 0).put("poison", LARGE)
    for _ in range(3):
        await (await take(broker.consumer("rollouts", "reward"))).nack("ValueError")
    (dead,) = await broker.dead_letters()
    assert (dead.id, dead.payload) == ("poison", LARGE)
    if store.bounded:
        assert store.held("rollouts") == 0
    await broker.destroy()
    assert objects(tmp_path) == []


async def test_a_payload_that_looks_like_a_claim_arrives_as_it_was_sent(store: ClaimStore) -> None:
    broker, inner = await checked(store)
    await broker.producer("rollouts", 0).put("large", LARGE)
    forged = (await take(inner.consumer("rollouts", "reward"))).payload
    assert len(forged) < 200
    await broker.producer("rollouts", 0).put("forged", forged)
    await broker.producer("rollouts", 0).end()
    consumer = broker.consumer("rollouts", "reward")
    lease = await take(consumer)
    assert lease.payload == forged
    await lease.ack()


async def test_the_capacity_in_bytes_holds_for_the_folder(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "claims")
    broker, _ = await checked(store, "trainer", "record")
    producer = broker.producer("rollouts", 0)
    puts = [asyncio.ensure_future(producer.put(f"m{i}", LARGE)) for i in range(6)]
    await asyncio.sleep(0.2)
    assert [put.done() for put in puts] == [True] * 4 + [False] * 2
    assert (await broker.depth("rollouts")).bytes == pytest.approx(4 * len(LARGE), rel=0.01)
    for group in ("trainer", "record"):
        await (await take(broker.consumer("rollouts", group))).ack()
    await asyncio.wait_for(puts[4], 1)
    assert not puts[5].done()
    puts[5].cancel()
    ending = asyncio.ensure_future(producer.end())
    for group in ("trainer", "record"):
        with contextlib.suppress(EdgeEnded):
            while lease := await broker.consumer("rollouts", group).lease(wait_s=5):
                await lease.ack()
    await ending
    assert store.held("rollouts") == 0
    with pytest.raises(BrokerError, match="message huge has 3145728 bytes, the edge holds at most 2096640"):
        await producer.put("huge", bytes(3 << 20))


async def test_files_are_private_and_a_claim_cannot_name_other_files(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "claims")
    broker, _ = await checked(store)
    await broker.producer("rollouts", 0).put("large", LARGE)
    (path,) = objects(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "claims").stat().st_mode) == 0o700
    (tmp_path / "secret.reward").write_text("secret")
    with pytest.raises(FileNotFoundError):
        store.read("rollouts", "../../secret", "reward")
    await (await take(broker.consumer("rollouts", "reward"))).ack()


async def test_a_full_store_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "claims").write_text("a file where the folder should be")
    broker, _ = await checked(FolderStore(tmp_path / "claims"))
    with pytest.raises(BrokerError, match=r"can't write 512000 bytes to file://.*claims/rollouts/"):
        await broker.producer("rollouts", 0).put("large", LARGE)


async def test_payloads_larger_than_nats_takes_travel_by_claim(
    nats_server: NatsServer, run_name: str, tmp_path: Path
) -> None:
    huge = bytes(range(256)) * (40 << 12)  # 40 MiB
    inner = await NatsBroker.connect(nats_server.url, nats_server.token, run=run_name)
    broker = ClaimChecked(inner, FolderStore(tmp_path / "claims"))
    await broker.declare([edge(groups=("trainer", "record"), bytes=100 << 20)], [])
    await broker.producer("rollouts", 0).put("huge", huge)
    await broker.producer("rollouts", 0).end()
    for group in ("trainer", "record"):
        lease = await take(broker.consumer("rollouts", group))
        assert lease.payload == huge
        await lease.ack()
    assert objects(tmp_path) == []
    await inner.destroy()
    await broker.close()
