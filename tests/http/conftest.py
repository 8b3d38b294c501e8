"""Clients of the application, each in its own server on 127.0.0.1."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from tests.http.fake_engine import FakeEngine
from xylite.config import ServerConfig
from xylite.http import make_app

Connect = Callable[..., Awaitable[TestClient]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """connect(engine, ServerConfig fields..., app=options of make_app) -> TestClient."""
    clients: list[TestClient] = []

    async def make(
        engine: FakeEngine | None = None, app: dict[str, Any] | None = None, **config: Any
    ) -> TestClient:
        application = make_app(
            engine or FakeEngine(),
            ServerConfig(**config),
            **(app or {}),
        )
        server = TestServer(application, host="127.0.0.1")
        client = TestClient(server)
        await client.start_server()
        clients.append(client)
        return client

    yield make
    for client in clients:
        await client.close()
