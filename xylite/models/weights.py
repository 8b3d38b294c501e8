"""From a checkpoint's tensors, or from a seed, to a Params tree on the device.

Tensors are read in slices straight into the weight they become, cast on the way or byte for byte
where they stay quantised, and each weight is packed by the table before the next one is begun:
beside the model itself there is never more than one weight and one slice in memory.
"""

import logging
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor
from tqdm import tqdm

from xylite import tree
from xylite.checkpoint import Checkpoint
from xylite.errors import ConfigError
from xylite.models.spec import GgufSource, Leaf, ModelSpec
from xylite.ops import Ops
from xylite.tensor_files import BLOCKS, TensorInfo

SLICE_BYTES: Final = 2**24

_PLAIN: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# Tensors that some converters write although nothing needs them: what can be computed, and a tied
# model's own copy of the head (the embedding is its head).
_IGNORED: Final = ("rotary_emb.inv_freq", "rope_freqs.weight", "lm_head.weight")

_PACKED: Final = ("linear", "gated", "embedding")


def resolve_dtype(checkpoint: Checkpoint, dtype: str) -> torch.dtype:
    """The dtype of that name; "auto" is the checkpoint's own.

    That is the dtype of most bytes of its tensors, and bfloat16 if those are quantised. A
    checkpoint opened without weights says it in config.json.
    """
    if dtype != "auto":
        return getattr(torch, dtype)
    share: dict[str, int] = {}
    for t in checkpoint.tensors.values():
        share[t.dtype] = share.get(t.dtype, 0) + t.nbytes
    if share:
        found = _PLAIN.get(max(share, key=lambda k: share[k]), torch.bfloat16)
    else:
        name = checkpoint.config.get("torch_dtype") or checkpoint.config.get("dtype")
        known = {str(t).removeprefix("torch."): t for t in _PLAIN.values()}
        found = known.get(str(name), torch.bfloat16)
    return torch.float32 if found == torch.float64 else found


def load(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    family: ModuleType,
    ops: Ops,
    dtype: torch.dtype,
    *,
    keep_stored: bool = False,
    pack_vocab: Callable[..., Any] | None = None,
    max_len: int | None = None,
    progress: bool | None = None,
) -> Any:
    """The model's Params on the device of `ops`, weights and activations in `dtype`.

    dtype        Each stored value is cast to it once. So float32 from a bfloat16 directory computes
                 with bfloat16 values in float32; float32 from a quantised GGUF file uses the values
                 as they dequantise, which bfloat16 would round first.
    keep_stored  a linear weight or embedding whose tensors are all of one quantised kind that the
                 table takes (`Ops.stored_packers`) keeps its bits; only the others become `dtype`
    pack_vocab   packs the embedding and the head; None = `ops.pack_linear` does, as all others
    max_len      positions of the rotary table; None = the model's own maximum
    progress     show a bar on stderr; None = if that is a terminal
    raises       ConfigError naming the file and the tensor that is missing, unknown, of another
                 shape or type than the model's, or cut short
    """
    start = time.perf_counter()
    abstract = family.abstract(spec)
    names = family.gguf_names(spec) if checkpoint.format == "gguf" else {}
    _check_names(checkpoint, spec, abstract, names)
    total = sum(t.nbytes for t in checkpoint.tensors.values())
    show = sys.stderr.isatty() if progress is None else progress
    kept: Counter[str] = Counter()
    cast: Counter[str] = Counter()
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="weights", leave=False, disable=not show
    ) as bar:

        def make(leaf: Leaf) -> Any:
            sources = [names.get(part.name, GgufSource(part.name)) for part in leaf.parts]
            tensors = [checkpoint.tensors[source.name] for source in sources]
            kind = _stored_kind(leaf, tensors, ops) if keep_stored else None
            for t in tensors:
                (cast if kind is None else kept)[t.dtype] += t.nbytes
            if kind is None:
                made = torch.empty(leaf.shape, dtype=_leaf_dtype(leaf, ops, dtype))
            else:
                row_bytes = tensors[0].nbytes // tensors[0].shape[0]
                made = torch.empty(leaf.shape[0], row_bytes, dtype=torch.uint8)
            at = 0
            for t, source in zip(tensors, sources, strict=True):
                rows = made[at : at + t.shape[0]]
                _read(t, rows, bar.update, as_stored=kind is not None)
                if source.heads:
                    rows.copy_(_in_halves(rows, source.heads))
                at += t.shape[0]
            if kind is not None:
                return _placed(leaf, made, ops, ops.stored_packers[kind])
            return _placed(leaf, made, ops, pack_vocab if _of_vocab(leaf) else None)

        params = tree.map(make, abstract)
    params = with_tables(params, spec, family, ops, max_len)
    log = logging.getLogger(__name__)
    if said := _quantised(kept, cast, dtype):
        log.info("weights: %s", said)
    log.info(
        "loaded %.2f GiB of weights in %.1f s; peak memory of the process %.2f GiB",
        weight_bytes(params) / 2**30,
        time.perf_counter() - start,
        peak_memory() / 2**30,
    )
    return params


