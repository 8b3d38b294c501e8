"""bench.compare: the requests that servers get, and what becomes of answers that are not whole."""

from typing import Any

import pytest
from aiohttp.test_utils import TestServer

from bench.compare import online
from bench.compare.offline import EngineFailed
from bench.compare.online import Load
from tests.http.fake_engine import Call, FakeEngine, Item, paused, said
from xylite.http import make_app


def test_a_salt_keeps_equal_beginnings_equal_and_different_ones_different():
    items = read("agent", salt=0)
    salted = read("agent", salt=3)
    assert len({i.prompt[:300] for i in items}) == len({i.prompt[:300] for i in salted}) == 1
    assert len({i.prompt for i in salted}) == len({i.prompt for i in items})
    assert [i.prompt[4:] for i in salted] == [i.prompt[4:] for i in items]
    for other in (0, 1, 2):
        assert not {i.prompt[:4] for i in read("chat", other)} & {
            i.prompt[:4] for i in read("chat", 3)
        }
    assert all(0 <= t < 49152 for i in salted for t in i.prompt)


def read(trace: str, salt: int) -> list[Any]:
    return online.requests(Load(trace, 8, 64), salt, 49152)


def test_salted_ids_leave_control_tokens_alone():
    assert online.salted((1, 299, 300, 999, 500), 1, 1000)[:2] == (1, 299)
    seen = {online.salted((i,), 5, 1000)[0] for i in range(300, 1000)}
    assert seen == set(range(300, 1000))


def test_every_load_has_as_many_requests_as_it_names():
    for load in online.LOADS:
        assert len(online.requests(load, 1, 49152)) == load.limit
        assert load.limit >= load.concurrency


@pytest.fixture
async def url():
    """A server that says one character per token."""

    def speaking(call: Call) -> list[Item]:
        count = 1 if call.prompt == [400] else call.params.max_tokens or 1
        return paused(said("a" * count, params=call.params, finish="length"))

    async with TestServer(make_app(FakeEngine(speaking)), host="127.0.0.1") as server:
        yield str(server.make_url("")).rstrip("/")


async def test_a_load_gives_every_figure(url: str):
    items = [online.Item((65, 66), 5) for _ in range(6)]
    figures = await online.send_load(url, items, 2)
    assert set(figures) >= {"tok_s", "ttft_p50_ms", "tpot_p50_ms", "itl_p99_ms"}
    assert all(value > 0 for value in figures.values())


async def test_a_load_with_a_refused_request_fails(url: str):
    with pytest.raises(EngineFailed, match="1 of 2 requests failed: HTTP 400"):
        await online.send_load(url, [online.Item((65,), 2), online.Item((2**30,), 2)], 2)


async def test_an_answer_that_is_cut_short_fails(url: str):
    with pytest.raises(EngineFailed, match="7 tokens were asked for and 3 came"):
        await online.send_load(url, [online.Item((65,), 2), online.Item((400,), 5)], 2)
