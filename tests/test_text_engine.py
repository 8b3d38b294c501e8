"""TextEngine before its start, after its end, and how long it holds the event loop."""

import asyncio
import contextlib
import functools
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.runtime.test_engine import toy_engine
from xylite.checkpoint import open_checkpoint
from xylite.config import EngineConfig
from xylite.errors import EngineError, Overloaded, RequestError
from xylite.http.generate import Answer, Prompt, submit
from xylite.http.service import Service
from xylite.runtime.request import Limits, SamplingParams
from xylite.text.chat import MAX_CHAT_CHARS
from xylite.text.tokenizer import Tokenizer
from xylite.text_engine import INLINE_CHARS, PROMPTS_PER_TURN, TextEngine

ONE = SamplingParams(max_tokens=1)
USER = [{"role": "user", "content": "x"}]
LONG = "some words " * INLINE_CHARS


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_checkpoint(open_checkpoint("demo"))


@contextlib.asynccontextmanager
async def toy_text_engine(**settings):
    """A TextEngine over the toy model, its device held up; with the demo model's tokenizer."""
    made = TextEngine(EngineConfig(model="demo"))
    made.tokenizer = tokenizer()
    made.limits = Limits(made.tokenizer.vocab_size, max_model_len=8192, max_kv_tokens=10**6)
    async with toy_engine(num_blocks=4096, **settings) as (engine, runner):
        runner.open.clear()
        made._engine = engine
        made._threads = [ThreadPoolExecutor(1), ThreadPoolExecutor(1)]
        try:
            yield made
        finally:
            runner.open.set()
            await made._stop_threads()


def calls(engine: TextEngine):
    """Every method that needs a model, by name."""

    async def now(call):
        return call()

    return {
        "encode": lambda: engine.encode("x"),
        "encode, long": lambda: engine.encode(LONG),
        "decode": lambda: now(lambda: engine.decode([65])),
        "token_text": lambda: now(lambda: engine.token_text(65)),
        "render": lambda: engine.render(USER),
        "require_room": lambda: now(lambda: engine.require_room(1)),
        "submit": lambda: engine.submit("x", ONE),
        "submit, ids": lambda: engine.submit([65], ONE),
        "generate": lambda: anext(aiter(engine.generate("x", ONE))),
    }


async def test_every_method_says_that_the_model_is_still_loading():
    for name, call in calls(TextEngine(EngineConfig(model="demo"))).items():
        with pytest.raises(Overloaded, match="still loading") as caught:
            await call()
        assert caught.value.code == "loading", name


async def test_every_method_says_that_the_engine_was_closed():
    async with toy_text_engine() as engine:
        assert len(await engine.encode(LONG)) > 1000 and await engine.encode("x")
        assert engine.decode(await engine.encode("abc", add_special_tokens=False)) == "abc"
    for name, call in calls(engine).items():
        with pytest.raises(EngineError, match="was closed") as caught:
            await call()
        assert (caught.value.code, caught.value.status) == ("closed", 503), name


async def test_a_text_that_waits_for_a_thread_when_the_engine_closes_is_told():
    go_on = threading.Event()
    async with toy_text_engine() as engine:
        busy = engine._threads[1].submit(go_on.wait, 20)
        waits = asyncio.ensure_future(engine.encode(LONG))
        gives_up = asyncio.ensure_future(engine.encode(LONG))
        await asyncio.sleep(0)
        gives_up.cancel()
        stops = asyncio.ensure_future(engine._stop_threads())
        async with asyncio.timeout(10):
            with pytest.raises(EngineError, match="was closed"):
                await waits
            with pytest.raises(asyncio.CancelledError):
                await gives_up
            go_on.set()
            await stops
    assert busy.result()


