"""`xylite serve` in processes of their own, and what they say."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
START_S, END_S = 100, 60


class Served:
    """A server in a process of its own, and what it wrote to stderr so far."""

    def __init__(self, process: asyncio.subprocess.Process):
        self.process = process
        self.log = ""
        self.url = ""

    async def until(self, pattern: str) -> re.Match[str]:
        """Reads the log until it has the pattern."""
        async with asyncio.timeout(START_S):
            while (found := re.search(pattern, self.log)) is None:
                assert self.process.stderr is not None
                line = await self.process.stderr.readline()
                assert line, f"it ended without {pattern!r}:\n{self.log}"
                self.log += line.decode()
            return found

    async def end(self) -> int:
        """Its exit code, once it ends by itself."""
        async with asyncio.timeout(END_S):
            _, rest = await self.process.communicate()
        self.log += rest.decode()
        assert self.process.returncode is not None
        return self.process.returncode


class Servers:
    """Starts servers; `servers` ends those that still run."""

    def __init__(self) -> None:
        self.started: list[Served] = []

    async def start(self, *command: str) -> Served:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        self.started.append(Served(process))
        return self.started[-1]


@asynccontextmanager
async def servers() -> AsyncIterator[Servers]:
    """Servers that do not outlive the block."""
    made = Servers()
    try:
        yield made
    finally:
        for served in made.started:
            if served.process.returncode is None:
                served.process.kill()
                await served.process.communicate()
