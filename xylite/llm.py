"""LLM: a model for scripts, with blocking calls."""

import asyncio
import numbers
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from xylite.config import EngineConfig
from xylite.errors import Closed, EngineError, Overloaded, RequestError, check_list
from xylite.runtime.request import FinishReason, SamplingParams, check_params
from xylite.text_engine import Pending, TextEngine, TextEvent, TextLogprob, TextStream

FULL_S: Final = 0.002  # until a prompt is offered again to an engine that is full


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


class _Room:
    """Places in the engine, for callers that wait for one; first come, first served."""

    def __init__(self, size: int):
        self._size = self._free = size
        self._door = asyncio.Lock()
        self._left = asyncio.Event()

    @asynccontextmanager
    async def taken(self, num: int) -> AsyncGenerator[None]:
        """Hold `num` places, or all if there are fewer."""
        num = min(num, self._size)
        async with self._door:
            while self._free < num:
                self._left.clear()
                await self._left.wait()
            self._free -= num
        try:
            yield
        finally:
            self._free += num
            self._left.set()


class LLM:
    """A model for scripts: blocking calls, many prompts at once.

        llm = LLM("path/to/model")
        for answer in llm.generate(["1, 2, 3,", "Once upon a time"], SamplingParams(max_tokens=8)):
            print(answer[0].text)

    Several threads may call it at the same time: who finds the engine full waits.

    model   as EngineConfig.model; further settings of EngineConfig by name
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **settings: Any):
        if model is not None:
            settings["model"] = model
        self._engine = TextEngine(EngineConfig(**settings))
        self._loop = _new_loop()
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
        config = self._engine.config
        self._room = _Room(config.max_num_seqs + (config.max_num_queued_reqs or 0))

    def _run(self, work: Any) -> Any:
        if not self._finalizer.alive:
            work.close()
            raise Closed("this model was closed")
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

        RequestError if an argument is wrong, by its name and place; the others are stopped then.
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
        async def one(i: int, prompt: str | Sequence[int]) -> list[Completion]:
            try:
                return await self._complete(prompt, params)
            except RequestError as e:
                if e.param == "prompt" and len(prompts) > 1:
                    e.param = f"prompts[{i}]"
                    e.message = f"{e.param}: {e.message}"
                    e.args = (e.message,)
                raise

        tasks = [asyncio.ensure_future(one(i, prompt)) for i, prompt in enumerate(prompts)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _complete(
        self, prompt: str | Sequence[int], params: SamplingParams
    ) -> list[Completion]:
        async with self._room.taken(params.n):
            stream = await self._submit(prompt, params)
            stream.is_patient = True
            answers: dict[int, Pending] = {}
            try:
                async for event in stream:
                    if event.error is not None:
                        raise event.error
                    if event.index in answers:
                        answers[event.index].add(event)
                    else:
                        answers[event.index] = Pending(event)
            finally:
                await stream.aclose()
        prompt_ids = stream.prompt_token_ids
        return [_completion(answers[i].merged(), prompt_ids) for i in range(params.n)]

    async def _submit(self, prompt: str | Sequence[int], params: SamplingParams) -> TextStream:
        """Queue a prompt that has its places."""
        while True:
            try:
                return await self._engine.submit(prompt, params)
            except Overloaded as e:
                if e.code != "queue_full":
                    raise
                # Sequences that have ended count until the iteration they were in is over.
                await asyncio.sleep(FULL_S)

    def close(self) -> None:
        """Free the model. Also done when the `with` block ends, when nobody holds this object any
        more, and when the interpreter exits."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


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


def _completion(whole: TextEvent, prompt: tuple[int, ...]) -> Completion:
    if whole.finish_reason is None:
        raise EngineError("a sequence ended without saying why")
    return Completion(
        text=whole.text,
        token_ids=whole.token_ids,
        finish_reason=whole.finish_reason,
        stop_reason=whole.stop_reason,
        logprobs=whole.logprobs,
        prompt_token_ids=prompt,
        num_cached=whole.num_cached,
    )
