"""A running server with the real model, in this process."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp.test_utils import TestClient, TestServer
from filelock import FileLock

from bench.model_dir import write_directory
from xylite.config import EngineConfig, ServerConfig
from xylite.http import make_app
from xylite.text_engine import TextEngine

SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 400 * 2**20, "max_num_batched_tokens": 128}


@pytest.fixture(scope="session")
def smollm2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as a directory; made once for all test processes."""
    root = tmp_path_factory.getbasetemp()
    if root.name.startswith("popen-"):
        root = root.parent
    path = root / "smollm2"
    with FileLock(str(root / "smollm2.lock")):
        if not path.exists():
            path.mkdir()
            write_directory(path)
    return path


class Client:
    """Speaks JSON to a server under test."""

    def __init__(self, http: TestClient, engine: TextEngine):
        self.http = http
        self.engine = engine

    async def post(self, path: str, body: dict[str, Any], status: int = 200, **kwargs: Any) -> Any:
        async with self.http.post(path, json=body, **kwargs) as response:
            text = await response.text()
            assert response.status == status, text
            return await response.json()

    async def get(self, path: str, status: int = 200) -> Any:
        async with self.http.get(path) as response:
            assert response.status == status, await response.text()
            return await response.json()

    async def complete(self, prompt: Any, max_tokens: int, **body: Any) -> Any:
        """The answer to a greedy completion."""
        asked = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **body}
        return await self.post("/v1/completions", asked)

    async def text(self, prompt: Any, max_tokens: int, **body: Any) -> str:
        return (await self.complete(prompt, max_tokens, **body))["choices"][0]["text"]

    async def chat(self, messages: Any, **body: Any) -> Any:
        asked = {"messages": messages, "temperature": 0, **body}
        return await self.post("/v1/chat/completions", asked)

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The JSON of each event of a stream; the last is "[DONE]"."""
        import json

        async with self.http.post(path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            found = []
            async for line in response.content:
                if line.startswith(b"data: "):
                    data = line[6:].decode("utf-8", "strict").strip()
                    found.append(data if data == "[DONE]" else json.loads(data))
            return found

    async def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name and labels."""
        async with self.http.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        return {
            line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
            for line in lines
            if not line.startswith("#")
        }


@contextlib.asynccontextmanager
async def served(model: Any, server: ServerConfig | None = None, **settings: Any):
    """A server of `model` with these engine settings, and a client that talks to it."""
    config = EngineConfig(**{"model": str(model), "dtype": "float32", **SMALL, **settings})
    async with TextEngine(config) as engine:
        app = make_app(engine, server or ServerConfig())
        async with TestClient(TestServer(app, host="127.0.0.1")) as http:
            yield Client(http, engine)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(smollm2_dir):
    """One server for all tests of a module, settings as a user gets them, computing in float32."""
    async with served(smollm2_dir) as made:
        yield made
