"""What a model may call: one record of functions, filled by one table per device.

Letters in shapes: T tokens of the iteration, S chunks in it, H query heads, G KV heads,
group = H / G, D head size, C width, F feed-forward width, V vocabulary, L layers, E experts,
N blocks, P tokens per block, B width of the block table, W tasks, R logit rows.
`kv_len` counts every key a chunk may see, its own tokens included.

`reference.py` composes every function from plain torch and is the meaning of each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from xylite import plugins, tree
from xylite.errors import ConfigError

Activation = Literal["silu", "gelu_tanh"]


@tree.node
class DenseKV:
    """KV of one layer, [N, G, P, D] each: one KV head of one block is one contiguous tile.

    int8 values have float32 scales [N, G, P], one per token and KV head: x = k * k_scale.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


KVCache = tuple[DenseKV, ...]


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """What distinguishes one layer's attention from another's.

    index    which of the model's kinds this is: its task table is Batch.tasks[index]
    scale    factor of the scores, 1 / sqrt(D) unless the model says otherwise
    window   keys a query sees, its own included; 0 = all
    cap      scores s become cap * tanh(s / cap); 0 = off
    """

    index: int
    scale: float
    window: int = 0
    cap: float = 0.0


@tree.node
class TaskLists:
    """A TaskTable on the device: per tile class, tasks [W, fields] and core_start [cores + 1]."""

    tasks: tuple[Tensor, ...]
    core_start: tuple[Tensor, ...]
    merges: Tensor
    parts: Tensor
    tile_q: tuple[int, ...] = tree.static()


@tree.node
class Batch:
    """One iteration's token table on the device; meanings as in runtime/step.py.

    Integers are int32; tree_mask is bool. `tokens` has its carried ids filled in.

    num_last  number of chunks, if only the hidden states of their last tokens are asked for, one of
              each; 0 = those of all tokens
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    seq_of: Tensor
    q_start: Tensor
    kv_len: Tensor
    num_draft: Tensor
    bias_start: Tensor
    block_table: Tensor
    tree_mask: Tensor
    tasks: tuple[TaskLists, ...] = ()
    num_last: int = tree.static(default=0)


@tree.node
class SamplerState:
    """Token counts by sequence row, for penalties. Rows come and go with sequences.

    in_prompt  [rows, V] bool
    count      [rows, V] int32, tokens generated so far
    """

    in_prompt: Tensor
    count: Tensor


@tree.node
class SampleBatch:
    """A SampleTable on the device; meanings as in runtime/step.py.

    uniform      [R] float32 in [0, 1), drawn from (seed, token index)
    penalised    some row has a penalty
    filtered     some row uses top_k, top_p or min_p
    greedy       every row has temperature 0
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    repetition_penalty: Tensor
    uniform: Tensor
    state_row: Tensor
    mask_row: Tensor
    bias_row: Tensor
    bias_token: Tensor
    bias_value: Tensor
    seen_row: Tensor
    seen_token: Tensor
    penalised: bool = tree.static()
    filtered: bool = tree.static()
    greedy: bool = tree.static()


class Linear(Protocol):
    def __call__(
        self,
        x: Tensor,
        w: Any,
        bias: Tensor | None = None,
        *,
        residual: Tensor | None = None,
        act: Activation | None = None,
        cap: float = 0.0,
    ) -> Tensor:
        """x @ w.T + bias, then act, cap and residual, in this order.

        x         [T, K]
        w         weight leaf of [N, K] as `pack_linear` made it
        residual  of the result's shape, added to it
        act       w holds gate rows then up rows: the result is act(gate) * up, [T, N / 2]
        cap       c * tanh(y / c); 0 = off
        """
        ...


