from dataclasses import replace

import pytest
import torch
from torch import Tensor

from xylite.kernels_triton import launch
from xylite.ops import SampleBatch, SamplerState, reference

ROWS = 12


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(
    rows: int = ROWS,
    temperature: tuple[float, ...] = (1.0,),
    top_k: tuple[int, ...] = (0,),
    top_p: tuple[float, ...] = (1.0,),
    min_p: tuple[float, ...] = (0.0,),
    penalties: bool = False,
) -> SampleBatch:
    """Each tuple repeated over the rows; seen and biased tokens in rows 0 and 1 if `penalties`."""

    def over_rows(values: tuple[float, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([values[i % len(values)] for i in range(rows)], dtype=dtype)

    def ids(*values: int) -> Tensor:
        return torch.tensor(values if penalties else (), dtype=torch.int32)

    return SampleBatch(
        temperature=over_rows(temperature),
        top_k=over_rows(top_k, torch.int32),
        top_p=over_rows(top_p),
        min_p=over_rows(min_p),
        presence_penalty=over_rows((0.0, 0.5, -1.0)),
        frequency_penalty=over_rows((0.0, 0.3)),
        repetition_penalty=over_rows((1.0, 1.3, 0.8)),
        uniform=torch.rand(rows, generator=generator(rows)),
        state_row=torch.arange(rows, dtype=torch.int32) - 1,
        mask_row=over_rows((-1,), torch.int32),
        bias_row=ids(0, 1, 1),
        bias_token=ids(3, 5, 5),
        bias_value=torch.tensor((2.0, -torch.inf, 1.0) if penalties else ()),
        seen_row=ids(0, 1, 1, 0),
        seen_token=ids(5, 5, 5, 2),
        penalised=penalties,
        filtered=any(k > 0 for k in top_k)
        or any(p < 1 for p in top_p)
        or any(p > 0 for p in min_p),
        greedy=not any(temperature),
    )


def logits_of(rows: int, v: int) -> Tensor:
    """Half of them rounded, so that many are equal and cuts fall among equals."""
    x = torch.randn(rows, v, generator=generator(v)) * 3
    x[:, : v // 2] = x[:, : v // 2].round()
    return x


def state_of(rows: int, v: int) -> SamplerState:
    g = generator(v + 1)
    prompt = torch.rand(rows, v, generator=g) < 0.2
    return SamplerState(prompt, (torch.rand(rows, v, generator=g) * 3).int())


SETTINGS = {
    "greedy": {"temperature": (0.0,)},
    "temperatures": {"temperature": (1.0, 0.7, 0.0, 2.0)},
    "top_k": {"top_k": (1, 5, 36, 37, 38, 0)},
    "top_p": {"top_p": (0.9, 0.5, 0.01, 1.0, 0.999)},
    "min_p": {"min_p": (0.1, 0.5, 1.0, 0.0)},
    "all at once": {
        "temperature": (0.8, 0.0, 1.3), "top_k": (10, 0, 3, 40), "top_p": (0.9, 0.95, 0.3),
        "min_p": (0.0, 0.02),
    },
}  # fmt: skip


@pytest.mark.parametrize("penalties", [False, True], ids=["", "penalties"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("v", [37, 1000, 9000])  # one piece, one tile, two tiles
def test_sample_draws_what_the_reference_draws(target, v, setting, penalties):
    table = batch(**SETTINGS[setting], penalties=penalties)
    x, state = logits_of(ROWS, v), state_of(ROWS, v)
    drawn = launch.sample(target, x.clone(), table, state, None)
    assert drawn.dtype == torch.long
    assert torch.equal(drawn, reference.sample(x.clone(), table, state, None))


def test_sample_obeys_masks(target):
    x = logits_of(ROWS, 70)
    mask = torch.zeros(2, 3, dtype=torch.int32)
    mask[0, 1] = -(2**31)  # token 63 alone
    mask[1, 2] = 0b101  # tokens 64 and 66
    table = replace(batch(), mask_row=torch.tensor([0, 1, -1] * 4, dtype=torch.int32))
    drawn = launch.sample(target, x.clone(), table, None, mask)
    assert set(drawn[0::3].tolist()) == {63} and set(drawn[1::3].tolist()) <= {64, 66}
    assert torch.equal(drawn, reference.sample(x.clone(), table, None, mask))


def test_every_token_is_drawn_as_often_as_it_is_likely(target):
    """200 uniforms, evenly spaced: counts are the probabilities to within one."""
    p = torch.tensor([0.1, 0.0, 0.25, 0.5, 0.05, 0.1])
    n = 200
    table = replace(batch(n), uniform=(torch.arange(n) + 0.5) / n)
    drawn = launch.sample(target, p.log().expand(n, 6).clone(), table, None, None)
    counts = torch.bincount(drawn, minlength=6)
    assert (counts - p * n).abs().max() <= 1.5 and counts[1] == 0


@pytest.mark.parametrize("likely", [(5, 77, 8500), (8500, 8600, 8999), (4095, 4096, 8191)])
def test_uniforms_at_the_ends_give_the_first_and_the_last_likely_token(target, likely):
    x = torch.full((2, 9000), -torch.inf)
    x[:, list(likely)] = 0.0
    table = replace(batch(2), uniform=torch.tensor([0.0, 1 - 2.0**-24]))
    assert launch.sample(target, x, table, None, None).tolist() == [likely[0], likely[-1]]


def test_rows_that_allow_nothing_give_some_id_of_the_vocabulary(target):
    x = torch.full((ROWS, 50), -torch.inf)
    table = batch(temperature=(1.0, 0.0), top_k=(3, 0), top_p=(1.0, 0.5))
    drawn = launch.sample(target, x, table, None, None)
    assert ((drawn >= 0) & (drawn < 50)).all()


def test_a_row_does_not_depend_on_its_neighbours_or_the_batch_flags(target):
    x = logits_of(ROWS, 1000)
    table = batch(temperature=(0.8, 0.0, 1.3))
    alone = launch.sample(target, x.clone(), table, None, None)
    flagged = replace(table, filtered=True)
    assert torch.equal(launch.sample(target, x.clone(), flagged, None, None), alone)


def test_sample_reads_rows_that_lie_apart(target):
    """Padding columns beyond the vocabulary are cut off by a view."""
    wide = torch.cat((logits_of(ROWS, 100), torch.full((ROWS, 28), 1e9)), 1)
    table = batch()
    drawn = launch.sample(target, wide.clone()[:, :100], table, None, None)
    assert torch.equal(drawn, reference.sample(wide[:, :100].clone(), table, None, None))


def test_sample_and_verify_of_no_rows_are_empty(target):
    assert launch.sample(target, torch.zeros(0, 9), batch(0), None, None).shape == (0,)
    none = torch.zeros(0, dtype=torch.int32)
    assert launch.verify(target, none.long(), none, none, none).shape == (0,)


@pytest.mark.parametrize("seed", range(6))
def test_verify_equals_the_reference_on_random_trees(target, seed):
    g = generator(seed)
    parent, depth = [], []
    for _ in range(8):  # chunks: a first row, then a tree of drafts
        first = len(parent)
        parent.append(-1)
        depth.append(0)
        for i in range(int(torch.randint(0, 7, (1,), generator=g))):
            up = first + int(torch.randint(0, i + 1, (1,), generator=g))
            parent.append(up)
            depth.append(depth[up] + 1)
    rows = len(parent)
    ids = torch.randint(0, 2, (rows,), generator=g)
    draft = torch.randint(0, 2, (rows,), generator=g).int()
    table = (torch.tensor(parent, dtype=torch.int32), draft, torch.tensor(depth).int())
    accepted = launch.verify(target, ids, *table)
    assert accepted.dtype == torch.bool
    assert torch.equal(accepted, reference.verify(ids, *table))
