"""The class for scripts, as scripts use it: many never close it."""

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from xylite import LLM, SamplingParams
from xylite.errors import EngineError, RequestError
from xylite.llm import _Room

pytestmark = pytest.mark.model

GREEDY = SamplingParams(max_tokens=2, temperature=0.0)
SCRIPT = """
from xylite import LLM, SamplingParams
llm = LLM("demo")
print(llm.generate(["1, 2, 3,"], SamplingParams(max_tokens=2, temperature=0.0))[0][0].text)
"""


# Ctrl-C while the model loads, which ends when the loop is already being closed.
INTERRUPTED = """
import signal, threading
from xylite import LLM
from xylite.runtime import build
from xylite.text_engine import TextEngine
closing, stop, calls = threading.Event(), TextEngine._stop_threads, []

def load(*_):
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    closing.wait()

async def stop_threads(engine):
    calls.append(engine)
    if len(calls) == 2:
        closing.set()
    await stop(engine)

build.build, TextEngine._stop_threads = load, stop_threads
try:
    LLM("demo")
except KeyboardInterrupt:
    print("interrupted")
"""


def own_threads():
    """Threads that a model has started (tqdm has one of its own, for all)."""
    return [t for t in threading.enumerate() if t.name.startswith(("xylite", "asyncio"))]


def test_a_script_that_never_closes_its_model_ends_quietly():
    command = [sys.executable, "-X", "dev", "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = [x for x in done.stderr.splitlines() if not x.startswith("Executing")]  # slow on purpose
    assert (done.returncode, said) == (0, [])
    assert done.stdout.strip() == "4"


def test_ctrl_c_while_the_model_loads_ends_quietly():
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


def test_a_model_that_nobody_holds_any_more_is_freed():
    before = own_threads()  # the other tests' model may live
    llm = LLM("demo", num_blocks=16, kv_cache_memory_bytes=None)
    assert llm.generate("1, 2, 3,", GREEDY)[0][0].text == " 4"
    gone, engine = weakref.ref(llm), weakref.ref(llm._engine)
    del llm
    gc.collect()
    assert gone() is None and engine() is None
    assert own_threads() == before


def test_a_model_may_be_closed_twice_and_a_failed_start_leaves_no_thread(tmp_path):
    before = own_threads()
    with LLM("demo", num_blocks=16, kv_cache_memory_bytes=None) as llm:
        llm.close()
    with pytest.raises(Exception, match="config.json"):
        LLM(str(tmp_path))
    assert own_threads() == before


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", num_blocks=16, kv_cache_memory_bytes=None) as llm:
        yield llm
        assert llm.generate("1, 2, 3,", GREEDY)[0][0].text == " 4", "it lives"


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (None, "prompts must be a list of texts or token ids, or a text, got None"),
        (5, "prompts must be a list of texts or token ids, or a text, got 5"),
        (b"abc", "prompts must be .*, got b'abc'"),
        ({"prompt": "a"}, "prompts must be .*, got {'prompt': 'a'}"),
        ([1, "a"], "prompt must hold token ids, got 'a'"),
        (["a", 1], r"prompts\[1\] must be a list of token ids, or a text, got 1"),
        (["a", None], r"prompts\[1\] must be .*, got None"),
        ([[1], ["a"]], r"prompts\[1\]: prompt must hold token ids, got 'a'"),
        (["a", []], r"prompts\[1\]: the prompt is empty"),
        pytest.param(10**5000, "prompts must be .*, got a huge int", id="a huge int"),
        ("\ud800", "the text is not valid Unicode"),
    ],
)
def test_prompts_of_a_wrong_kind_are_refused_by_name_and_value(llm, prompts, said):
    with pytest.raises(RequestError, match=f"^{said}"):
        llm.generate(prompts, GREEDY)


def test_wrong_kinds_of_other_arguments_are_refused_by_name_and_value(llm):
    engine = llm._engine
    for name, wrong in {
        "params": lambda: llm.generate("a", {"max_tokens": 1}),
        "n": lambda: llm.generate("a", SamplingParams(n="2")),
        "stop": lambda: llm.generate("a", SamplingParams(stop=5)),
        "stop_token_ids": lambda: llm.generate("a", SamplingParams(stop_token_ids=b"a")),
        "messages": lambda: llm.chat(5),
        r"messages\[0\].role": lambda: llm.chat([{1: 2}]),
        "tokens": lambda: engine.decode("abc"),
        "token_id": lambda: engine.token_text(None),
        "text": lambda: llm._run(engine.encode(b"a")),
    }.items():
        with pytest.raises(RequestError, match=f"^{name} must .*, got "):
            wrong()


def test_a_closed_model_says_that_it_is_closed():
    llm = LLM("demo", num_blocks=16, kv_cache_memory_bytes=None)
    llm.close()
    for call in (lambda: llm.generate("a"), lambda: llm.chat([{"role": "user", "content": "a"}])):
        with pytest.raises(EngineError, match="this model was closed"):
            call()


def test_calls_of_several_threads_share_the_places_of_one_engine():
    settings = {"num_blocks": 64, "kv_cache_memory_bytes": None}
    with LLM("demo", max_num_seqs=2, max_num_queued_reqs=1, **settings) as llm:
        calls = {
            1: lambda n: llm.generate(["1, 2, 3,"] * 8, SamplingParams(n=n, max_tokens=2)),
            3: lambda n: llm.generate(["1, 2, 3,"] * 3, SamplingParams(n=n, max_tokens=2)),
            2: lambda n: [
                llm.chat([{"role": "user", "content": "a"}], SamplingParams(n=n, max_tokens=2))
            ],
        }
        with ThreadPoolExecutor(4) as pool:
            made = [(n, pool.submit(call, n)) for n, call in calls.items() for _ in range(2)]
            for n, call in made:
                assert all(len(answer) == n for answer in call.result(60))
        with pytest.raises(RequestError, match="takes at most 3 at a time"):
            llm.generate("a", SamplingParams(n=4))


async def test_places_are_given_in_order_and_come_back_from_who_gives_up():
    room, order, leave = _Room(3), [], asyncio.Event()

    async def visit(name, num):
        async with room.taken(num):
            order.append(name)
            await leave.wait()

    tasks = {name: asyncio.ensure_future(visit(name, num)) for name, num in (("a", 2), ("b", 2))}
    await asyncio.sleep(0)
    tasks["c"] = asyncio.ensure_future(visit("c", 1))
    await asyncio.sleep(0)
    assert order == ["a"], "c would fit, but came after b"
    tasks["b"].cancel()
    for _ in range(4):
        await asyncio.sleep(0)
    assert order == ["a", "c"]
    leave.set()
    async with asyncio.timeout(5):
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        await visit("more than there are", 7)
    assert room._free == 3
