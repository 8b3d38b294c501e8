"""LLM: a model for scripts, with blocking calls."""

import asyncio
import numbers
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xylite.config import EngineConfig
from xylite.errors import EngineError
from xylite.runtime.request import FinishReason, SamplingParams, check_list, check_params
from xylite.text_engine import TextEngine, TextEvent, TextLogprob


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished sequence of `LLM.generate`.

    num_cached  prompt tokens whose KV was reused
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[TextLogprob, ...] | None
    prompt_token_ids: tuple[int, ...]
    num_cached: int


class LLM:
    """A model for scripts: blocking calls, many prompts at once.

        llm = LLM("path/to/model")
        for answer in llm.generate(["1, 2, 3,", "Once upon a time"], SamplingParams(max_tokens=8)):
            print(answer[0].text)

    model   as EngineConfig.model; further settings of EngineConfig by name
    """

    def __init__(self, model: str | None = None, **settings: Any):
        if model is not None:
            settings["model"] = model
        self._engine = TextEngine(EngineConfig(**settings))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="xylite-llm", daemon=True
        )
        self._thread.start()
        self._finalizer = weakref.finalize(self, _end, self._engine, self._loop, self._thread)
        try:
            self._run(self._engine.__aenter__())
        except BaseException:
            self._finalizer()
            raise

    def _run(self, work: Any) -> Any:
        if not self._finalizer.alive:
            work.close()
            raise EngineError("this model was closed", code="closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C stops the work, too
            raise

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        params: SamplingParams | None = None,
    ) -> list[list[Completion]]:
        """The answers to each prompt, params.n of them. Prompts are texts or token ids.

        RequestError if an argument is wrong, by its name; no prompt is begun then.
        """
        params = SamplingParams() if params is None else params
        check_params(params, self._engine.limits)
        return self._run(self._generate_all(_as_prompts(prompts), params))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        **template_kwargs: Any,
    ) -> list[Completion]:
        """The model's next turn in a conversation, params.n times."""
        params = SamplingParams() if params is None else params
        check_params(params, self._engine.limits)

        async def answer() -> list[Completion]:
            ids = await self._engine.render(messages, template_kwargs=template_kwargs)
            return await self._complete(ids, params)

        return self._run(answer())

    async def _generate_all(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams
    ) -> list[list[Completion]]:
        limits = self._engine.config
        room = asyncio.Semaphore(
            max(1, (limits.max_num_seqs + (limits.max_num_queued_reqs or 0)) // params.n)
        )

        async def one(prompt: str | Sequence[int]) -> list[Completion]:
            async with room:
                return await self._complete(prompt, params)

        tasks = [asyncio.ensure_future(one(prompt)) for prompt in prompts]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _complete(
        self, prompt: str | Sequence[int], params: SamplingParams
    ) -> list[Completion]:
        stream = await self._engine.submit(prompt, params)
        events: list[list[TextEvent]] = [[] for _ in range(params.n)]
        try:
            async for event in stream:
                if event.error is not None:
                    raise event.error
                events[event.index].append(event)
        finally:
            await stream.aclose()
        return [_completion(e, stream.prompt_token_ids) for e in events]

    def close(self) -> None:
        """Free the model. Also done when the `with` block ends, when nobody holds this object any
        more, and when the interpreter exits."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _end(engine: TextEngine, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Stop the engine, and the loop and thread it runs in."""
    work = _stopped(engine)
    if thread is threading.current_thread():  # collected in the very loop that is to end
        loop.create_task(work).add_done_callback(lambda _: loop.stop())
        return
    try:
        asyncio.run_coroutine_threadsafe(work, loop).result()
    except RuntimeError:
        # The interpreter exits: its thread pools have ended already, and take no more work.
        if engine.state != "closed":
            raise
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _stopped(engine: TextEngine) -> None:
    await engine.__aexit__()
    await asyncio.get_running_loop().shutdown_default_executor()


def _as_prompts(prompts: Any) -> Sequence[str | Sequence[int]]:
    """One prompt or many as many; RequestError for what can be neither text nor token ids."""
    if isinstance(prompts, str):
        return [prompts]
    check_list("prompts", prompts, "texts or token ids, or a text")
    if prompts and isinstance(prompts[0], numbers.Integral):
        return [prompts]
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            check_list(f"prompts[{i}]", prompt, "token ids, or a text")
    return prompts


def _completion(events: Sequence[TextEvent], prompt: tuple[int, ...]) -> Completion:
    last = events[-1]
    if last.finish_reason is None:
        raise EngineError("a sequence ended without saying why")
    scored = [e.logprobs for e in events if e.logprobs is not None]
    return Completion(
        text="".join(e.text for e in events),
        token_ids=tuple(t for e in events for t in e.token_ids),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=tuple(x for entries in scored for x in entries) if scored else None,
        prompt_token_ids=prompt,
        num_cached=last.num_cached,
    )
