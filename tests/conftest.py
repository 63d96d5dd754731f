"""Fixtures shared by all tests: one real nats-server a session, and both brokers under one name."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

from arriero.engine.claim_stores import FolderStore
from arriero.engine.nats_server import NatsServer, start_server
from tests.brokers import Engine

if TYPE_CHECKING:
    from arriero.engine.weights import WeightReceiver

# The same examples each time, however slow the machine: `make fuzz` is where new ones are tried.
settings.register_profile(
    "arriero", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("arriero")

# Begun first where files run side by side: the longest, of which one that begins last is waited for alone.
_LONGEST = (
    "test_critics_resume.py", "test_resume.py", "test_launch.py", "test_vllm_standby.py", "test_engines.py",
    "test_engines_weights.py", "test_lineage_record.py", "test_scoring_models.py", "test_pipelines.py",
)  # fmt: skip

_runs = itertools.count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The order of the files; within each it stays."""
    order = {name: at for at, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server on a free port with a token of its own."""
    server = start_server(tmp_path_factory.mktemp("nats"))
    yield server
    server.stop()


@pytest.fixture
def run_name() -> str:
    """A name no other test of the session uses, so that all can share one server."""
    return f"run{next(_runs)}"


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short path, for servers that a test starts itself."""
    return tmp_path_factory.mktemp("server")


@pytest_asyncio.fixture(params=["memory", "nats", "claims"])
async def engine(
    request: pytest.FixtureRequest, nats_server: NatsServer, run_name: str, tmp_path: Path
) -> AsyncIterator[Engine]:
    """Both brokers in turn, and one with every payload in a store.

    Fails the test if it leaves messages on its edges or payloads in the store.
    """
    kind = str(request.param)
    engine = Engine(kind, run_name, nats_server if kind == "nats" else None)
    if kind == "claims":
        engine.store = FolderStore(tmp_path / "claims")
    yield engine
    try:
        if not engine.leftovers:
            await engine.assert_empty()
    finally:
        await engine.close()


@pytest.fixture
def url() -> Iterator[str]:
    """A place in shared memory for weights, gone when the test ends."""
    from arriero.engine.weights import destroy
    from arriero.engine.weights.shm import path_of

    url = f"shm://test-{uuid4().hex}"
    yield url
    destroy(url)
    assert not path_of(url).exists()


@pytest.fixture
def receiver() -> Iterator[WeightReceiver]:
    """A receiver of whole weights."""
    from arriero.engine.weights import WeightReceiver

    receiver = WeightReceiver("generator-0")
    yield receiver
    receiver.close()
