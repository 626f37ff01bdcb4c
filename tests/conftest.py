"""Fixtures that all tests share: a real nats-server for the session, buses of both kinds."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import pytest

from talaria_common.memory_bus import MemoryBroker, MemoryBus
from talaria_common.nats_bus import NatsBus
from talaria_common.natsd import NatsServer

# Before torch is imported: spinning OpenMP threads of two tests on two cores collapse.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server for tests that leave it alone; one that is killed is the test's own."""
    server = NatsServer(tmp_path_factory.mktemp("nats")).start()
    yield server
    server.stop()


@pytest.fixture
async def nats_bus(nats_server: NatsServer) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(nats_server.url, name="test")
    yield bus
    await bus.close()


@pytest.fixture
async def memory_bus() -> AsyncIterator[MemoryBus]:
    bus = MemoryBroker().connect()
    yield bus
    await bus.close()
