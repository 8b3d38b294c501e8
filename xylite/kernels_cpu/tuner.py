"""Cache blocks of linear layers, measured for one model's shapes: `ops.Tuner` of the CPU."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xylite.kernels_cpu import tuning
from xylite.kernels_cpu.packed import Packed, Packer, format_of
from xylite.kernels_cpu.tuning import Blocks


class BlockTuner:
    """A choice is (KiB of activations, KiB of a panel) that stay in cache.

    path  of `tuning.load`
    dot   as the table was made: the file may be gone by now
    """

    def __init__(self, packer: Packer, path: Path, dot: bool):
        self.path = path
        self._packer = packer
        self._dot = dot
        self._turn = 0
        self._inputs: tuple[Any, int, tuple[Tensor, Tensor | None, Tensor | None]] | None = None

    def format_of(self, weight: Any) -> str:
        return format_of(weight) if isinstance(weight, Packed) else "none"

    def buckets(self, product: Any) -> Sequence[tuple[int, int]]:
        """They double. None for weights that have no kernel."""
        if not isinstance(product.weights[0], Packed):
            return ()
        first, found = tuning.FIRST_ROWS, []
        while first <= min(product.most, tuning.LAST_ROWS):
            found.append((first, 2 * first - 1))
            first *= 2
        return found

    def candidates(self, product: Any, bucket: tuple[int, int]) -> Sequence[Blocks]:
        block, panel = self._packer.default_blocks
        sizes = [
            (max(1, b), max(1, p))
            for b in (block, block // 4, block // 2, block * 3 // 2)
            for p in (panel, panel // 8, panel // 4, panel * 2)
        ]
        return list(dict.fromkeys(sizes))

    def near(self, product: Any, choice: Blocks) -> Sequence[Blocks]:
        return ()

    def seconds(self, product: Any, bucket: tuple[int, int], choice: Blocks) -> float:
        """Weights by turns, as a pass reads them: small ones would else be found in cache."""
        w = product.weights[self._turn % len(product.weights)]
        self._turn += 1
        x, bias, residual = self._inputs_of(product, bucket[0])
        start = time.perf_counter()
        self._packer.multiply(x, w, bias, residual, product.act, product.cap, 0, choice)
        return time.perf_counter() - start

    def _inputs_of(self, product: Any, rows: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """x, bias and residual, made once: what torch leaves spinning would disturb the time."""
        if self._inputs is None or self._inputs[:2] != (product, rows):
            width = product.n // 2 if product.act else product.n
            x = torch.ones(rows, product.k, dtype=self._packer.rows)
            bias = torch.zeros(product.n) if product.bias else None
            residual = torch.zeros(rows, width) if product.residual else None
            self._inputs = product, rows, (x, bias, residual)
        return self._inputs[2]

    def describe(self, choice: Blocks) -> str:
        return f"{choice[0]}+{choice[1]} KiB"

    def keep(self, product: Any, bucket: tuple[int, int], choice: Blocks | None) -> None:
        held = tuning.load(self.path) or tuning.Tuning(self._dot)
        key = (
            self._packer.kernels.threads,
            self.format_of(product.weights[0]),
            product.act is not None,
            product.n,
            product.k,
            tuning.bucket(bucket[0]),
        )
        blocks = {k: v for k, v in held.blocks.items() if k != key}
        if choice is not None:
            blocks[key] = choice
        tuning.save(self.path, dataclasses.replace(held, blocks=blocks))
