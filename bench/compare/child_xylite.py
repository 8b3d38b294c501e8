"""xylite in this process, without HTTP; text is made as it is for every user."""

import asyncio
import time
from typing import Any

from bench.compare import child
from xylite import EngineConfig, SamplingParams, TextEngine


class Xylite:
    """TextEngine with a loop of its own. Budget and queue hold a whole case, so that all its
    prompts run in the first iteration."""

    def __init__(self, start: child.Start):
        settings: dict[str, Any] = {"max_num_batched_tokens": 8192, "max_num_seqs": 64}
        if start.threads:
            settings["num_threads"] = start.threads
        settings |= {"model": start.model, "enable_prefix_caching": False} | start.settings
        self._loop = asyncio.new_event_loop()
        self._engine = TextEngine(EngineConfig(**settings))
        self._loop.run_until_complete(self._engine.__aenter__())
        self.vocab_size = self._engine.limits.vocab_size

    def close(self) -> None:
        self._loop.run_until_complete(self._engine.__aexit__())
        self._loop.close()

    def prefill(self, prompt: list[int]) -> float:
        start = time.perf_counter()
        first, _ = self._loop.run_until_complete(self._run([prompt], 1))
        return first - start

    def decode(self, prompts: child.Prompts, new: int) -> float:
        first, last = self._loop.run_until_complete(self._run(prompts, new))
        return len(prompts) * (new - 1) / (last - first)

    async def _run(self, prompts: child.Prompts, new: int) -> tuple[float, float]:
        """When the last sequence had its first token, and when it had all."""
        params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        streams = [await self._engine.submit(prompt, params) for prompt in prompts]

        async def read(stream: Any) -> tuple[float, float]:
            times: list[float] = []
            count = 0
            async for event in stream:
                if event.error is not None:
                    raise event.error
                times.append(time.perf_counter())
                count = event.num_output
            assert count == new, f"{count} tokens instead of {new}"
            return times[0], times[-1]

        ends = await asyncio.gather(*map(read, streams))
        return max(first for first, _ in ends), max(last for _, last in ends)


def load(start: child.Start) -> tuple[Xylite, dict[str, str]]:
    return Xylite(start), child.version("xylite", "torch")


if __name__ == "__main__":
    child.serve(load)
