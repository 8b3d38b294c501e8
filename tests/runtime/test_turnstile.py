"""No turn of the event loop holds more than its share."""

import asyncio

from xylite.runtime.event_queue import TokenQueue
from xylite.runtime.request import TokenEvent
from xylite.runtime.turnstile import Turnstile


async def test_callbacks_of_one_turn_are_spread_over_turns_in_order() -> None:
    gate, seen = Turnstile(3), list[int]()
    for i in range(10):
        gate.call(lambda i=i: seen.append(i))
    assert seen == [0, 1, 2]
    order, counts = seen, list[int]()
    for _ in range(5):
        await asyncio.sleep(0)
        counts.append(len(order))
    assert counts == [6, 9, 10, 10, 10]
    assert order == list(range(10))


async def test_waiters_and_callbacks_share_the_room_and_keep_their_order() -> None:
    gate, seen = Turnstile(2), list[str]()

    async def waiter(name: str) -> None:
        await gate.wait()
        seen.append(name)

    tasks = [asyncio.ensure_future(waiter(name)) for name in "abc"]
    await asyncio.sleep(0)
    assert seen == ["a", "b"]
    gate.call(lambda: seen.append("d"))
    assert seen == ["a", "b"]
    await asyncio.gather(*tasks)
    await asyncio.sleep(0)
    assert sorted(seen[2:]) == ["c", "d"]


async def test_who_gives_up_waiting_holds_nobody_up() -> None:
    gate, seen = Turnstile(1), list[int]()
    for i in range(3):
        gate.call(lambda i=i: seen.append(i))
    gone = asyncio.ensure_future(gate.wait())
    await asyncio.sleep(0)
    gone.cancel()
    gate.call(lambda: seen.append(3))
    for _ in range(6):
        await asyncio.sleep(0)
    assert seen == [0, 1, 2, 3]
    assert gone.cancelled()


async def test_readers_of_one_iteration_wake_a_few_at_a_time() -> None:
    gate = Turnstile(4)
    queues = [TokenQueue(1, gate.call) for _ in range(10)]
    seen: list[int] = []

    async def read(i: int) -> None:
        async for event in queues[i]:
            assert event.tokens == (i,)
            seen.append(i)

    readers = [asyncio.ensure_future(read(i)) for i in range(10)]
    await asyncio.sleep(0)
    for i, queue in enumerate(queues):
        queue.put(TokenEvent(index=0, tokens=(i,), finish_reason="stop"))
    woken: list[int] = []
    while len(seen) < 10:
        await asyncio.sleep(0)
        woken.append(len(seen))
    assert seen == list(range(10))
    steps = [b - a for a, b in zip([0, *woken], woken, strict=False)]
    assert max(steps) <= 4, "more readers ran in one turn than the turnstile lets through"
    await asyncio.gather(*readers)
