"""Llama against transformers, under any schedule."""

import math
import random
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.models import tiny
from tests.models.driver import Chunk, Driver, random_schedule
from xylite import models, ops, tree
from xylite.checkpoint import open_checkpoint
from xylite.models import layers, weights
from xylite.models.spec import Rope

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
YARN_FULL = {**YARN, "beta_fast": 8.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.3}

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "every head its own": {"num_key_value_heads": 4},
    "groups of three, tied": {
        "hidden_size": 48,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "groups of four": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "wide heads": {"head_dim": 32},
    "narrow heads": {"head_dim": 6},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3": {"rope_scaling": LLAMA3},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "yarn": {"rope_scaling": YARN},
    "yarn with everything": {"rope_scaling": YARN_FULL},
    "yarn untruncated": {"rope_scaling": {**YARN, "truncate": False, "attention_factor": 1.3}},
    "dynamic within its length": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "new rope_parameters": {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    },
}


def transformers_model(cfg: dict[str, Any], state: dict[str, Tensor]) -> Any:
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**cfg, attn_implementation="eager")
    )
    missing, surplus = model.load_state_dict(state, strict=False)
    assert not surplus and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


def expected_logits(model: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def loaded(path: Any, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Any, ops.Ops]:
    checkpoint = open_checkpoint(str(path))
    family, spec = models.describe(checkpoint.config)
    table = ops.load("reference")
    return weights.load(checkpoint, spec, family, table, dtype), spec, family, table


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_greedy_ids_equal_transformers_under_random_schedules(shape, tmp_path):
    cfg = tiny.config(**SHAPES[shape])
    state = tiny.tensors(cfg)
    params, spec, family, table = loaded(tiny.save_directory(tmp_path, cfg, state))
    model = transformers_model(cfg, state)
    rng = random.Random(shape)
    prompts = [[rng.randrange(spec.vocab_size) for _ in range(n)] for n in (1, 4, 23, 61)]
    expected = [expected_logits(model, p) for p in prompts]
    for seed in range(3):
        driver = Driver(params, spec, family, table, prompts, seed=seed)
        got = driver.run(random_schedule(random.Random(seed), [len(p) for p in prompts]))
        for g, e in zip(got, expected, strict=True):
            torch.testing.assert_close(g, e, atol=2e-4, rtol=1e-4)
            assert torch.equal(g.argmax(-1), e.argmax(-1))


def test_a_draft_tree_gives_what_each_of_its_paths_gives_alone(tmp_path):
    cfg = tiny.config()
    params, spec, family, table = loaded(tiny.save_directory(tmp_path, cfg, tiny.tensors(cfg)))
    prompt, draft = [5, 9, 33, 71, 2], [11, 12, 13, 14, 15, 16]
    parents = (-1, 0, -1, 1, 0, 2)
    other = [7, 8, 9]
    driver = Driver(params, spec, family, table, [prompt + draft, other])
    driver.step([Chunk(0, 0, 4)])
    rows = driver.step([Chunk(1, 0, 3), Chunk(0, 4, 7, parents)])[3:]
    for i in range(-1, len(draft)):
        path, at = [], i
        while at >= 0:
            path.insert(0, draft[at])
            at = parents[at]
        alone = Driver(params, spec, family, table, [prompt + path], seed=3)
        expected = alone.run([[Chunk(0, 0, len(prompt) + len(path))]])[0][-1]
        torch.testing.assert_close(rows[1 + i], expected, atol=1e-5, rtol=1e-5)


def test_rotary_tables_are_the_same_made_in_slices(monkeypatch):
    rope = Rope(theta=1e4, rot=16)
    whole = layers.rope_table(rope, 100)
    monkeypatch.setattr(layers, "ROPE_SLICE", 7)
    assert torch.equal(layers.rope_table(rope, 100), whole)
    assert whole[0].tolist() == [[1.0] * 8, [0.0] * 8]
    angle = 99 * 1e4 ** (-1 / 8)
    expected = torch.tensor([math.cos(angle), math.sin(angle)])
    torch.testing.assert_close(whole[99, :, 1], expected)


def test_dynamic_scaling_beyond_the_models_length_is_that_of_the_longest_position():
    cfg = tiny.config(rope_scaling={"type": "dynamic", "factor": 2.0})
    _, spec = models.describe(cfg)
    ours = layers.rope_table(spec.rope, 300, max_position=spec.max_position)
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(
        transformers.LlamaConfig(**cfg)
    )
    cos, sin = theirs(torch.zeros(1, dtype=torch.float32), torch.arange(300)[None])
    torch.testing.assert_close(ours[:, 0], cos[0, :, : spec.rope.rot // 2])
    torch.testing.assert_close(ours[:, 1], sin[0, :, : spec.rope.rot // 2])


def test_low_precision_stays_near_float64():
    cfg = tiny.config()
    family, spec = models.describe(cfg)
    table = ops.load("reference")
    exact = weights.random_params(spec, family, table, torch.bfloat16, seed=1)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]

    def run(params: Any, dtype: torch.dtype) -> Tensor:
        driver = Driver(params, spec, family, table, [ids], dtype=dtype)
        return driver.run([[Chunk(0, 0, 5)], [Chunk(0, 5, 3)]])[0]

    double = run(tree.map(lambda t: t.double(), exact), torch.float64)
    assert double.dtype == torch.float32
    single = run(tree.map(lambda t: t.float(), exact), torch.float32)
    half = run(exact, torch.bfloat16)
    assert (single - double).abs().max() < 1e-5
    assert 1e-4 < (half - double).abs().max() < 0.1


def test_random_params_depend_on_the_seed_alone():
    family, spec = models.describe(tiny.config(tie_word_embeddings=True))
    table = ops.load("reference")
    made = [weights.random_params(spec, family, table, torch.float32, s) for s in (1, 1, 2)]
    a, b, c = (dict(tree.named_leaves(m)) for m in made)
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["layers.0.qkv"], c["layers.0.qkv"])
    shapes = dict(tree.named_leaves(family.abstract(spec)))
    assert {n: t.shape for n, t in a.items() if n != "rope"} == {
        n: leaf.shape for n, leaf in shapes.items()
    }
    assert "head" not in a
    assert weights.weight_bytes(made[0]) == sum(t.nbytes for t in a.values())