async def test_only_a_text_that_is_to_be_cut_may_be_longer_than_the_context():
    async with toy_text_engine() as engine:
        text = "a" * (8192 * engine.tokenizer.max_token_bytes + 1)
        with pytest.raises(RequestError, match="maximum context length is 8192") as refused:
            await engine.encode(text)
        assert refused.value.code == "context_length_exceeded"
        assert len(await engine.encode(text, to_be_cut=True)) > 8192
        with pytest.raises(RequestError, match="maximum context length is 8192"):
            await engine.encode("a" * (MAX_CHAT_CHARS + 1), to_be_cut=True)


async def test_closing_a_stream_ends_its_iteration():
    async with toy_text_engine() as engine:
        stream = await engine.submit("x", ONE)
        reader = asyncio.ensure_future(anext(stream, None))
        await asyncio.sleep(0)
        await stream.aclose()
        async with asyncio.timeout(10):
            assert await reader is None
            assert [event async for event in stream] == []


async def test_the_engine_tells_of_its_death():
    async with toy_text_engine() as engine:
        waits = asyncio.ensure_future(engine.dead.wait())
        engine._engine.dead = engine.dead  # as at the start
        engine._engine._die("a test")
        async with asyncio.timeout(10):
            assert await waits and engine.state == "dead"


def num_queued(engine: TextEngine) -> int:
    """Requests in the engine that have not ended."""
    return len(engine._engine.tickets)


def submitted(engine: TextEngine, prompts):
    """`submit` of a request with these prompts, as the HTTP server does it."""
    service = Service(
        engine=engine,
        config=SimpleNamespace(api_key=()),
        metrics=None,
        body_timeout_s=1,
        write_stall_s=1,
    )
    return submit(
        service,
        [Prompt(prompt, f"prompt[{i}]") for i, prompt in enumerate(prompts)],
        ONE,
        answer=Answer("x", "m", 0),
        priority=0,
        cache_salt="",
        add_special_tokens=True,
    )


def counted(engine: TextEngine, seen: list[int]):
    """A task that notes, turn by turn of the event loop, how many prompts were queued."""

    async def count() -> None:
        while True:
            seen.append(num_queued(engine))
            await asyncio.sleep(0)

    return asyncio.ensure_future(count())


@pytest.mark.parametrize("prompt", ["a text", [65, 66]])
async def test_a_request_of_many_prompts_does_not_hold_the_event_loop(prompt):
    async with toy_text_engine(max_num_seqs=4) as engine:
        seen: list[int] = []
        counter = counted(engine, seen)
        streams = await submitted(engine, [prompt] * 50)
        await asyncio.sleep(0)
        counter.cancel()
        assert seen[-1] == 50 == len(streams)
        steps = [b - a for a, b in itertools.pairwise(seen)]
        # Who is let through at the end of a turn goes on in the next one, before its others.
        assert max(steps) <= PROMPTS_PER_TURN + 1
        for stream in streams:
            await stream.aclose()


async def test_a_request_refused_half_way_takes_back_what_it_queued():
    async with toy_text_engine() as engine:
        seen: list[int] = []
        counter = counted(engine, seen)
        with pytest.raises(RequestError) as caught:
            await submitted(engine, [[65]] * 20 + [[10**6]] + [[65]] * 20)
        assert caught.value.param == "prompt[20]"
        assert caught.value.message.startswith("prompt[20]: prompt holds token id 1000000")
        assert max(seen) > PROMPTS_PER_TURN, "it was queued in part"
        assert num_queued(engine) == 0
        counter.cancel()


async def test_a_request_cancelled_half_way_takes_back_what_it_queued():
    async with toy_text_engine() as engine:
        task = asyncio.ensure_future(submitted(engine, ["x"] * 40))
        async with asyncio.timeout(10):
            while not num_queued(engine):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert num_queued(engine) == 0


@pytest.mark.parametrize(
    ("model", "name"),
    [(".", "my"), ("./", "my"), ("..", "models"), ("../my", "my"), ("/a/b.gguf", "b"), ("/", "/")],
)
def test_a_model_has_its_folders_name_however_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, name: str
) -> None:
    folder = tmp_path / "models" / "my"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert TextEngine(EngineConfig(model=model)).model_names == (name,)
