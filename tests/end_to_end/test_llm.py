"""The class for scripts, as scripts use it: many never close it."""

import gc
import subprocess
import sys
import threading
import weakref

import pytest

from xylite import LLM, SamplingParams

pytestmark = pytest.mark.model

GREEDY = SamplingParams(max_tokens=2, temperature=0.0)
SCRIPT = """
from xylite import LLM, SamplingParams
llm = LLM("demo")
print(llm.generate(["1, 2, 3,"], SamplingParams(max_tokens=2, temperature=0.0))[0][0].text)
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


def test_a_model_that_nobody_holds_any_more_is_freed():
    llm = LLM("demo", num_blocks=16, kv_cache_memory_bytes=None)
    assert llm.generate("1, 2, 3,", GREEDY)[0][0].text == " 4"
    gone, engine = weakref.ref(llm), weakref.ref(llm._engine)
    del llm
    gc.collect()
    assert gone() is None and engine() is None
    assert not own_threads()


def test_a_model_may_be_closed_twice_and_a_failed_start_leaves_no_thread(tmp_path):
    with LLM("demo", num_blocks=16, kv_cache_memory_bytes=None) as llm:
        llm.close()
    with pytest.raises(Exception, match="config.json"):
        LLM(str(tmp_path))
    assert not own_threads()