class QkNormRopeAppend(Protocol):
    def __call__(
        self,
        qkv: Tensor,
        positions: Tensor,
        rope: Tensor,
        kv: DenseKV,
        slots: Tensor,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> tuple[Tensor, DenseKV]:
        """Norm of q and k heads (if given), rotary positions, and k, v into their slots.

        qkv      [T, (H + 2 G) * D]: all q heads, all k heads, all v heads
        rope     [positions, 2, rot / 2] float32, cos and sin; rot <= D leading elements of a head
                 turn, halves paired (x[i], x[i + rot/2])
        kv       consumed; the returned leaf is the one to use next
        slots    [T] rows of the pool, block * P + offset
        returns  q as this table's `attention` wants it, and the leaf
        """
        ...


class Attention(Protocol):
    def __call__(self, q: Tensor, kv: DenseKV, batch: Batch, kind: AttentionKind) -> Tensor:
        """Attention of one iteration's queries over blocked KV, any mix of stages; [T, H * D].

        q     as `qk_norm_rope_append` returned it (reference: [G, T * group, D], row =
              token * group + head)
        kv    rows [0, kv_len) of each sequence are already written

        Query i of a chunk with q tokens sees keys [0, kv_len - q + i], of these the last
        `window`. With a tree, draft token i sees every key before the drafts, and of the drafts
        those its mask row names.
        """
        ...


@dataclass(frozen=True, slots=True)
class Device:
    """Where a table computes.

    kind          "cpu", "cuda", "npu"
    torch_device  where tensors live
    arch          the chip, for tile tables and logs
    num_cores     what runs tasks side by side: threads, SMs, AI cores
    block_size    tokens per KV block that suit the kernels
    block_multiple block sizes must be a multiple of this
    block_sizes   the only ones the kernels can serve, one tile being one block; () = any multiple
    tile_classes  query tile sizes of the attention kernels, smallest first; () = the table's
                  attention needs no task table
    memory        () -> (free, total) bytes
    synchronize   waits until everything submitted has run
    classes_of    (head size, attention kind, dtype of KV) -> its tile classes, where they are not
                  the same for all; () if the table's attention needs no task table for these;
                  ConfigError if there is no kernel. None = tile_classes always
    """

    kind: str
    torch_device: torch.device
    arch: str
    num_cores: int
    block_size: int
    block_multiple: int
    tile_classes: tuple[int, ...]
    memory: Callable[[], tuple[int, int]]
    synchronize: Callable[[], None]
    block_sizes: tuple[int, ...] = ()
    classes_of: Callable[..., tuple[int, ...]] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A linear layer as a model calls it; all layers that are alike are one.

    weights  their leaves, in the order in which a pass reads them
    n, k     the weight's rows and columns; with act, gate and up rows both count
    bias, residual, act, cap   as in `Linear`; of the first two only whether they are there
    most     rows that it is called with at most
    dtype    of the rows
    """

    weights: tuple[Any, ...]
    n: int
    k: int
    bias: bool
    residual: bool
    act: Activation | None
    cap: float
    most: int
    dtype: torch.dtype


class Tuner(Protocol):
    """What `xylite tune` asks of a table.

    A choice is whatever the table's kernels leave open; any two of them compute the same, but for
    the order of sums. How candidates are compared is in xylite/tune.py.
    """

    @property
    def path(self) -> Path:
        """The file that keeps what was chosen, and that the next start reads."""
        ...

    def format_of(self, weight: Any) -> str:
        """How a weight leaf is stored, in a word."""
        ...

    def buckets(self, product: Product) -> Sequence[tuple[int, int]]:
        """Ranges (first, last) of numbers of rows that have a choice of their own, small ones
        first; last 0 = all that are more."""
        ...

    def candidates(self, product: Product, bucket: tuple[int, int]) -> Sequence[Any]:
        """Choices to try; the first is what is used if nothing was measured."""
        ...

    def near(self, product: Product, choice: Any) -> Sequence[Any]:
        """More to try, once this one was the fastest."""
        ...

    def seconds(self, product: Product, bucket: tuple[int, int], choice: Any) -> float:
        """Time of one call now; infinite if the choice cannot be compiled here or computes
        something else."""
        ...

    def describe(self, choice: Any) -> str:
        """The choice in a few characters."""
        ...

    def keep(self, product: Product, bucket: tuple[int, int], choice: Any | None) -> None:
        """Write the choice to the file; None: what is used without one. OSError if it cannot be."""
        ...


@dataclass(frozen=True, slots=True)
class Ops:
    """The functions of one device. All are pure but for leaves that are said to be consumed.

    pack_linear(w [N, K], gated)  -> the leaf that `linear` takes; called once per weight at load,
                                  the given tensor is not used afterwards
    act_dtype(dtype)              -> dtype of activations when weights are of `dtype`
    embed(table, tokens [T])      -> [T, C]; table is a leaf made by pack_linear from [V, C]
    add_rms_norm(x, residual, w, eps) -> (norm(x + residual) * w, x + residual); residual None = 0
    gated_act(x [T, 2 F], kind)   -> act(x[:, :F]) * x[:, F:]
    grouped_linear(x, w, expert_of, ...) -> as linear, row t with the weight of expert_of[t]
    sample(logits [R, V], batch, state, mask) -> ids [R] int64; logits are consumed
    finite(x [R, C])              -> [R] bool, False where a row has an infinity or a NaN
    last_rows(x [T, C], q_start, n) -> [n, C]: x of the last tokens of the first n chunks. None: the
                                  hidden states are always those of all tokens
    verify(ids, parent, draft_token, depth)   -> accepted [R] bool
    move_slots(kv, src, dst)      -> the cache with rows moved, all sources read first
    copy_blocks(kv, src, dst)     -> the same for whole blocks
    zero_blocks(kv, blocks)       -> the cache with these blocks cleared
    all_reduce(x)                 -> sum over ranks
    replayed(forward, kv, batch)  -> forward(kv, batch), perhaps as a replay of an earlier call's
                                  recording; the same pass at every call. The hidden states last
                                  until the next one. None: nothing to gain
    warm_up                       numbers of tokens whose first pass takes long, because something
                                  is compiled or recorded for them: to be run before requests come
    idle_warm_up                  others, for which it takes so little longer that it is done while
                                  there is nothing to run
    invariant()                   -> the same table with sums in an order that the batch does not
                                  change; None: this one has it already
    packers                       quantised formats that a weight can be packed in, by name; each
                                  is called as pack_linear is, and `linear` takes its leaf
    stored_packers                quantised formats of files that can be kept as they are, by the
                                  file's name for them: (raw rows [N, bytes] uint8, gated) -> leaf
    kv_formats                    what KV may be kept in besides the dtype of activations
    tuner                         measures what the linear layers leave open; None: nothing
    """

    name: str
    device: Device
    pack_linear: Callable[..., Any]
    act_dtype: Callable[[torch.dtype], torch.dtype]
    embed: Callable[[Any, Tensor], Tensor]
    linear: Linear
    add_rms_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
    qk_norm_rope_append: QkNormRopeAppend
    attention: Attention
    gated_act: Callable[[Tensor, Activation], Tensor]
    grouped_linear: Callable[..., Tensor]
    sample: Callable[[Tensor, SampleBatch, SamplerState | None, Tensor | None], Tensor]
    finite: Callable[[Tensor], Tensor]
    verify: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    move_slots: Callable[[KVCache, Tensor, Tensor], KVCache]
    copy_blocks: Callable[[KVCache, Tensor, Tensor], KVCache]
    zero_blocks: Callable[[KVCache, Tensor], KVCache]
    all_reduce: Callable[[Tensor], Tensor]
    replayed: Callable[[Callable[..., Any], KVCache, Batch], tuple[Tensor, KVCache]] | None = None
    last_rows: Callable[[Tensor, Tensor, int], Tensor] | None = None
    warm_up: tuple[int, ...] = ()
    idle_warm_up: tuple[int, ...] = ()
    invariant: Callable[[], "Ops"] | None = None
    packers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    stored_packers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    kv_formats: tuple[str, ...] = ()
    tuner: Tuner | None = None


def load(device: str) -> Ops:
    """The table of a device, "cpu", "reference", "cuda:1", "npu:0"; "auto" = the best that works.

    The file `ops/NAME.py` is the backend; it offers `table(index: int) -> Ops` and
    `available() -> str | None` (None = yes, else the reason it cannot be used).
    """
    names = plugins.names("ops")
    if device == "auto":
        for name in ("npu", "cuda", "cpu", "reference"):
            if name in names and plugins.find("ops", name).available() is None:
                return plugins.find("ops", name).table(0)
    name, _, index = device.partition(":")
    if name not in names or not (index == "" or index.isdecimal()):
        raise ConfigError(
            f"device {device!r} is not known; use auto or one of {', '.join(names)}", param="device"
        )
    backend = plugins.find("ops", name)
    reason = backend.available()
    if reason is not None:
        raise ConfigError(f"device {name} is not available: {reason}", param="device")
    return backend.table(int(index or 0))
