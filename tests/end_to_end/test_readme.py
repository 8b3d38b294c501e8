"""README's Python snippets, run as they stand, with the demo model."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

ROOT = Path(__file__).parent.parent.parent
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)

pytestmark = pytest.mark.model


def snippet(word: str) -> str:
    (found,) = (s for s in SNIPPETS if word in s)
    return found


def run(code: str) -> str:
    """What the code prints, run as a script of its own."""
    child = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=170,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


def test_every_snippet_is_run_here():
    assert len(SNIPPETS) == 3


def test_the_asyncio_snippet_prints_a_story():
    assert len(run(snippet("engine.generate")).split()) >= 5


def test_the_script_snippet_answers_each_prompt():
    answers = run(snippet("LLM"))
    assert "Paris" in answers
    assert len(answers.strip().splitlines()) >= 2


async def test_the_mounting_snippet_serves_below_its_prefix():
    names: dict[str, Any] = {"__name__": "snippet"}
    exec(snippet("add_subapp"), names)
    client = TestClient(TestServer(names["build"](), host="127.0.0.1"))
    async with asyncio.timeout(150), client:
        body = {"prompt": "The capital of France is", "max_tokens": 5, "temperature": 0}
        async with client.post("/llm/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            assert "Paris" in (await response.json())["choices"][0]["text"]
        async with client.get("/v1/models") as response:
            assert response.status == 404
