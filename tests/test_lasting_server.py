"""The server of a run on a cluster starts again by itself, and the ledger can say so."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from arriero.engine.nats import NatsBroker
from arriero.engine.nats_access import Access
from arriero.launchers.conduct import LastingServer


async def test_a_server_that_is_killed_starts_again_with_what_it_had_and_that_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARRIERO_HOST", "localhost")
    server = LastingServer(folder, folder / "messages", Access(run="run", accounts=()))
    told: asyncio.Queue[tuple[int, str]] = asyncio.Queue()

    async def came_back(number: int, why: str) -> None:
        await told.put((number, why))

    lasting = asyncio.create_task(server.last(came_back))
    broker = await NatsBroker.connect(server.url, server.token, run="run")
    await broker.declare([], ["ledger"])
    try:
        for number in (1, 2):
            assert await broker.append("ledger", str(number), b"x")
            (process,) = (p for p in psutil.Process().children() if str(folder) in " ".join(p.cmdline()))
            process.kill()
            async with asyncio.timeout(30):
                assert await told.get() == (number, "nats-server ended by itself with code -9")
            assert not await broker.append("ledger", str(number), b"x"), "it is there already"
    finally:
        lasting.cancel()
        await asyncio.gather(lasting, return_exceptions=True)
        await broker.close()
        server.stop()