def random_params(
    spec: ModelSpec,
    family: ModuleType,
    ops: Ops,
    dtype: torch.dtype,
    seed: int = 0,
    *,
    pack_vocab: Callable[..., Any] | None = None,
    max_len: int | None = None,
) -> Any:
    """Params with random values, the same for the same seed: for speed tests and unit tests.

    Other arguments as in `load`.
    """
    generator = torch.Generator().manual_seed(seed)

    def make(leaf: Leaf) -> Any:
        made = torch.randn(leaf.shape, generator=generator)
        if leaf.role == "norm":
            made = 1 + 0.1 * made
        else:
            made *= leaf.shape[-1] ** -0.5
        made = made.to(_leaf_dtype(leaf, ops, dtype))
        return _placed(leaf, made, ops, pack_vocab if _of_vocab(leaf) else None)

    params = tree.map(make, family.abstract(spec))
    return with_tables(params, spec, family, ops, max_len)


def with_tables(
    params: Any, spec: ModelSpec, family: ModuleType, ops: Ops, max_len: int | None
) -> Any:
    """Params with tables for positions [0, max_len), on the device; None = the model's maximum."""
    made = family.with_tables(params, spec, max_len or spec.max_position)
    device = ops.device.torch_device
    return tree.map(lambda t: t.to(device) if isinstance(t, Tensor) else t, made)


def weight_bytes(params: Any) -> int:
    """Bytes of all tensors of a tree, each storage counted once."""
    sizes = {t.data_ptr(): t.nbytes for t in tree.leaves(params) if isinstance(t, Tensor)}
    return sum(sizes.values())


