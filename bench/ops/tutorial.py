"""What one writes after reading Triton's tutorials: a matrix product and a flash attention.

They are what the kernels are compared with, as in the paper (Song et al. 2026, section 7.5): each
tile of M and N is a program of its own and asks for itself which elements exist; attention takes
dense batches, padded to the longest chunk and the longest sequence. The sizes of tiles are those
the tutorials try; the caller takes the quickest.
"""

# Kernel arguments are pointers and numbers of Triton's own types.
# ruff: noqa: ANN001

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

HIDDEN: Final = tl.constexpr(-1.0e30)


@dataclass(frozen=True, slots=True)
class Config:
    """Tile sizes and launch options; `n` and `k` are keys and nothing for attention."""

    m: int
    n: int
    k: int = 0
    warps: int = 4
    stages: int = 3


MATMUL: Final = (
    Config(128, 256, 64, 8, 3),
    Config(128, 128, 32, 4, 4),
    Config(64, 256, 32, 4, 4),
    Config(128, 64, 32, 4, 4),
    Config(64, 128, 32, 4, 4),
    Config(32, 64, 32, 2, 5),
    Config(16, 64, 64, 4, 5),
)
ATTENTION: Final = (
    Config(128, 64, warps=8, stages=2),
    Config(64, 64, warps=4, stages=2),
    Config(16, 64, warps=4, stages=3),
)


@triton.jit
def _matmul(
    p_x, p_w, p_out, m, n, k, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    BAND: tl.constexpr,
):  # fmt: skip
    """One tile of x [m, k] @ w [n, k].T; tiles are numbered in bands of BAND rows of tiles."""
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(m, TILE_M), tl.cdiv(n, TILE_N)
    per_band = BAND * tiles_n
    first = pid // per_band * BAND
    height = tl.minimum(tiles_m - first, BAND)
    o_m = (first + pid % per_band % height) * TILE_M + tl.arange(0, TILE_M)
    o_n = pid % per_band // height * TILE_N + tl.arange(0, TILE_N)
    o_k = tl.arange(0, TILE_K)
    acc = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in range(0, k, TILE_K):
        m_k = start + o_k < k
        b_x = tl.load(
            p_x + o_m[:, None].to(tl.int64) * k + start + o_k[None, :],
            mask=(o_m < m)[:, None] & m_k[None, :], other=0.0,
        )  # fmt: skip
        b_w = tl.load(
            p_w + o_n[:, None].to(tl.int64) * k + start + o_k[None, :],
            mask=(o_n < n)[:, None] & m_k[None, :], other=0.0,
        )  # fmt: skip
        acc = tl.dot(b_x, tl.trans(b_w), acc, input_precision="ieee")
    tl.store(
        p_out + o_m[:, None].to(tl.int64) * n + o_n[None, :], acc.to(p_out.dtype.element_ty),
        mask=(o_m < m)[:, None] & (o_n < n)[None, :],
    )  # fmt: skip


def matmul(x: Tensor, w: Tensor, config: Config) -> Tensor:
    """x [M, K] @ w [N, K].T, [M, N]; both contiguous."""
    m, k = x.shape
    n = w.shape[0]
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    options: Any = {
        "TILE_M": config.m, "TILE_N": config.n, "TILE_K": config.k, "BAND": 8,
        "num_warps": config.warps, "num_stages": config.stages,
    }  # fmt: skip
    grid = (triton.cdiv(m, config.m) * triton.cdiv(n, config.n),)
    _matmul[grid](x, w, out, m, n, k, **options)
    return out


@triton.jit
def _attention(
    p_q, p_k, p_v, p_pad, p_out, len_q, len_kv, scale, H: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head of one sequence, over all keys before it."""
    i_m, i_h = tl.program_id(0), tl.program_id(1)
    i_b = i_h // H
    i_g = i_b * (H // GROUP) + i_h % H // GROUP
    pad = tl.load(p_pad + i_b)
    o_m, o_d = i_m * TILE_M + tl.arange(0, TILE_M), tl.arange(0, D)
    p_q += i_h.to(tl.int64) * len_q * D
    p_k += i_g.to(tl.int64) * len_kv * D
    p_v += i_g.to(tl.int64) * len_kv * D
    m_q = (o_m < len_q)[:, None]
    b_q = tl.load(p_q + o_m[:, None] * D + o_d[None, :], mask=m_q, other=0.0)
    b_max = tl.full((TILE_M,), HIDDEN, tl.float32)
    b_sum = tl.zeros((TILE_M,), tl.float32)
    acc = tl.zeros((TILE_M, D), tl.float32)
    last = o_m + len_kv - len_q
    end = tl.minimum(len_kv, (i_m + 1) * TILE_M + len_kv - len_q)
    for start in range(0, end, TILE_N):
        o_n = start + tl.arange(0, TILE_N)
        m_n = (o_n < len_kv)[:, None]
        b_k = tl.load(p_k + o_n[:, None] * D + o_d[None, :], mask=m_n, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
        seen = (o_n[None, :] >= pad) & (o_n[None, :] <= last[:, None])
        b_s = tl.where(seen, b_s, HIDDEN)
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_keep = tl.exp(b_max - b_new)
        b_p = tl.exp(b_s - b_new[:, None])
        b_sum = b_sum * b_keep + tl.sum(b_p, 1)
        b_v = tl.load(p_v + o_n[:, None] * D + o_d[None, :], mask=m_n, other=0.0)
        acc = acc * b_keep[:, None] + tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee")
        b_max = b_new
    p_out += i_h.to(tl.int64) * len_q * D
    out = (acc / b_sum[:, None]).to(p_out.dtype.element_ty)
    tl.store(p_out + o_m[:, None] * D + o_d[None, :], out, mask=m_q)


def attention(q: Tensor, k: Tensor, v: Tensor, pad: Tensor, scale: float, config: Config) -> Tensor:
    """Causal attention of a dense batch whose sequences end together; like q.

    q     [B, H, longest chunk, D]
    k, v  [B, G, longest sequence, D]
    pad   [B] int32, keys before it are padding; D is a power of two
    """
    batch, heads, len_q, dim = q.shape
    out = torch.empty_like(q)
    options: Any = {
        "H": heads, "GROUP": heads // k.shape[1], "D": dim, "TILE_M": config.m,
        "TILE_N": config.n, "num_warps": config.warps, "num_stages": config.stages,
    }  # fmt: skip
    grid = (triton.cdiv(len_q, config.m), batch * heads)
    _attention[grid](q, k, v, pad, out, len_q, k.shape[2], scale, **options)
    return out
