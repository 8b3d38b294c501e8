"""What one call of an op must compute and move, whatever kernel does it.

Memory counts what no cache holds from one use to the next: weights, keys and values. Activations
count as traffic of caches, as they come from the op before: each is read once and written once.
Masked keys, exponentials, rounding and padding do not count, so that the least time that follows is
a bound.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from bench.ops.batches import Chunk
from bench.ops.timing import Roofline, num_bytes_of
from xylite.ops import DenseKV

# What ops without products compute in.
FLOAT32: Final = "float32"
# Per element of the activations that come in; estimates, as nothing here is bound by them.
NORM_FLOPS: Final = 6.0
ROPE_FLOPS: Final = 3.0


@dataclass(frozen=True, slots=True)
class Work:
    """Of one call or several.

    form          what is multiplied: a weight format, "" = the dtype, or FLOAT32
    memory_bytes  of weights, keys and values
    cached_bytes  of activations
    """

    flops: float = 0.0
    memory_bytes: float = 0.0
    cached_bytes: float = 0.0
    form: str = ""
    calls: int = 1

    def __add__(self, other: "Work") -> "Work":
        assert self.form == other.form, f"{self.form} and {other.form}"
        return Work(
            self.flops + other.flops,
            self.memory_bytes + other.memory_bytes,
            self.cached_bytes + other.cached_bytes,
            self.form,
            self.calls + other.calls,
        )

    def seconds(self, roof: Roofline) -> float:
        """The least that it can take."""
        return roof.seconds(
            self.flops, self.memory_bytes, self.form, cached_bytes=self.cached_bytes
        )


def of_call(
    op: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    out: Any,
    *,
    chunks: Sequence[Chunk],
    vocab: int,
    form: str = "",
) -> Work:
    """The work of ops.OP(*args, **kwargs), which gave `out`.

    chunks  of the iteration
    vocab   rows of the embedding
    form    format of weights
    """
    match op:
        case "linear":
            x, w = args[:2]
            columns = out.shape[1] * (2 if kwargs.get("act") else 1)
            moved = _nbytes(x, out, kwargs.get("residual"))
            return Work(2.0 * x.shape[0] * columns * x.shape[1], num_bytes_of(w), moved, form)
        case "embed":
            table, tokens = args
            rows = len(tokens) * num_bytes_of(table) / vocab
            return Work(0.0, rows, _nbytes(out), FLOAT32)
        case "add_rms_norm":
            x, residual = args[:2]
            return Work(NORM_FLOPS * x.numel(), 0.0, _nbytes(x, residual, *out), FLOAT32)
        case "qk_norm_rope_append":
            qkv, q, kv = args[0], out[0], args[3]
            stored = float(qkv.shape[0] * _bytes_of_token(kv))
            return Work(ROPE_FLOPS * qkv.numel(), stored, _nbytes(qkv, q), FLOAT32)
        case "attention":
            q, kv = args[:2]
            pairs = sum(c.tokens * c.past + c.tokens * (c.tokens + 1) / 2 for c in chunks)
            # Two products of each query head with the keys that it sees.
            flops = 4.0 * pairs * q.numel() / sum(c.tokens for c in chunks)
            before = sum(c.past for c in chunks) * _bytes_of_token(kv)
            own = sum(c.tokens for c in chunks) * _bytes_of_token(kv)
            return Work(flops, float(before), _nbytes(q, out) + own)
        case "sample":
            return Work(float(args[0].numel()), 0.0, _nbytes(args[0]), FLOAT32)
    raise ValueError(f"the work of {op} is not known")


def _nbytes(*tensors: Tensor | None) -> float:
    return float(sum(t.nbytes for t in tensors if t is not None))


def _bytes_of_token(kv: DenseKV) -> int:
    """A token's keys and values in one layer."""
    _, heads, _, dim = kv.k.shape
    return 2 * heads * dim * kv.k.itemsize
