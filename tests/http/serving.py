"""serve() over a fake engine, on a port of its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.http.fake_engine import FakeEngine
from xylite.config import ServerConfig
from xylite.http import serve


@asynccontextmanager
async def serving(engine: FakeEngine, **config: Any) -> AsyncIterator[tuple[str, Any]]:
    """(url, task of serve) once it listens."""
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    config.setdefault("port", 0)
    task = asyncio.ensure_future(serve(engine, ServerConfig(**config), url.set_result))
    await asyncio.wait([url, task], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    try:
        yield await url, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
