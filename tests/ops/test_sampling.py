"""`sample`, `verify` and `logprobs` of the reference table."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from xylite.ops import SampleBatch, SamplerState
from xylite.ops.shared.sampling import logprobs, sample, verify

V = 50
NUCLEUS = ((3, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2), (10, 0.8, 0.05), (1, 0.5, 0))


def batch(rows: int, **changes: Any) -> SampleBatch:
    """Defaults for every row; a value in `changes` is one for all rows or a list."""
    integers = {"top_k": 0, "state_row": -1, "mask_row": -1}
    floats = {
        "temperature": 1.0,
        "top_p": 1.0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "uniform": 0.5,
    }
    made: dict[str, Any] = {}
    for defaults, dtype in ((integers, torch.int32), (floats, torch.float32)):
        for name, default in defaults.items():
            value = torch.as_tensor(changes.pop(name, default), dtype=dtype)
            made[name] = value.expand(rows).contiguous()
    for name in ("bias_row", "bias_token", "seen_row", "seen_token"):
        made[name] = torch.tensor(changes.pop(name, []), dtype=torch.int32)
    made["bias_value"] = torch.tensor(changes.pop("bias_value", []), dtype=torch.float32)
    penalties = (made["presence_penalty"] != 0) | (made["frequency_penalty"] != 0)
    penalties |= made["repetition_penalty"] != 1
    filters = (made["top_k"] > 0) | (made["top_p"] < 1) | (made["min_p"] > 0)
    made["penalised"] = changes.pop("penalised", bool(penalties.any()))
    made["filtered"] = changes.pop("filtered", bool(filters.any()))
    made["greedy"] = changes.pop("greedy", bool((made["temperature"] == 0).all()))
    assert not changes, changes
    return SampleBatch(**made)


def logits(rows: int, seed: int = 0, vocab: int = V) -> Tensor:
    return 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def draw_all(row: Tensor, n: int = 20000, **changes: Any) -> Tensor:
    """Shares of the tokens drawn from one row of logits over an even grid of n uniforms."""
    u = (torch.arange(n) + 0.5) / n
    ids = sample(row.expand(n, -1).clone(), batch(n, uniform=u, **changes), None, None)
    return torch.bincount(ids, minlength=row.shape[-1]) / n


def test_greedy_takes_the_largest_and_the_lowest_id_among_equals():
    x = torch.zeros(3, V)
    x[1, 7] = x[1, 9] = 2.0
    x[2, V - 1] = 1.0
    assert sample(x, batch(3, temperature=0.0), None, None).tolist() == [0, 7, V - 1]


def test_an_even_grid_of_uniforms_gives_the_softmax():
    row = logits(1)[0]
    torch.testing.assert_close(draw_all(row), row.softmax(-1), atol=1e-4, rtol=0)
    torch.testing.assert_close(
        draw_all(row, temperature=0.5), (row / 0.5).softmax(-1), atol=1e-4, rtol=0
    )


def test_random_uniforms_pass_a_chi_square_test():
    row = logits(1, seed=4)[0]
    n = 50000
    u = torch.rand(n, generator=torch.Generator().manual_seed(7))
    ids = sample(row.expand(n, -1).clone(), batch(n, uniform=u), None, None)
    expected = row.softmax(-1) * n
    counts = torch.bincount(ids, minlength=V)
    big = expected >= 5
    chi = ((counts - expected) ** 2 / expected)[big].sum()
    freedom = int(big.sum()) - 1
    assert chi < freedom + 4 * (2 * freedom) ** 0.5


def test_uniforms_at_both_ends_never_draw_what_has_no_probability():
    x = torch.full((4, V), -torch.inf)
    x[:, 10:13] = 0.0
    edge = float(np.nextafter(np.float32(1), np.float32(0)))
    got = sample(x, batch(4, uniform=[0.0, edge, 0.34, 0.0]), None, None)
    assert got.tolist() == [10, 12, 11, 10]


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-45])
def test_a_tiny_temperature_is_greedy_and_not_nan(temperature):
    x = logits(8)
    u = torch.linspace(0, 0.999, 8)
    got = sample(x.clone(), batch(8, temperature=temperature, uniform=u), None, None)
    assert torch.equal(got, x.argmax(-1))


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), NUCLEUS)
def test_filters_keep_the_sets_that_transformers_keeps(top_k, top_p, min_p):
    row = logits(1, seed=2)[0]
    expected = row[None] / 0.8
    if min_p:
        expected = transformers.MinPLogitsWarper(min_p)(None, expected)
    if top_k:
        expected = transformers.TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = transformers.TopPLogitsWarper(top_p)(None, expected)
    got = draw_all(row, temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)
    torch.testing.assert_close(got, expected[0].softmax(-1), atol=1e-4, rtol=0)
    assert torch.equal(got > 0, expected[0].softmax(-1) > 0)


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 0.999), (1200, 1.0), (1499, 0.9), (0, 0.3), (5000, 0.99)]
)
def test_a_cut_far_down_a_large_vocabulary_is_found(top_k, top_p):
    row = 0.1 * logits(1, vocab=1500)
    expected = row.double()
    if 0 < top_k < 1500:
        expected = transformers.TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = transformers.TopPLogitsWarper(top_p)(None, expected)
    # No token has less than half of an even share, so this grid meets each that is left.
    got = draw_all(row[0], n=3000, top_k=top_k, top_p=top_p) > 0
    wrong = got != (expected[0] > -torch.inf)
    assert wrong.sum() <= 1  # float32 sums may move the edge by one token


def test_a_filter_that_removes_nothing_changes_nothing_even_in_the_far_tail():
    row = -20 - torch.arange(2000) / 4000
    row[7] = 0.0  # what is left has about 3e-6 of the probability
    edge = float(np.nextafter(np.float32(1), np.float32(0)))
    u = [0.01, 0.5, 0.999998, edge]

    def draw(**changes: Any) -> list[int]:
        return sample(
            row.expand(4, -1).clone(), batch(4, uniform=u, **changes), None, None
        ).tolist()

    plain = draw()
    assert plain[:2] == [7, 7] and plain[2] != 7 and plain[3] > 1900
    for filters in ({"min_p": 1e-12}, {"top_k": 2000}, {"top_k": 5000, "filtered": True}):
        assert draw(**filters) == plain


def test_rows_that_allow_nothing_or_are_not_finite_harm_no_other():
    x = logits(5)
    alone = sample(x[4:].clone(), batch(1, top_k=5, top_p=0.9), None, None)
    x[0], x[1], x[2, 3], x[3, 4] = -torch.inf, torch.nan, torch.inf, torch.nan
    ids = sample(x, batch(5, top_k=5, top_p=0.9), None, None)
    assert ids[4] == alone[0] and ids.min() >= 0 and ids.max() < V


def test_top_p_keeps_the_best_token_however_small_and_ties_at_the_edge():
    row = torch.tensor([0.0, 3.0, 1.0, 3.0, 1.0])
    assert (draw_all(row, top_p=1e-6) > 0).tolist() == [False, True, False, True, False]
    assert (draw_all(row, top_k=3) > 0).tolist() == [False, True, True, True, True]
    assert (draw_all(row, top_k=2) > 0).tolist() == [False, True, False, True, False]


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_penalty_is_that_of_transformers_over_prompt_and_output(penalty):
    x = logits(2)
    prompt, output = [3, 5, 8, 8], [5, 20]
    state = SamplerState(torch.zeros(3, V, dtype=torch.bool), torch.zeros(3, V, dtype=torch.int32))
    state.in_prompt[2, prompt] = True
    for t in output:
        state.count[2, t] += 1
    process = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    expected = process(torch.tensor([prompt + output]), x[:1].clone())[0].softmax(-1)
    u = (torch.arange(20000) + 0.5) / 20000
    rows = x[:1].expand(20000, -1).clone()
    made = batch(20000, uniform=u, state_row=2, repetition_penalty=penalty)
    shares = torch.bincount(sample(rows, made, state, None), minlength=V) / 20000
    torch.testing.assert_close(shares, expected, atol=1e-4, rtol=0)


def test_presence_and_frequency_count_output_and_drafts_but_not_the_prompt():
    x = torch.zeros(4, V)
    state = SamplerState(torch.zeros(2, V, dtype=torch.bool), torch.zeros(2, V, dtype=torch.int32))
    state.in_prompt[1, 30] = True
    state.count[1, 11] = 3
    state.count[0, 11], state.in_prompt[0, 11] = 9, True  # another sequence's
    x[:, 30], x[:, 11], x[:, 12], x[:, 13] = 1.0, 4.2, 3.1, 2.0
    made = batch(
        4,
        temperature=0.0,
        state_row=[1, 1, 1, -1],
        frequency_penalty=[1.0, 0.5, 0.0, 1.0],
        presence_penalty=[0.0, 0.0, 2.0, 2.0],
        repetition_penalty=[1.0, 1.0, 1.0, 3.0],
        seen_row=[1, 1, 2, 3],
        seen_token=[12, 12, 12, 30],
    )
    # Row 0: 11 falls to 1.2. Row 1: 11 to 2.7, 12 to 2.1. Row 2: 11 to 2.2, 12 to 1.1. Row 3 has
    # no state, so nothing counts but its draft token 30, which it likes less now: 1.0 / 3 - 3.
    assert sample(x, made, state, None).tolist() == [12, 11, 11, 11]
    x = torch.zeros(1, V)
    x[0, 30], x[0, 11] = 1.0, 0.9
    made = batch(1, temperature=0.0, state_row=1, presence_penalty=2.0)
    assert sample(x, made, state, None).tolist() == [30]


def test_bias_forces_bans_and_adds_up():
    x = torch.zeros(3, V)
    x[:, 4] = 5.0
    made = batch(
        3,
        temperature=0.0,
        bias_row=[0, 1, 2, 2],
        bias_token=[9, 4, 4, 4],
        bias_value=[100.0, -torch.inf, 100.0, -torch.inf],
    )
    assert sample(x, made, None, None).tolist() == [9, 0, 0]


def test_mask_rows_allow_what_their_bits_say():
    allowed = [[0, 31, 32, 49], [33]]
    mask = torch.zeros(2, 2, dtype=torch.int32)
    for row, ids in enumerate(allowed):
        words = np.zeros(2, np.uint32)
        for t in ids:
            words[t // 32] |= np.uint32(1 << (t % 32))
        mask[row] = torch.from_numpy(words.view(np.int32))
    n = 2000
    u = (torch.arange(n) + 0.5) / n
    for row, ids in enumerate(allowed):
        got = sample(torch.zeros(n, V), batch(n, uniform=u, mask_row=row), None, mask)
        assert got.unique().tolist() == ids
    free = sample(torch.zeros(n, V), batch(n, uniform=u), None, mask)
    assert len(free.unique()) == V


def test_a_rows_token_does_not_depend_on_its_neighbours():
    n, vocab = 12, 3000
    x = logits(n, vocab=vocab)
    u = torch.rand(n, generator=torch.Generator().manual_seed(1)).tolist()
    per_row = {
        "temperature": [0.0, 1.0, 0.7, 1.5] * 3,
        "top_k": [0, 0, 5, 2000] * 3,
        "top_p": [1.0, 1.0, 0.9, 0.99, 1.0, 0.5] * 2,
        "min_p": [0.0] * 9 + [0.1] * 3,
        "repetition_penalty": [1.0, 1.0, 1.2] * 4,
        "presence_penalty": [0.0, 0.5] * 6,
        "state_row": [0, 1, -1, 0] * 3,
    }
    generator = torch.Generator().manual_seed(3)
    state = SamplerState(
        torch.rand(2, vocab, generator=generator) < 0.3,
        torch.randint(0, 3, (2, vocab), generator=generator, dtype=torch.int32),
    )
    together = sample(x.clone(), batch(n, uniform=u, **per_row), state, None)
    alone = [
        sample(
            x[i : i + 1].clone(),
            batch(1, uniform=u[i], **{k: v[i] for k, v in per_row.items()}),
            state,
            None,
        ).item()
        for i in range(n)
    ]
    assert together.tolist() == alone


def test_batch_flags_change_no_bit_of_a_plain_row():
    n = 4000
    x = 0.01 * logits(n, vocab=300)  # nearly flat: any change in a sum would move some token
    u = torch.rand(n, generator=torch.Generator().manual_seed(2))
    state = SamplerState(torch.ones(1, 300, dtype=torch.bool), torch.ones(1, 300).int())
    plain = sample(x.clone(), batch(n, uniform=u), None, None)
    loud = batch(n, uniform=u, penalised=True, filtered=True, greedy=False)
    assert torch.equal(sample(x.clone(), loud, state, torch.zeros(1, 10).int()), plain)


@pytest.mark.parametrize("flags", [False, True])
def test_no_rows_are_ordinary(flags):
    made = batch(0, penalised=flags, filtered=flags, greedy=False)
    state = SamplerState(torch.zeros(1, V, dtype=torch.bool), torch.zeros(1, V).int())
    assert sample(torch.zeros(0, V), made, state, torch.zeros(1, 2).int()).shape == (0,)


def test_half_precision_logits_are_sampled_in_float32():
    x = logits(1).bfloat16()
    u = (torch.arange(20000) + 0.5) / 20000
    ids = sample(x.expand(20000, -1).clone(), batch(20000, uniform=u), None, None)
    shares = torch.bincount(ids, minlength=V) / 20000
    torch.testing.assert_close(shares, x[0].float().softmax(-1), atol=1e-4, rtol=0)


def test_columns_cut_off_by_a_slice_never_come_out():
    x = torch.zeros(2000, V + 14)
    x[:, V:] = 100.0
    u = (torch.arange(2000) + 0.5) / 2000
    assert sample(x[:, :V], batch(2000, uniform=u), None, None).max() == V - 1


def verified(ids: list[int], parent: list[int], token: list[int], depth: list[int]) -> list[bool]:
    return verify(
        *(torch.tensor(a, dtype=torch.int32) for a in (ids, parent, token, depth))
    ).tolist()


def test_a_chain_is_accepted_up_to_its_first_wrong_token():
    assert verified([5, 6, 9, 8], [-1, 0, 1, 2], [-1, 5, 6, 7], [0, 1, 2, 3]) == [
        True,
        True,
        True,
        False,
    ]
    # A right token after a wrong one does not count.
    assert verified([5, 1, 7, 8], [-1, 0, 1, 2], [-1, 4, 1, 7], [0, 1, 2, 3]) == [
        True,
        False,
        False,
        False,
    ]


def test_of_a_tree_the_drawn_path_is_accepted_and_chunks_do_not_mix():
    #   row 0: plain decode. rows 1..5: 2 and 3 follow 1, 4 follows 2, 5 follows 3
    ids = [3, 20, 30, 31, 40, 41]
    parent = [-1, -1, 1, 1, 2, 3]
    token = [-1, -1, 19, 20, 30, 31]
    depth = [0, 0, 1, 1, 2, 2]
    assert verified(ids, parent, token, depth) == [True, True, False, True, False, True]


def test_verify_of_no_rows_is_empty():
    assert verified([], [], [], []) == []


def test_logprobs_are_those_of_the_softmax_and_chosen_equals_its_place_in_the_top():
    x = logits(6, seed=9)
    ids = x.argmax(-1)
    ids[3] = int(x[3].argmin())
    chosen, top_ids, top, rank = logprobs(x, ids, 4)
    expected = x.double().log_softmax(-1)
    torch.testing.assert_close(top.double(), expected.topk(4).values)
    assert torch.equal(top_ids.long(), expected.topk(4).indices)
    torch.testing.assert_close(chosen.double(), expected.gather(1, ids[:, None])[:, 0])
    assert torch.equal(chosen[:3], top[:3, 0])
    assert chosen.dtype == top.dtype == torch.float32 and top_ids.dtype == torch.int32
    assert rank.tolist() == [1, 1, 1, V, 1, 1] and rank.dtype == torch.int32
    assert logprobs(x, ids, 0)[2].shape == (6, 0)
    assert logprobs(x, ids, 99)[2].shape == (6, V)
    assert logprobs(x[:0], ids[:0], 3)[2].shape == (0, 3)


def test_rank_of_a_token_counts_those_as_likely_as_it():
    x = torch.tensor([[5.0, 1.0, 1.0, 4.0, 1.0, 0.0]])
    assert [int(logprobs(x, torch.tensor([i]), 2)[3]) for i in range(6)] == [1, 5, 5, 2, 5, 6]
