"""From settings to an engine's parts."""

import gguf
import pytest

from bench.host import write_small_model
from tests.models import tiny
from xylite import host_memory, ops
from xylite.checkpoint import open_checkpoint
from xylite.config import EngineConfig
from xylite.errors import ConfigError
from xylite.models import layers, weights
from xylite.runtime.budgets import Pace
from xylite.runtime.build import build
from xylite.runtime.token_table import Tabulator
from xylite.runtime.trial_runs import TrialRuns


def parts(path, **settings):
    write_small_model(path)
    given = {"num_blocks": 8, "max_num_batched_tokens": 64, **settings}
    config = EngineConfig(model=str(path), load_format="dummy", **given)
    return build(config, open_checkpoint(str(path), with_weights=False), 49152)


def test_quantization_packs_the_weights_in_that_format(tmp_path):
    plain, packed = (
        weights.weight_bytes(parts(tmp_path, dtype="bfloat16", **s).executor.model.params)
        for s in ({}, {"quantization": "int8"})
    )
    assert packed < 0.75 * plain  # which may take 12 bits


def test_the_vocabulary_is_packed_in_8_bits_where_other_weights_take_4(tmp_path):
    params = parts(tmp_path, quantization="int4").executor.model.params
    assert params.embed.format.bits == 8
    layer = params.layers[0]
    assert {w.format.bits for w in (layer.qkv, layer.out, layer.gate_up, layer.down)} == {4}


def test_quantization_that_the_device_does_not_have_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="'awq' is not there on cpu .*int8"):
        parts(tmp_path, quantization="awq")


@pytest.mark.parametrize(
    "settings", [{}, {"dtype": "bfloat16"}, {"dtype": "float32"}, {"quantization": "int8"}]
)
def test_quantised_weights_of_a_file_are_kept_if_that_is_asked_for(settings, tmp_path, caplog):
    table = ops.load("cpu")
    assert table.stored_packers, "the CPU kernels are not built: is there a C++ compiler?"
    cfg = tiny.config()
    path = tmp_path / "m.gguf"
    tiny.save_gguf(path, cfg, tiny.tensors(cfg), gguf.GGMLQuantizationType.Q4_1)

    def weights_of(**settings):
        config = EngineConfig(
            model=str(path), device="cpu", num_blocks=2, max_num_batched_tokens=64, **settings
        )
        made = build(config, open_checkpoint(str(path)), cfg["vocab_size"])
        return weights.weight_bytes(made.executor.model.params)

    with caplog.at_level("INFO"):
        kept = weights_of(quantization="stored")
        assert "weights: Q4_1 (0 MiB) kept as stored" in caplog.messages
        caplog.clear()
        assert weights_of(**settings) > 1.3 * kept
        assert not any("kept" in m for m in caplog.messages)


def test_int8_kv_is_refused_where_no_kernel_reads_it(tmp_path):
    with pytest.raises(ConfigError, match="'int8' is not there on cpu .there is: auto") as e:
        parts(tmp_path, kv_cache_dtype="int8")
    assert e.value.param == "kv_cache_dtype"


def test_int8_kv_takes_the_memory_that_the_settings_say(tmp_path):
    plain, packed = (
        parts(tmp_path, device="reference", dtype="bfloat16", **s).config.kv_cache_memory_bytes
        for s in ({}, {"kv_cache_dtype": "int8"})
    )
    head = 32  # bytes of int8, and four of a scale
    assert packed / plain == (head + 4) / (2 * head)


def test_batch_invariance_is_refused_where_no_kernel_gives_it(tmp_path):
    with pytest.raises(ConfigError, match="batch_invariant"):
        parts(tmp_path, device="reference", batch_invariant=True)


@pytest.mark.parametrize(("head_dim", "fits"), [(64, True), (80, False), (100, False)])
def test_heads_that_the_kernels_do_not_take_are_said_once_and_not_batch_invariant(
    head_dim, fits, tmp_path, caplog
):
    cfg = tiny.config(head_dim=head_dim)
    path = tiny.save_directory(tmp_path / "model", cfg, tiny.tensors(cfg))

    def made(batch_invariant):
        config = EngineConfig(
            model=str(path),
            device="cpu",
            num_blocks=3,
            max_num_batched_tokens=64,
            batch_invariant=batch_invariant,
        )
        return build(config, open_checkpoint(str(path)), cfg["vocab_size"])

    with caplog.at_level("WARNING"):
        made(False)
    said = [m for m in caplog.messages if f"heads of {head_dim} elements" in m]
    assert len(said) == (0 if fits else 1)
    if fits:
        made(True)
        return
    with pytest.raises(ConfigError, match=rf"batch_invariant.*heads of {head_dim} elements") as e:
        made(True)
    assert e.value.param == "batch_invariant"


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_blocks", 10**7), ("num_blocks", 10**15), ("kv_cache_memory_bytes", 100 * 2**40)],
)
def test_more_kv_than_the_machine_can_hold_is_refused_by_name(tmp_path, name, value):
    with pytest.raises(ConfigError, match=f"^{name} asks for .* blocks fit at most") as e:
        parts(tmp_path, **{"num_blocks": None, name: value})
    assert e.value.param == name


