"""The compiled programs of sampling, penalties and verification, executed by the emulator."""

import numpy as np
import pytest

from tests.ascend.compiler import Program, compile_kernel
from tests.ascend.emulator import launch
from tests.kernels_triton.compile_cases import pointers
from xylite.kernels_triton.sampling import penalise, sample, verify

both = pytest.mark.parametrize("generation", ["1.1.0", "1.2.0"])
V = 3000


def compiled(kernel, signature, constants, generation) -> Program:
    program = compile_kernel(kernel, signature, constants, generation=generation)
    assert program.ok, program
    return program


def kept(x, floor, top_k, top_p):
    """Weights in float64 of scaled logits (maximum 0) after min_p, top_k and top_p."""
    weight = np.exp(x.astype(np.float64))
    weight[x < floor] = 0
    if 0 < top_k < len(x):
        weight[x < np.sort(np.where(weight > 0, x, -np.inf))[-top_k]] = 0
    if top_p < 1:
        share = np.sort(weight)[::-1] / weight.sum()
        last = share[np.cumsum(share) - share < top_p][-1]
        weight[weight / weight.sum() < last] = 0
    return weight


@both
@pytest.mark.parametrize("mode", ["greedy", "random", "filtered"])
def test_compiled_sampling_draws_the_right_tokens(mode, generation):
    program = compiled(
        sample,
        pointers(
            logits="fp32", temperature="fp32", top_k="i32", top_p="fp32", floor="fp32",
            uniform="fp32", ids="i32", rows="i32",
        ),
        {
            "V": V, "PITCH": V + 8, "TILE_V": 1024, "TILE_S": 256, "GREEDY": mode == "greedy",
            "FILTERED": mode == "filtered",
        },
        generation,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    temperature = np.array([1, 0.7, 0, 1, 1.3, 1, 1, 0.01], np.float32)
    top_k = np.array([0, 5, 0, 50, 40, 0, V + 1, 1], np.int32)
    top_p = np.array([1, 0.9, 1, 1, 0.9, 0.5, 1, 0.001], np.float32)
    floor = np.log(np.array([0, 0.05, 0, 0, 0.05, 0, 0.5, 0], np.float32) + 1e-45)
    floor = np.where(floor < -90, -np.inf, floor).astype(np.float32)
    rows = len(temperature)
    logits = (rng.standard_normal((rows, V + 8)) * 3).astype(np.float32)
    logits[:, : V // 2] = logits[:, : V // 2].round()
    logits[:, V:] = 100
    uniform, ids = rng.random(rows).astype(np.float32), np.full(rows + 1, -7, np.int32)
    args = [logits, temperature, top_k, top_p, floor, uniform, ids, np.array([rows], np.int32)]
    assert not launch(program.hivm, args, 3).leftover
    for i, row in enumerate(logits[:, :V]):
        if mode == "greedy" or temperature[i] == 0:
            assert ids[i] == row.argmax()
            continue
        x = (row - row.max()) / temperature[i]
        weight = np.exp(x.astype(np.float64))
        if mode == "filtered":
            weight = kept(x, floor[i], top_k[i], top_p[i])
        mass = np.cumsum(weight)
        assert ids[i] == (mass <= uniform[i] * mass[-1]).sum(), i
    assert ids[rows] == -7


@both
def test_compiled_penalties_equal_float64(generation):
    program = compiled(
        penalise,
        pointers(
            logits="fp32", count="i32", prompt="i8", repetition="fp32", frequency="fp32",
            presence="fp32", rows="i32",
        ),
        {"V": 300, "PITCH": 304, "TILE_V": 128},
        generation,
    )  # fmt: skip
    rng, rows = np.random.default_rng(1), 4
    logits = rng.standard_normal((rows + 1, 304)).astype(np.float32)
    before = logits.copy()
    counts = rng.integers(0, 3, (rows, 300)).astype(np.int32)
    prompt = rng.integers(0, 2, (rows, 300)).astype(np.int8)
    repetition = np.array([1, 1.3, 0.8, 2], np.float32)
    frequency = np.array([0, 0.3, -0.1, 0.5], np.float32)
    presence = np.array([0, 0.5, -1, 0], np.float32)
    args = [logits, counts, prompt, repetition, frequency, presence, np.array([rows], np.int32)]
    assert not launch(program.hivm, args, 3).leftover
    x, r = before[:rows, :300].astype(np.float64), repetition[:, None].astype(np.float64)
    exact = np.where((counts > 0) | (prompt > 0), np.where(x > 0, x / r, x * r), x)
    exact -= frequency[:, None] * counts + presence[:, None] * (counts > 0)
    assert np.abs(logits[:rows, :300] - exact).max() < 1e-6
    assert (logits[rows:] == before[rows:]).all() and (logits[:, 300:] == before[:, 300:]).all()


@both
def test_compiled_verification_walks_the_ancestors(generation):
    program = compiled(
        verify,
        pointers(**dict.fromkeys(("ids", "parent", "draft_token", "accepted", "rows"), "i32")),
        {},
        generation,
    )
    parent = np.array([-1, 0, 1, 1, 2, -1, 5, 5, 7], np.int32)
    ids = np.array([7, 8, 9, 1, 2, 3, 4, 6, 0], np.int32)
    draft = np.array([0, 7, 8, 3, 9, 0, 2, 3, 6], np.int32)
    accepted = np.full(10, -1, np.int32)
    args = [ids, parent, draft, accepted, np.array([9], np.int32)]
    assert not launch(program.hivm, args, 2).leftover
    assert accepted.tolist() == [1, 1, 1, 0, 1, 1, 0, 1, 1, -1]
