"""From a checkpoint's tensors, or from a seed, to a Params tree on the device.

Tensors are read in slices straight into the weight they become, cast on the way, and each weight
goes through the table's `pack_linear` before the next one is begun: beside the model itself there
is never more than one weight and one slice in memory.
"""

import logging
import resource
import sys
import time
from collections.abc import Callable, Mapping
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
    max_len: int | None = None,
    progress: bool | None = None,
) -> Any:
    """The model's Params on the device of `ops`, weights and activations in `dtype`.

    dtype     Each stored value is cast to it once. So float32 from a bfloat16 directory computes
              with bfloat16 values in float32; float32 from a quantised GGUF file uses the values as
              they dequantise, which bfloat16 would round first.
    max_len   positions of the rotary table; None = the model's own maximum
    progress  show a bar on stderr; None = if that is a terminal
    raises    ConfigError naming the file and the tensor that is missing, unknown, of another shape
              or type than the model's, or cut short
    """
    start = time.perf_counter()
    abstract = family.abstract(spec)
    names = family.gguf_names(spec) if checkpoint.format == "gguf" else {}
    _check_names(checkpoint, spec, abstract, names)
    total = sum(t.nbytes for t in checkpoint.tensors.values())
    show = sys.stderr.isatty() if progress is None else progress
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="weights", leave=False, disable=not show
    ) as bar:

        def make(leaf: Leaf) -> Any:
            made = torch.empty(leaf.shape, dtype=_leaf_dtype(leaf, ops, dtype))
            at = 0
            for part in leaf.parts:
                source = names.get(part.name, GgufSource(part.name))
                rows = made[at : at + part.rows]
                _read(checkpoint.tensors[source.name], rows, bar.update)
                if source.heads:
                    rows.copy_(_in_halves(rows, source.heads))
                at += part.rows
            return _placed(leaf, made, ops)

        params = tree.map(make, abstract)
    params = _with_tables(params, spec, family, ops, max_len)
    logging.getLogger(__name__).info(
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
    max_len: int | None = None,
) -> Any:
    """Params with random values, the same for the same seed: for speed tests and unit tests."""
    generator = torch.Generator().manual_seed(seed)

    def make(leaf: Leaf) -> Any:
        made = torch.randn(leaf.shape, generator=generator)
        if leaf.role == "norm":
            made = 1 + 0.1 * made
        else:
            made *= leaf.shape[-1] ** -0.5
        return _placed(leaf, made.to(_leaf_dtype(leaf, ops, dtype)), ops)

    params = tree.map(make, family.abstract(spec))
    return _with_tables(params, spec, family, ops, max_len)


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


def _placed(leaf: Leaf, made: Tensor, ops: Ops) -> Any:
    made = made.to(ops.device.torch_device)
    if leaf.role in ("linear", "gated", "embedding"):
        return ops.pack_linear(made, gated=leaf.role == "gated")
    return made


def _with_tables(
    params: Any, spec: ModelSpec, family: ModuleType, ops: Ops, max_len: int | None
) -> Any:
    made = family.with_tables(params, spec, max_len or spec.max_position)
    device = ops.device.torch_device
    return tree.map(lambda t: t.to(device) if isinstance(t, Tensor) else t, made)


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


def _read(t: TensorInfo, out: Tensor, done: Callable[[int], Any]) -> None:
    """Fill `out`, of t's shape and any dtype, slice by slice; done(bytes) after each."""
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
        out[start:end].copy_(_values(t, raw, end - start).view_as(out[start:end]))
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