@pytest.mark.parametrize(
    ("budget", "target", "made"),
    [
        (None, None, (992, 256, 40.0)),
        (None, 20.0, (992, 128, 20.0)),
        (None, 0.0, (992, 992, 0.0)),
        (64, None, (64, 64, 0.0)),
        (512, 20.0, (512, 128, 20.0)),
        (64, 20.0, (64, 64, 20.0)),
    ],
)
def test_budgets_follow_the_device_where_they_are_not_set(
    budget, target, made, tmp_path, monkeypatch
):
    monkeypatch.setattr(TrialRuns, "_pace", lambda _: Pace(0.0, 1e-4, 64))
    built = parts(tmp_path, max_num_batched_tokens=budget, target_itl_ms=target)
    assert (built.scheduler.budget, built.scheduler.mixed_budget) == made[:2]
    assert (built.config.max_num_batched_tokens, built.config.target_itl_ms) == (made[0], made[2])


def test_the_rotary_table_has_the_positions_that_the_cache_holds(tmp_path, monkeypatch):
    """A model for a million positions; nothing of that size is made on the way."""
    made = []
    table_of = layers.rope_table
    monkeypatch.setattr(
        layers, "rope_table", lambda rope, n, **more: made.append(n) or table_of(rope, n, **more)
    )
    cfg = tiny.config(max_position_embeddings=1 << 27)
    path = tiny.save_directory(tmp_path / "model", cfg, tiny.tensors(cfg))
    config = EngineConfig(
        model=str(path), num_blocks=3, block_size=64, max_num_batched_tokens=64,
        speculative_config={"method": "draft_model", "model": str(path)},
    )  # fmt: skip
    checkpoint = open_checkpoint(str(path))
    result = build(config, checkpoint, cfg["vocab_size"], checkpoint)
    assert result.limits.max_model_len == 192
    assert result.executor.model.params.rope.shape[0] == 192
    assert max(made) == 192


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 0.05, 1e9, float("inf")])
def test_the_measured_pace_stays_within_the_bounds_of_a_budget(seconds, tmp_path, monkeypatch):
    built = parts(tmp_path, num_blocks=64)
    trial = TrialRuns(built.executor, Tabulator(8, 64, 16), built.limits, 16)
    monkeypatch.setattr(TrialRuns, "_seconds", lambda self, n: n * 1e-4)
    assert (
        trial._pace().tokens_in(seconds)
        == min(max(int(min(seconds, 1e6) * 1e4), 64), 8192) // 16 * 16
    )


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"kv_cache_memory_bytes": 2**29, "num_blocks": None}, 1.0),
        ({"num_blocks": 8}, 1.0),
        ({"num_blocks": None}, None),
    ],
)
def test_kv_memory_asked_for_by_a_number_is_taken_whole_else_enough_for_a_start(
    settings, share, tmp_path, monkeypatch
):
    asked = []

    def taken(pieces, num_bytes):
        asked.append((pieces, num_bytes))
        yield

    monkeypatch.setattr(host_memory, "taken", taken)
    made = parts(tmp_path, **settings)
    next(made.chores)
    ((pieces, num_bytes),) = asked
    leaves = [x for layer in made.executor.kv for x in (layer.k, layer.v)]
    assert pieces == [(x.data_ptr(), x.nbytes) for x in leaves]
    size = sum(x.nbytes for x in leaves)
    assert num_bytes == (256 * 2**20 if share is None else share * size)
    assert size >= num_bytes


def test_passes_of_few_tokens_are_rehearsed_while_nothing_runs_and_store_nothing(tmp_path):
    made = parts(tmp_path, dtype="bfloat16", num_blocks=2)
    executor = made.executor
    assert executor.ops.idle_warm_up == tuple(range(1, 65))
    for leaf in (x for layer in executor.kv for x in (layer.k, layer.v)):
        leaf.fill_(0.5)
    list(made.chores)
    (passes,) = executor.ops.replayed._passes.values()
    assert {tokens for tokens, _ in passes.recorded} >= set(range(1, 65))
    for leaf in (x for layer in executor.kv for x in (layer.k, layer.v)):
        assert bool((leaf == 0.5).all())


def test_rehearsals_are_no_longer_than_a_sequence_may_be(tmp_path):
    made = parts(tmp_path, num_blocks=2, max_model_len=20)
    list(made.chores)
    (passes,) = made.executor.ops.replayed._passes.values()
    assert max(tokens for tokens, _ in passes.recorded) == 20
