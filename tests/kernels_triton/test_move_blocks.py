import pytest
import torch
from torch import Tensor

from xylite import tree
from xylite.kernels_triton import launch
from xylite.ops import DenseKV, reference

N, G, P, D = 5, 3, 16, 20


def cache(dtype: torch.dtype = torch.float32) -> tuple[DenseKV, ...]:
    g = torch.Generator().manual_seed(0)
    if dtype == torch.int8:
        shape, near = (N, G, P, D), {"generator": g, "dtype": dtype}
        return tuple(
            DenseKV(
                *(torch.randint(-127, 128, shape, **near) for _ in range(2)),
                *(torch.randn(N, G, P, generator=g) for _ in range(2)),
            )
            for _ in range(2)
        )
    return tuple(
        DenseKV(*(torch.randn(N, G, P, D, generator=g).to(dtype) for _ in range(2)))
        for _ in range(2)
    )


def same(a: tuple[DenseKV, ...], b: tuple[DenseKV, ...]) -> bool:
    return all(map(torch.equal, tree.leaves(a), tree.leaves(b)))


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# Chains, swaps and the pool's ends: a source is read before any destination is written.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(
    "src, dst", [((3, 17, 79, 4), (4, 3, 0, 17)), ((5, 6), (6, 5)), ((0,), (79,)), ((), ())]
)
def test_slots_move_as_if_all_at_once(target, src, dst, dtype):
    kv, wanted = cache(dtype), cache(dtype)
    moved = launch.move_slots(target, kv, ids(*src), ids(*dst))
    assert same(moved, reference.move_slots(wanted, ids(*src).long(), ids(*dst).long()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("src, dst", [((0, 1, 2), (1, 2, 4)), ((3, 4), (4, 3)), ((), ())])
def test_blocks_copy_as_if_all_at_once(target, src, dst, dtype):
    kv, wanted = cache(dtype), cache(dtype)
    copied = launch.copy_blocks(target, kv, ids(*src), ids(*dst))
    assert same(copied, reference.copy_blocks(wanted, ids(*src).long(), ids(*dst).long()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("blocks", [(0, 4), (2,), ()])
def test_zeroed_blocks_lose_even_nan_and_others_keep_theirs(target, blocks, dtype):
    kv, wanted = cache(dtype), cache(dtype)
    for b in blocks:
        (kv[1].k if kv[1].k_scale is None else kv[1].k_scale)[b] = torch.nan
    cleared = launch.zero_blocks(target, kv, ids(*blocks))
    assert same(cleared, reference.zero_blocks(wanted, ids(*blocks).long()))


def test_only_as_many_as_the_device_says_move(limited):
    kv, wanted = cache(), cache()
    launch.move_slots(limited(1), kv, ids(1, 2), ids(3, 4))
    assert same(kv, reference.move_slots(wanted, ids(1).long(), ids(3).long()))
