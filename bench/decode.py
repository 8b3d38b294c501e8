"""Prefill and decode through the engine on random weights, with recorded graphs and without."""

import asyncio
import dataclasses
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch

from bench.ops.shapes import Shape
from bench.ops.timing import num_bytes_of
from xylite import models, ops, tree
from xylite.checkpoint import open_checkpoint
from xylite.config import EngineConfig
from xylite.models import weights
from xylite.ops import Ops
from xylite.runtime import build
from xylite.runtime.engine import Engine
from xylite.runtime.event_queue import TokenQueue
from xylite.runtime.request import SamplingParams, make_request

# Of the free memory, what weights may take before layers are left out.
WEIGHT_SHARE: Final = 0.6


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run.

    prompts   lengths of prompts that are prefilled alone
    batches   sequences that decode at once, each after `context` tokens, `new` tokens each. With
              sizes that graphs are recorded for, both ways run the same kernels
    """

    prompts: Sequence[int]
    batches: Sequence[int]
    context: int
    new: int
    budget: int


FULL: Final = Plan((512, 2048, 4096), (1, 8, 32, 128), 128, 65, 8192)
TINY: Final = Plan((20,), (1, 4), 5, 4, 24)


def measure(table: Ops, shape: Shape, plan: Plan, dtype: str) -> dict[str, Any]:
    """tok/s of each prefill and decode, by "graphs" and "launches"; whether all ids are the same.

    Layers are left out if the weights would not fit; "layers" says how many there are.
    """
    shape = fitting(table, shape, getattr(torch, dtype))
    family, spec = models.describe(shape.llama_config())
    params = make_params(family, spec, table, getattr(torch, dtype))
    ways = {"launches": dataclasses.replace(table, replayed=None, warm_up=())}
    if table.replayed is not None:
        ways = {"graphs": table, **ways}
    result: dict[str, Any] = {"model": shape.name, "layers": shape.layers, "dtype": dtype}
    result["weight_gib"] = round(num_bytes_of(params) / 2**30, 2)
    ids: list[Any] = []
    for name, way in ways.items():
        with replaced(way, params):
            result[name], found = asyncio.run(_run(shape, plan, dtype, way.device.block_size))
        ids.append(found)
    result["same_ids"] = all(found == ids[0] for found in ids)
    return result


def fitting(table: Ops, shape: Shape, dtype: torch.dtype) -> Shape:
    """The shape with as many layers as the device has room for."""
    layer = sum(n * k for n, k, _ in shape.weights.values()) * dtype.itemsize
    ends = 2 * shape.vocab * shape.width * dtype.itemsize
    room = int(WEIGHT_SHARE * table.device.memory()[0]) - ends
    return dataclasses.replace(shape, layers=max(1, min(shape.layers, room // layer)))


def make_params(family: Any, spec: Any, table: Ops, dtype: torch.dtype) -> Any:
    """Random parameters, drawn on the device: on the host, 8e9 of them would take a minute."""
    place = table.device.torch_device
    generator = torch.Generator(device=place).manual_seed(0)

    def make(leaf: Any) -> Any:
        if leaf.role == "norm":
            return torch.ones(leaf.shape, device=place)
        made = torch.randn(leaf.shape, generator=generator, device=place, dtype=dtype)
        made *= leaf.shape[-1] ** -0.5
        if leaf.role == "bias":
            return made
        return table.pack_linear(made, gated=leaf.role == "gated")

    made = family.with_tables(tree.map(make, family.abstract(spec)), spec, spec.max_position)
    return dataclasses.replace(made, rope=made.rope.to(place))


@contextmanager
def replaced(table: Ops, params: Any) -> Iterator[None]:
    """Engines are built with this table and these parameters."""
    with (
        mock.patch.object(ops, "load", lambda device: table),
        mock.patch.object(weights, "random_params", lambda *args, **kwargs: params),
    ):
        yield


async def _run(
    shape: Shape, plan: Plan, dtype: str, block_size: int
) -> tuple[dict[str, Any], list[Any]]:
    """Figures and ids of one engine."""
    longest = max(*plan.prompts, plan.context + plan.new) + block_size
    per_sequence = -(-(plan.context + plan.new) // block_size)
    num_blocks = max(max(plan.batches) * per_sequence, -(-longest // block_size)) + 1
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape.llama_config()))
        config = EngineConfig(
            model=folder,
            load_format="dummy",
            dtype=dtype,  # pyright: ignore[reportArgumentType] (checked when it is made)
            max_model_len=longest,
            max_num_seqs=max(plan.batches),
            max_num_batched_tokens=plan.budget,
            num_blocks=num_blocks,
            enable_prefix_caching=False,
        )
        began = time.perf_counter()
        parts = build.build(config, open_checkpoint(folder, with_weights=False), shape.vocab)
        started = time.perf_counter() - began
    figures: dict[str, Any] = {"start_s": round(started, 2), "prefill": {}, "decode": {}}
    ids: list[Any] = []
    with ThreadPoolExecutor(1) as device:
        engine = Engine(
            parts.scheduler, parts.tabulator, parts.executor, device, num_words=parts.num_words
        )
        try:
            for tokens in plan.prompts:
                await _answer(engine, parts.limits, 1, tokens, 1)  # compiles what is of this size
                answer = await _answer(engine, parts.limits, 1, tokens, 1)
                ids.append(answer.ids)
                figures["prefill"][str(tokens)] = tokens / (answer.first - answer.begin)
            for size in plan.batches:
                await _answer(engine, parts.limits, size, plan.context, 3)
                answer = await _answer(engine, parts.limits, size, plan.context, plan.new)
                ids.append(answer.ids)
                figures["decode"][str(size)] = answer.decoded / (answer.last - answer.first)
        finally:
            await engine.close()
    return figures, ids


@dataclass(frozen=True, slots=True)
class Answer:
    """When requests were sent, when each of them had a token, when all had all; how many tokens
    came between the last two; and what was said."""

    begin: float
    first: float
    last: float
    decoded: int
    ids: list[list[int]]


async def _answer(engine: Engine, limits: Any, size: int, tokens: int, new: int) -> Answer:
    """`size` sequences of `tokens` tokens and `new` more."""
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    begin = time.perf_counter()
    queues: list[TokenQueue] = []
    for i in range(size):
        prompt = [(31 * i + 7 * j + j * j) % limits.vocab_size for j in range(tokens)]
        request = make_request(
            f"{i}", prompt, params, limits=limits, end_tokens=frozenset(), default_seed=0
        )
        queues.append(TokenQueue(1))
        engine.submit(request, queues[-1])

    async def read(queue: TokenQueue) -> tuple[list[float], list[int]]:
        times: list[float] = []
        ids: list[int] = []
        async for event in queue:
            if event.error is not None:
                raise event.error
            times += [time.perf_counter()] * len(event.tokens)
            ids += event.tokens
        return times, ids

    read_all = await asyncio.gather(*map(read, queues))
    assert all(len(ids) == new for _, ids in read_all), [len(ids) for _, ids in read_all]
    first = max(times[0] for times, _ in read_all)
    decoded = sum(t > first for times, _ in read_all for t in times)
    last = max(times[-1] for times, _ in read_all)
    return Answer(begin, first, last, decoded, [ids for _, ids in read_all])
