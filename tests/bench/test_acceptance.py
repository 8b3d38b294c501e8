"""bench.acceptance: the chances themselves."""

import pytest
import torch

from bench.acceptance import chances, filtered


def rows(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


@pytest.mark.parametrize(
    ("p", "q", "here", "residual"),
    [
        ((0.5, 0.5), (0.5, 0.5), 1.0, 1.0),
        ((1.0, 0.0), (0.0, 1.0), 0.0, 0.0),
        ((0.5, 0.5), (0.25, 0.75), 0.75, 0.75),
        # The middle token has the same probability in both, but lies elsewhere.
        ((0.1, 0.1, 0.8), (0.2, 0.1, 0.7), 0.8, 0.9),
    ],
)
def test_shared_uniforms_accept_what_lies_at_the_same_place(p, q, here, residual):
    found = chances(rows(*p), rows(*q))
    assert found[:2] == pytest.approx((here, residual))
    assert (found[2] == 1.0) == (p == q)


def test_shared_noise_accepts_nearly_as_much_as_can_be():
    p, q = (torch.tensor(x, dtype=torch.float64).repeat(4000, 1) for x in ((0.6, 0.4), (0.5, 0.5)))
    _, residual, noise = chances(p, q)
    # Two tokens: 1 / (1 + sum over the other of its larger ratio), for each of them.
    assert residual == pytest.approx(0.9)
    assert noise == pytest.approx(1 / (1 + 1.0) + 1 / (1 + 0.6 / 0.4), abs=0.01)


def test_filters_keep_the_best_and_what_is_left_sums_to_one():
    p = rows(0.1, 0.5, 0.15, 0.25)
    assert filtered(p, 2, 1.0)[0].tolist() == pytest.approx([0, 2 / 3, 0, 1 / 3])
    assert filtered(p, 4, 0.6)[0].tolist() == pytest.approx([0, 2 / 3, 0, 1 / 3])
