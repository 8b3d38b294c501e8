"""What client libraries leave open."""

import gc

import openai


async def close_openai_clients() -> None:
    """Close the connections of OpenAI's clients that a library keeps for later calls, or dropped.

    To be awaited in the event loop that they were made in. Otherwise they are closed when they
    are collected as garbage, in the loop of whatever test runs then, which fails it.
    """
    for kept in gc.get_objects():
        if issubclass(type(kept), openai.AsyncOpenAI) and not kept.is_closed():
            await kept.close()
        elif issubclass(type(kept), openai.DefaultAsyncHttpxClient) and not kept.is_closed:
            await kept.aclose()
