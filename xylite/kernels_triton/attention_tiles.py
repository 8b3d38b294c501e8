"""Which query tiles attention uses on a chip, by head size and kind.

The KV tile is one block. Query tiles have 16 rows for chunks that fit, and for all others the most
rows that fit the chip: on Ascend its planned memories, on CUDA registers without spilling and
99 KiB (sm_80) or 227 KiB (sm_90) of shared memory. With a sliding window or a soft cap the kernel
holds more, so less fits. Compilers found the sizes, and the tests compile them.

Chips are named as in tiles.py; "910b-1.0.0" is the compiler of CANN 8.5, which leaves one of the
two vector cores of an AI core idle in this kernel.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from xylite.errors import ConfigError

HEAD_SIZES: Final = (64, 80, 96, 128, 192, 256)
SMALL: Final = 16

# Rows of the large tile for (plain, sliding window, soft cap, both), by chip and head size.
_LARGE: Final[Mapping[str, Mapping[int, tuple[int, int, int, int]]]] = {
    "910b-1.0.0": {
        **dict.fromkeys((64, 80, 96, 128, 192), (32, 32, 32, 32)),
        256: (32, 32, 32, 16),
    },
    "910b-1.1.0": {
        **dict.fromkeys((64, 80, 96, 128), (128, 64, 64, 64)),
        192: (64, 64, 64, 64),
        256: (64, 64, 64, 32),
    },
    "910b-1.2.0": {
        **dict.fromkeys((64, 80, 96, 128), (128, 64, 64, 64)),
        192: (64, 64, 64, 64),
        256: (64, 64, 64, 32),
    },
    "sm_80": {
        **dict.fromkeys((64, 80, 96, 128), (128, 128, 128, 128)),
        **dict.fromkeys((192, 256), (32, 32, 32, 32)),
    },
    "sm_90": {
        **dict.fromkeys((64, 80, 96, 128, 192), (128, 128, 128, 128)),
        256: (32, 32, 32, 32),
    },
    "interpreter": dict.fromkeys(HEAD_SIZES, (32, 32, 32, 32)),
}
# The same with int8 KV, where it is not the same; () = nothing fits.
_INT8: Final[Mapping[str, Mapping[int, tuple[int, ...]]]] = {
    "910b-1.0.0": {128: (32, 32, 16, 16), 192: (32, 16, 16, 16), 256: ()},
    "910b-1.1.0": {256: (32, 32, 32, 32)},
    "910b-1.2.0": {256: (32, 32, 32, 32)},
    "sm_90": {192: (128, 64, 64, 64)},
}
_BLOCK_SIZES: Final = {"910b": (128,), "sm": (64,), "interpreter": (16, 32, 64, 128, 256)}


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """How one attention kind runs on one chip.

    tile_q   query tiles in packed rows, smallest first: the tile classes
    tile_kv  keys of a tile: the size of a KV block
    columns  a head's columns as one or two powers of two; the second is 0 if one is enough
    options  launch options, one record per tile class
    """

    tile_q: tuple[int, ...]
    tile_kv: int
    columns: tuple[int, int]
    options: tuple[Mapping[str, int], ...]


def chips() -> tuple[str, ...]:
    """The chips that have tiles."""
    return tuple(_LARGE)


def block_sizes(chip: str) -> tuple[int, ...]:
    """The sizes of KV blocks, in tokens, that attention has tiles for on this chip; the first is
    what suits it."""
    return _BLOCK_SIZES[chip.split("-")[0].split("_")[0]]


def _options(chip: str, tile_q: int, int8: bool) -> Mapping[str, int]:
    if chip.startswith("910b"):
        # Several projects met races in automatic multi-buffering of cube and vector kernels on
        # generation 1.2.0.
        return {"multibuffer": int(chip == "910b-1.1.0")}
    if chip.startswith("sm_"):
        # Unpacking int8 takes registers: four warps would spill some.
        return {"num_warps": 4 if tile_q == SMALL and not int8 else 8, "num_stages": 2}
    return {}


def _columns(chip: str, head_size: int) -> tuple[int, int]:
    if chip.startswith("sm_") and head_size == 128:
        # Two tiles of 64 need 30 registers less than one of 128.
        return 64, 64
    first = 1 << (head_size.bit_length() - 1)
    return first, head_size - first


def attention_tiles(
    chip: str,
    head_size: int,
    *,
    window: int = 0,
    cap: float = 0.0,
    int8: bool = False,
    size: int | None = None,
) -> AttentionTiles:
    """The tiles of one attention kind; ConfigError naming what there is, if there are none.

    int8  keys and values are int8 with scales
    size  tokens of a KV block; None = what suits the chip
    """
    if chip not in _LARGE:
        raise ConfigError(f"attention has no tiles for chip {chip!r}; it has {', '.join(_LARGE)}")
    if head_size not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        raise ConfigError(f"attention has no kernel for head size {head_size}; it has {sizes}")
    sizes = block_sizes(chip)
    size = size or sizes[0]
    if size not in sizes:
        raise ConfigError(
            f"attention on {chip} reads KV blocks of {' or '.join(map(str, sizes))} tokens, "
            f"block_size is {size}",
            param="block_size",
        )
    rows = (_INT8.get(chip, {}) if int8 else {}).get(head_size, _LARGE[chip][head_size])
    if not rows:
        raise ConfigError(
            f"attention on {chip} has no kernel for int8 KV at head size {head_size}",
            param="kv_cache_dtype",
        )
    large = rows[(window > 0) + 2 * (cap > 0)]
    tile_q = (SMALL, large) if large > SMALL else (SMALL,)
    return AttentionTiles(
        tile_q,
        size,
        _columns(chip, head_size),
        tuple(_options(chip, t, int8) for t in tile_q),
    )
