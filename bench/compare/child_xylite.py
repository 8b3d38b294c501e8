"""xylite in this process, without HTTP; text is made as it is for every user."""

import asyncio
import time
from typing import Any

import uvloop

from bench.compare import child
from xylite import EngineConfig, SamplingParams, TextEngine


def load(start: child.Start) -> tuple[child.Model, dict[str, str]]:
    settings: dict[str, Any] = {"num_threads": start.threads} if start.threads else {}
    settings |= {"model": start.model, "enable_prefix_caching": False} | start.settings
    loop = uvloop.new_event_loop()  # as LLM does
    engine = TextEngine(EngineConfig(**settings))
    loop.run_until_complete(engine.__aenter__())

    async def run(prompts: child.Prompts, new: int) -> float:
        params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        begin = time.perf_counter()
        streams = [await engine.submit(prompt, params) for prompt in prompts]
        for stream in streams:
            stream.is_patient = True  # as LLM's, which gives whole answers

        async def read(stream: Any) -> None:
            count = 0
            async for event in stream:
                if event.error is not None:
                    raise event.error
                count = event.num_output
            assert count == new, f"{count} tokens instead of {new}"

        await asyncio.gather(*map(read, streams))
        return time.perf_counter() - begin

    def seconds(prompts: child.Prompts, new: int) -> float:
        return loop.run_until_complete(run(prompts, new))

    return child.Model(engine.limits.vocab_size, seconds), child.version("xylite", "torch")


if __name__ == "__main__":
    child.serve(load)
