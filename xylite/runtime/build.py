"""From settings to an engine's parts: device, weights, KV memory, token budget.

Every "auto" of EngineConfig is filled here, once, and said in the log.
"""

import dataclasses
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch

from xylite import host_memory, models, ops, tree
from xylite.checkpoint import Checkpoint
from xylite.config import EngineConfig, speculative
from xylite.errors import ConfigError
from xylite.models import layers, served, weights
from xylite.models.spec import ModelSpec
from xylite.ops import KVCache, Ops
from xylite.runtime import speculation
from xylite.runtime.blocks import KVBlocks
from xylite.runtime.budgets import Budgets
from xylite.runtime.decomposition import Decomposition
from xylite.runtime.drafters.draft_model import DraftParts
from xylite.runtime.executor import Executor, Model
from xylite.runtime.queues import Queues
from xylite.runtime.request import Limits
from xylite.runtime.scheduler import Scheduler
from xylite.runtime.token_table import Tabulator, TaskBuilder
from xylite.runtime.trial_runs import TrialRuns

MAX_CPU_KV_BYTES = 4 * 2**30
READY_KV_BYTES = 256 * 2**20  # a few long prompts' worth; an idle server should stay small
MIN_QUEUE = 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What an engine is made of, ready to run.

    config   every "auto" filled in
    drafter  if speculative_config names one
    budgets  which the scheduler has, and which may change with what iterations take
    chores   what the device thread may do while there is nothing to run
    """

    config: EngineConfig
    executor: Executor
    scheduler: Scheduler
    tabulator: Tabulator
    limits: Limits
    num_words: int
    drafter: speculation.Speculation | None
    budgets: Budgets
    chores: Iterator[None]


def build(
    config: EngineConfig,
    checkpoint: Checkpoint,
    vocab_size: int,
    draft_checkpoint: Checkpoint | None = None,
) -> Parts:
    """Load the model and size everything for it. Takes seconds: call it in the device thread.

    vocab_size        ids that the tokenizer knows
    draft_checkpoint  the model that drafts, of the same vocabulary
    raises            ConfigError: a setting or a checkpoint does not work out
    """
    drafting = None if config.speculative_config is None else speculative(config.speculative_config)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    table = served.quantising(ops.load(config.device), config.quantization)
    if config.batch_invariant and table.invariant is not None:
        table = table.invariant()
    family, spec = models.describe(checkpoint.config, _place(checkpoint))
    if vocab_size > spec.vocab_size:
        raise ConfigError(
            f"the tokenizer has {vocab_size} tokens but the model's embedding only "
            f"{spec.vocab_size} rows: they do not belong together",
            param="tokenizer",
        )
    dtype = weights.resolve_dtype(checkpoint, config.dtype)
    kv_dtype = _kv_dtype(config, table, dtype)
    block_size = _block_size(config, table)
    tasks = _task_builder(table, spec, block_size, kv_dtype, config.batch_invariant)
    max_len = _max_model_len(config, spec)
    params = served.load(config, checkpoint, (family, spec), table, dtype)
    draft = None
    block_bytes = layers.kv_block_bytes(spec, block_size, kv_dtype)
    if draft_checkpoint is not None:
        draft = _draft_model(config, draft_checkpoint, table, dtype, vocab_size)
        block_bytes += layers.kv_block_bytes(draft.spec, block_size, kv_dtype)
    num_blocks = _num_blocks(config, table, block_size, max_len, block_bytes)
    max_len = _fit_to_blocks(config, max_len, num_blocks * block_size)
    # Not before: the table of a million positions takes as much memory as a small model.
    params = weights.with_tables(params, spec, family, table, max_len)
    kv = layers.make_kv(
        spec, num_blocks, block_size, dtype=kv_dtype, device=table.device.torch_device
    )
    model = Model(family, spec, params, vocab_size)
    executor = Executor(model, table, kv, config.max_num_seqs)
    tabulator = Tabulator(
        config.max_num_seqs,
        min(num_blocks, -(-max_len // block_size)),
        block_size,
        tasks,
    )
    limits = Limits(
        vocab_size=vocab_size,
        max_model_len=max_len,
        max_kv_tokens=num_blocks * block_size,
        max_n=config.max_n,
        max_logprobs=config.max_logprobs,
    )
    trial = TrialRuns(executor, tabulator, limits, block_size)
    trial.warm_up()
    budgets, target_itl_ms = trial.budgets(config)
    queued = config.max_num_queued_reqs
    resolved = msgspec.structs.replace(
        config,
        device=str(table.name),
        dtype=str(dtype).removeprefix("torch."),
        block_size=block_size,
        num_blocks=num_blocks,
        kv_cache_memory_bytes=num_blocks * layers.kv_block_bytes(spec, block_size, kv_dtype),
        max_model_len=max_len,
        max_num_batched_tokens=budgets.full,
        target_itl_ms=target_itl_ms,
        max_num_queued_reqs=max(4 * config.max_num_seqs, MIN_QUEUE) if queued is None else queued,
        num_threads=config.num_threads or torch.get_num_threads(),
    )
    _say_what_was_chosen(config, resolved)
    queues = Queues(
        KVBlocks(num_blocks, block_size, reuse=config.enable_prefix_caching),
        max_num_seqs=config.max_num_seqs,
        max_queued=resolved.max_num_queued_reqs or 0,
    )
    scheduler = Scheduler(
        queues,
        budget=budgets.full,
        max_draft=(drafting.num_speculative_tokens or 0) if drafting else 0,
        mixed_budget=budgets.mixed,
    )
    drafter = parts = None
    if drafting is not None:
        if draft is not None:
            parts = _draft_parts(resolved, draft, table, num_blocks, max_len)
        drafter = speculation.make(drafting, time.monotonic, parts)
    caches = [executor.kv] if parts is None else [executor.kv, parts.executor.kv]
    return Parts(
        resolved,
        executor,
        scheduler,
        tabulator,
        limits,
        -(-vocab_size // 32),
        drafter,
        budgets,
        itertools.chain(_kv_taken(config, caches), trial.rehearsals(), host_memory.given_back()),
    )


def _kv_taken(config: EngineConfig, caches: Sequence[KVCache]) -> Iterator[None]:
    """Have the system give the KV's memory, which the CPU's system does lazily: all that was asked
    for by a number, else enough for a start."""
    asked = config.kv_cache_memory_bytes is not None or config.num_blocks is not None
    leaves = [leaf for kv in caches for leaf in tree.leaves(kv) if leaf.device.type == "cpu"]
    num_bytes = sum(leaf.nbytes for leaf in leaves)
    pieces = [(leaf.data_ptr(), leaf.nbytes) for leaf in leaves]
    # From here, so that the leaves stay as long as this goes on.
    yield from host_memory.taken(pieces, num_bytes if asked else min(num_bytes, READY_KV_BYTES))


def _draft_model(
    config: EngineConfig,
    checkpoint: Checkpoint,
    table: Ops,
    dtype: torch.dtype,
    vocab_size: int,
) -> Model:
    """The model that drafts, in the dtype of the one it drafts for; its tables come later."""
    family, spec = models.describe(checkpoint.config, _place(checkpoint))
    if vocab_size > spec.vocab_size:
        raise ConfigError(
            f"speculative_config: the vocabulary has {vocab_size} tokens but the draft model "
            f"{checkpoint.path} has only {spec.vocab_size}",
            param="speculative_config",
        )
    params = served.load(config, checkpoint, (family, spec), table, dtype)
    return Model(family, spec, params, vocab_size)


def _draft_parts(
    config: EngineConfig, model: Model, table: Ops, num_blocks: int, max_len: int
) -> DraftParts:
    """What the draft model runs on: a cache of as many blocks as the model's own."""
    assert config.block_size is not None and config.max_num_batched_tokens is not None
    block_size = config.block_size
    dtype = _kv_dtype(config, table, getattr(torch, config.dtype))
    kv = layers.make_kv(
        model.spec, num_blocks, block_size, dtype=dtype, device=table.device.torch_device
    )
    max_len = min(max_len, model.spec.max_position)
    params = weights.with_tables(model.params, model.spec, model.family, table, max_len)
    model = dataclasses.replace(model, params=params)
    tabulator = Tabulator(
        config.max_num_seqs,
        min(num_blocks, -(-max_len // block_size)),
        block_size,
        _task_builder(table, model.spec, block_size, dtype, config.batch_invariant),
    )
    return DraftParts(
        executor=Executor(model, table, kv, config.max_num_seqs),
        tabulator=tabulator,
        blocks=KVBlocks(num_blocks, block_size, reuse=config.enable_prefix_caching),
        budget=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_len=max_len,
        num_words=-(-model.vocab_size // 32),
    )


def _say_what_was_chosen(given: EngineConfig, resolved: EngineConfig) -> None:
    for name in EngineConfig.__struct_fields__:
        before, after = getattr(given, name), getattr(resolved, name)
        if before != after:
            _log.info("%s: %s (was %s)", name, after, "auto" if before is None else before)


def _place(checkpoint: Checkpoint) -> str:
    """Where the model's configuration was, for errors."""
    return checkpoint.path if checkpoint.format == "gguf" else f"{checkpoint.path}/config.json"


def _kv_dtype(config: EngineConfig, table: Ops, dtype: torch.dtype) -> torch.dtype:
    """What KV is kept in, for weights of `dtype`; ConfigError if the table cannot read it."""
    if config.kv_cache_dtype == "auto":
        return dtype
    if config.kv_cache_dtype not in table.kv_formats:
        known = ", ".join(("auto", *table.kv_formats))
        raise ConfigError(
            f"kv_cache_dtype {config.kv_cache_dtype!r} is not there on {table.name} (there is: "
            f"{known})",
            param="kv_cache_dtype",
        )
    return getattr(torch, config.kv_cache_dtype)


def _block_size(config: EngineConfig, table: Ops) -> int:
    size = config.block_size or table.device.block_size
    multiple, sizes = table.device.block_multiple, table.device.block_sizes
    if size % multiple or (sizes and size not in sizes):
        fitting = " or ".join(map(str, sizes)) if sizes else f"a multiple of {multiple}"
        raise ConfigError(
            f"block_size must be {fitting} on {table.name}, got {size}",
            param="block_size",
        )
    return size


def _max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    if config.max_model_len is None:
        return spec.max_position
    if config.max_model_len > spec.max_position:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the model was made for sequences of at "
            f"most {spec.max_position} tokens",
            param="max_model_len",
        )
    return config.max_model_len


def _num_blocks(
    config: EngineConfig,
    table: Ops,
    block_size: int,
    max_len: int,
    block_bytes: int,
) -> int:
    """KV blocks that the settings ask for, or that fit into the device's memory.

    block_bytes  of one block, in the model's cache and the draft model's
    """
    if config.num_blocks is not None:
        _check_there_is_memory(table, "num_blocks", config.num_blocks, block_bytes)
        return config.num_blocks
    if config.kv_cache_memory_bytes is not None:
        num = config.kv_cache_memory_bytes // block_bytes
        if num < 1:
            raise ConfigError(
                f"kv_cache_memory_bytes is {config.kv_cache_memory_bytes}, but one block of "
                f"{block_size} tokens takes {block_bytes} bytes",
                param="kv_cache_memory_bytes",
            )
        _check_there_is_memory(table, "kv_cache_memory_bytes", num, block_bytes)
        return num
    free, total = table.device.memory()
    usable = int(free * config.device_memory_utilization)
    if table.device.kind == "cpu":
        usable = min(usable, MAX_CPU_KV_BYTES)
    most = config.max_num_seqs * -(-max_len // block_size)  # more can never be used
    num = min(usable // block_bytes, most)
    if num < 1:
        raise ConfigError(
            f"no memory is left for KV: {free / 2**30:.2f} GiB of {total / 2**30:.2f} GiB are free "
            f"after loading the weights; use a smaller model or raise device_memory_utilization",
            param="device_memory_utilization",
        )
    return num


def _check_there_is_memory(table: Ops, name: str, num_blocks: int, block_bytes: int) -> None:
    """ConfigError if a setting asks for more KV blocks than the device can ever hold."""
    free, total = table.device.memory()
    # The system gives pages as they are used, and may free others until then.
    most = total if table.device.kind == "cpu" else free
    if num_blocks * block_bytes > most:
        raise ConfigError(
            f"{name} asks for {num_blocks} KV blocks of {block_bytes} bytes, together "
            f"{num_blocks * block_bytes / 2**30:.2f} GiB, but {table.name} has {most / 2**30:.2f} "
            f"GiB: {most // block_bytes} blocks fit at most",
            param=name,
        )


def _fit_to_blocks(config: EngineConfig, max_len: int, num_tokens: int) -> int:
    """The context length that the KV pool can hold; ConfigError if a longer one was asked for."""
    if max_len <= num_tokens:
        return max_len
    if config.max_model_len is not None:
        raise ConfigError(
            f"max_model_len is {max_len}, but the KV cache holds only {num_tokens} tokens: give it "
            f"more memory, or set max_model_len to at most {num_tokens}",
            param="max_model_len",
        )
    _log.warning(
        "the KV cache holds %d tokens, so sequences are limited to that (the model could take %d)",
        num_tokens,
        max_len,
    )
    return num_tokens


def _task_builder(
    table: Ops, spec: ModelSpec, block_size: int, kv_dtype: torch.dtype, batch_invariant: bool
) -> TaskBuilder:
    """Makes the task tables of a token table: one per kind of attention, for this device."""
    device = table.device
    classes = [
        device.classes_of(spec.head_dim, kind, kv_dtype)
        if device.classes_of and device.tile_classes
        else device.tile_classes
        for kind in spec.attention
    ]
    if not all(classes):
        for_what = f" for heads of {spec.head_dim} elements" if device.tile_classes else ""
        if batch_invariant:
            raise ConfigError(
                f"batch_invariant is not there on {table.name} without kernels{for_what}",
                param="batch_invariant",
            )
        if for_what:
            _log.warning(
                "%s has no attention kernel%s: torch is used instead (slower)", table.name, for_what
            )
        return lambda tokens: ()
    if batch_invariant:
        classes = [c[-1:] for c in classes]

    kinds = [
        Decomposition(
            num_kv_heads=spec.num_kv_heads,
            group=spec.group,
            window=kind.window,
            tile_classes=tile_classes,
            kv_tile=block_size,
            num_cores=device.num_cores,
            batch_invariant=batch_invariant,
        )
        for kind, tile_classes in zip(spec.attention, classes, strict=True)
    ]
    return lambda tokens: tuple(kind(tokens) for kind in kinds)
