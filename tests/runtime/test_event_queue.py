"""A queue of events ends for its reader, however it comes to its end."""

import asyncio
from collections.abc import Callable

import pytest

from xylite.errors import EngineError
from xylite.runtime.event_queue import TokenQueue
from xylite.runtime.request import TokenEvent
from xylite.runtime.turnstile import Turnstile


def event(*tokens: int, **fields) -> TokenEvent:
    return TokenEvent(index=0, tokens=tokens, **fields)


async def read(queue: TokenQueue) -> list[tuple[int, ...]]:
    async with asyncio.timeout(5):
        return [event.tokens async for event in queue]


async def test_it_ends_with_the_last_event_of_every_sequence() -> None:
    queue = TokenQueue(2)
    reader = asyncio.ensure_future(read(queue))
    for made in (event(1), event(2, finish_reason="stop"), event(3, finish_reason="stop")):
        queue.put(made)
        await asyncio.sleep(0)
    assert await reader == [(1,), (2,), (3,)]


async def test_an_error_comes_after_what_was_there_and_once() -> None:
    queue = TokenQueue(1)
    queue.put(event(1))
    queue.abandon(EngineError("broken"))
    assert (await anext(queue)).tokens == (1,)
    with pytest.raises(EngineError, match="broken"):
        await anext(queue)
    assert await read(queue) == []


@pytest.mark.parametrize("wake_by", [None, Turnstile(1).call])
async def test_closing_lets_a_waiting_reader_go(wake_by) -> None:
    queue = TokenQueue(1, wake_by)
    reader = asyncio.ensure_future(read(queue))
    await asyncio.sleep(0)
    queue.close()
    assert await reader == []


async def test_a_closed_queue_gives_what_it_holds_and_ends() -> None:
    queue = TokenQueue(3)
    queue.put(event(1))
    queue.close()
    queue.close()
    assert await read(queue) == [(1,)]
    assert await read(queue) == []


def watched(queue: TokenQueue) -> list[object]:
    """What a reader that is called takes, errors among it, and "end"."""
    seen: list[object] = []

    def ready() -> None:
        try:
            while taken := queue.take():
                seen.append([event.tokens for event in taken])
        except EngineError as e:
            seen.append(str(e))
        if queue.is_over:
            seen.append("end")

    queue.watch(ready)
    return seen


async def test_who_watches_is_called_for_all_that_comes_and_the_end() -> None:
    queue = TokenQueue(2)
    queue.put(event(1))
    queue.put(event(2))
    seen = watched(queue)
    assert seen == [[(1,), (2,)]]
    queue.put(event(3, finish_reason="stop"))
    queue.put(event(4, finish_reason="stop"))
    assert seen[1:] == [[(3,)], [(4,)], "end"]


async def test_who_watches_gets_an_error_after_what_was_there_and_once() -> None:
    queue = TokenQueue(1)
    queue.put(event(1))
    queue.abandon(EngineError("broken"))
    assert watched(queue) == [[(1,)], "broken", "end"]
    assert queue.take() == []
    queue = TokenQueue(1)
    seen = watched(queue)
    queue.abandon(EngineError("broken"))
    assert seen == ["broken", "end"]


async def test_who_watches_a_queue_that_is_closed_is_told_once() -> None:
    queue = TokenQueue(2)
    seen = watched(queue)
    queue.close()
    queue.close()
    assert seen == ["end"]
    assert watched(queue) == ["end"]


async def test_who_watches_is_called_in_its_turn_and_takes_all_that_has_come() -> None:
    gate = Turnstile(1)
    queues = [TokenQueue(1, gate.call) for _ in range(3)]
    readers = [watched(queue) for queue in queues]
    for queue in queues:
        queue.put(event(1))
        queue.put(event(2, finish_reason="stop"))
    assert readers[0] and not any(readers[1:])
    for _ in range(6):
        await asyncio.sleep(0)
    assert readers[1:] == [[[(1,), (2,)], "end"]] * 2


async def test_a_patient_reader_is_woken_by_last_events_only() -> None:
    wakes = 0

    def wake(ready: Callable[[], None]) -> None:
        nonlocal wakes
        wakes += 1
        ready()

    queue = TokenQueue(2, wake)
    queue.is_patient = True
    reader = asyncio.create_task(read(queue))
    await asyncio.sleep(0)
    for token in range(5):
        queue.put(event(token))
        await asyncio.sleep(0)
    assert wakes == 0
    queue.put(event(5, finish_reason="stop"))
    await asyncio.sleep(0)
    queue.put(event(6))
    queue.put(event(7, finish_reason="stop"))
    assert len(await reader) == 8
    assert wakes == 2


async def test_a_patient_reader_gets_an_error_at_once() -> None:
    queue = TokenQueue(1)
    queue.is_patient = True
    reader = asyncio.create_task(read(queue))
    await asyncio.sleep(0)
    queue.put(event(1))
    queue.abandon(EngineError("broken"))
    with pytest.raises(EngineError, match="broken"):
        await reader