def peak_memory() -> int:
    """Most bytes this process has had in memory so far.

    Linux's ru_maxrss starts at the parent's peak, so its own counter comes first.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(x.split()[1]) for x in lines if x.startswith("VmHWM:"))
    except (OSError, StopIteration):
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _leaf_dtype(leaf: Leaf, ops: Ops, dtype: torch.dtype) -> torch.dtype:
    """Norms stay wide: they are small, and their products are summed in float32 anyway."""
    if leaf.role == "norm":
        return torch.promote_types(dtype, torch.float32)
    return ops.act_dtype(dtype) if leaf.role == "bias" else dtype


def _stored_kind(leaf: Leaf, tensors: Sequence[TensorInfo], ops: Ops) -> str | None:
    """The quantised kind that all tensors of a weight share, if the table takes it as it is."""
    kinds = {t.dtype for t in tensors}
    kind = kinds.pop()
    takes = leaf.role in _PACKED and kind in ops.stored_packers
    return kind if takes and not kinds else None


def _quantised(kept: Mapping[str, int], cast: Mapping[str, int], dtype: torch.dtype) -> str:
    """What became of the quantised tensors, by kind; "" if there are none."""

    def listed(found: Mapping[str, int]) -> str:
        return ", ".join(
            f"{kind} ({nbytes / 2**20:.0f} MiB)"
            for kind, nbytes in sorted(found.items())
            if kind not in _PLAIN
        )

    both = (
        (listed(kept), "kept as stored"),
        (
            listed(cast),
            f"dequantised to {str(dtype).removeprefix('torch.')}",
        ),
    )
    return "; ".join(f"{kinds} {what}" for kinds, what in both if kinds)


def _of_vocab(leaf: Leaf) -> bool:
    return leaf.axes[0] == "vocab"


def _placed(leaf: Leaf, made: Tensor, ops: Ops, pack: Callable[..., Any] | None) -> Any:
    """The leaf on the device, packed if it is a weight; `ops.pack_linear` packs where `pack` is
    None."""
    made = made.to(ops.device.torch_device)
    if leaf.role not in _PACKED:
        return made
    return (pack or ops.pack_linear)(made, gated=leaf.role == "gated")


def _check_names(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    abstract: Any,
    names: Mapping[str, GgufSource],
) -> None:
    """ConfigError unless the checkpoint holds exactly the tree's tensors, in their shapes."""
    wanted = {
        names.get(part.name, GgufSource(part.name)).name: (part.rows, *leaf.shape[1:])
        for leaf in tree.leaves(abstract)
        for part in leaf.parts
    }
    tensors = checkpoint.tensors
    missing = [n for n in wanted if n not in tensors]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        why = ""
        if missing[0] == "lm_head.weight":
            why = ", and config.json says tie_word_embeddings is false"
        raise ConfigError(
            f"{checkpoint.path}: tensor {missing[0]!r}{more} is missing{why}", param="model"
        )
    for name, t in tensors.items():
        if name not in wanted and not name.endswith(_IGNORED):
            raise ConfigError(
                f"{t.file}: tensor {name!r} has no place in a {spec.family} model of this "
                "config.json",
                param="model",
            )
    for name, shape in wanted.items():
        t = tensors[name]
        if t.shape != shape:
            raise ConfigError(
                f"{t.file}: tensor {name!r} has shape {list(t.shape)}, the model needs "
                f"{list(shape)}",
                param="model",
            )
        if t.dtype not in _PLAIN and t.dtype not in BLOCKS:
            raise ConfigError(
                f"{t.file}: tensor {name!r} has dtype {t.dtype}, which is not supported "
                f"(supported: {', '.join(_PLAIN)})",
                param="model",
            )
        if t.dtype not in _PLAIN and len(shape) == 1:
            raise ConfigError(
                f"{t.file}: tensor {name!r} is one row of {shape[0]} values in blocks of "
                f"{t.dtype}; norms and biases must be plain ({', '.join(_PLAIN)})",
                param="model",
            )


def _read(
    t: TensorInfo, out: Tensor, done: Callable[[int], Any], *, as_stored: bool = False
) -> None:
    """Fill `out`, of t's shape and any dtype, slice by slice; done(bytes) after each.

    as_stored  out is [rows, bytes of a row] uint8 and gets the bytes
    """
    num_rows = t.shape[0]
    row_bytes = t.nbytes // num_rows
    step = max(1, SLICE_BYTES // row_bytes)
    for start in range(0, num_rows, step):
        end = min(start + step, num_rows)
        count = (end - start) * row_bytes
        try:
            raw = np.fromfile(t.file, np.uint8, count, offset=t.offset + start * row_bytes)
        except OSError as e:
            raise ConfigError(f"{t.file}: tensor {t.name!r} cannot be read: {e}") from None
        if raw.size < count:
            raise ConfigError(f"{t.file}: tensor {t.name!r} is cut short")
        values = torch.from_numpy(raw) if as_stored else _values(t, raw, end - start)
        out[start:end].copy_(values.view_as(out[start:end]))
        done(count)


def _values(t: TensorInfo, raw: np.ndarray, num_rows: int) -> Tensor:
    """The numbers of whole rows."""
    if t.dtype in _PLAIN:
        return torch.from_numpy(raw).view(_PLAIN[t.dtype])
    blocks = raw.reshape(num_rows, -1)
    return torch.from_numpy(dequantize(blocks, GGMLQuantizationType[t.dtype]))


def _in_halves(x: Tensor, heads: int) -> Tensor:
    """Rows of each head from rotary pairs (2i, 2i + 1) to halves (i, i + D / 2)."""
    return x.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
