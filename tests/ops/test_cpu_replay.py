"""Recorded passes of the CPU's table give what the passes themselves give, bit for bit."""

import dataclasses
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels_cpu.tables import Chunk, batch_of, make, names, tasks_of, token_table
from tests.ops.test_cpu_table import CONFIG, SCHEDULES, SIZE, TOKENS, Run
from xylite import tree
from xylite.kernels_cpu import replay
from xylite.models import layers
from xylite.ops import Batch, DenseKV, KVCache, Ops, reference


class Passes(Run):
    """A model on a table whose passes are replayed where they can be; counts the others."""

    def __init__(
        self, ops: Ops, dtype: torch.dtype, quantization: str | None = None, config: Any = CONFIG
    ):
        if quantization is not None:
            ops = dataclasses.replace(ops, pack_linear=ops.packers[quantization])
        super().__init__(ops, dtype, config)
        self.dtype = dtype
        self.num_run = 0

    def hidden(self, kv: KVCache, batch: Batch) -> tuple[Tensor, KVCache]:
        assert self.ops.replayed is not None
        return self.ops.replayed(self.forward, kv, batch)

    def forward(self, kv: KVCache, batch: Batch) -> tuple[Tensor, KVCache]:
        self.num_run += 1
        return self.family.forward(self.params, kv, batch, self.spec, self.ops)


def plainly(ops: Ops) -> Ops:
    """The table without replays."""
    return dataclasses.replace(ops, replayed=lambda forward, kv, batch: forward(kv, batch))


@pytest.mark.parametrize("isa", names())
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float16, None), (torch.float32, "int8")],
)
def test_replayed_passes_are_the_passes(
    isa: str, dtype: torch.dtype, quantization: str | None
) -> None:
    mine = Passes(make(isa), dtype, quantization)
    plain = Passes(plainly(make(isa)), dtype, quantization)
    for cuts in SCHEDULES:
        for neighbours in (0, 1, 3):
            assert torch.equal(mine.logits(cuts, neighbours), plain.logits(cuts, neighbours))
    assert mine.num_run < plain.num_run / 4, "most of the passes were to be replayed"


@pytest.mark.parametrize("isa", names())
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.bfloat16, "int8"),
    ],
)
def test_replays_that_fetch_the_next_layers_keys_are_the_passes(
    isa: str, dtype: torch.dtype, quantization: str | None
) -> None:
    """Linear layers of many decodes fetch meanwhile, in pieces of any length."""
    want, *found = decodes(Passes(make(isa), dtype, quantization), 47)
    assert all(torch.equal(hidden, want) for hidden in found)


@pytest.mark.parametrize("isa", names())
def test_replays_fetch_in_weights_of_all_forms(isa: str) -> None:
    """Compact weights are read two steps at a time; others, of an odd number of steps, may be
    between them: what is left to fetch must not fall between two steps."""
    ops = make(isa)

    def pack_linear(w: Tensor, gated: bool = False) -> Any:
        if w.shape[1] == 110:  # too many exponents for the compact form
            spread = torch.randint(-40, 1, w.shape, generator=torch.manual_seed(5))
            w = (w.float() * 2.0**spread).to(w.dtype)
        return ops.pack_linear(w, gated)

    config = {**CONFIG, "intermediate_size": 110}
    mixed = dataclasses.replace(ops, pack_linear=pack_linear)
    for num_seqs in (26, 32, 40):  # tiles of an odd number among them
        want, *found = decodes(Passes(mixed, torch.bfloat16, config=config), num_seqs)
        assert all(torch.equal(hidden, want) for hidden in found)


def decodes(mine: Passes, num_seqs: int) -> list[Tensor]:
    """Hidden states of one pass of so many decodes: computed, then recorded and replayed thrice."""
    pasts = (63, 64, 65, 100, 127, 128, 300, *range(num_seqs - 7))
    table = token_table([Chunk(past, 1) for past in pasts], SIZE)
    heads = (mine.spec.num_kv_heads, mine.spec.group)
    batch = batch_of(table, tasks_of(mine.ops, table, heads, 0, SIZE, 2))
    num_blocks = int(table.block_table.max()) + 1
    kv = layers.make_kv(mine.spec, num_blocks, SIZE, dtype=mine.dtype, device=torch.device("cpu"))
    generator = torch.manual_seed(3)
    for leaf in tree.leaves(kv):
        leaf.copy_(torch.randn(leaf.shape, generator=generator))
    hidden, kv = mine.forward(kv, batch)
    results = [hidden.clone()]
    for _ in range(3):
        hidden, kv = mine.hidden(kv, batch)
        results.append(hidden.clone())  # they last until the next pass
    assert mine.num_run == 2, "the pass was to be recorded once"
    return results


@pytest.mark.parametrize("isa", names())
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.bfloat16, "int8"),
        (torch.float64, None),
    ],
)
def test_last_tokens_asked_for_alone_are_those_of_the_whole_pass(
    isa: str, dtype: torch.dtype, quantization: str | None
) -> None:
    mine = Passes(make(isa), dtype, quantization)
    for _ in range(3):  # run, recorded, replayed
        for neighbours in (0, 3, 1):
            batch = mine.batch(0, 120, neighbours)
            whole, _ = mine.forward(mine.kv, batch)
            rows = whole[batch.q_start[1:].long() - 1]
            assert mine.hidden(mine.kv, batch)[0].shape == whole.shape
            asked = dataclasses.replace(batch, num_last=1 + neighbours)
            hidden, _ = mine.hidden(mine.kv, asked)
            exact = 0.0 if dtype is not torch.float64 else 1e-12  # float64 is torch's
            torch.testing.assert_close(hidden, rows, rtol=exact, atol=exact)


def test_what_outgrows_a_recording_is_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "LEAST_ROOM", 1)
    monkeypatch.setattr(replay, "_some_more", lambda n: max(n, 1))
    mine = Passes(make(names()[0]), torch.float32)
    plain = Passes(plainly(make(names()[0])), torch.float32)
    cuts = SCHEDULES[-1]
    assert torch.equal(mine.logits(cuts), plain.logits(cuts))
    assert 1 < mine.num_run < 20


def test_batches_that_outgrow_each_other_are_soon_recorded_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many sequences, and few long ones, in turns."""
    monkeypatch.setattr(replay, "LEAST_ROOM", 1)
    monkeypatch.setattr(replay, "_some_more", lambda n: max(n, 1))
    mine = Passes(make(names()[0]), torch.float32)
    many, long = mine.batch(0, 1, 5), mine.batch(130, 1, 0)
    for _ in range(2):
        for batch in (many, long):
            mine.hidden(mine.kv, batch)
    settled = mine.num_run
    for batch in (many, long, many, long):
        mine.hidden(mine.kv, batch)
    assert mine.num_run == settled


def test_a_pass_with_other_ops_is_not_replayed(caplog: pytest.LogCaptureFixture) -> None:
    """A product by torch would be lost in a replay."""
    ops = make(names()[0])

    def louder(x: Tensor, residual: Tensor | None, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out, total = make_norm(x, residual, w, eps)
        return out * 1.5, total

    make_norm = ops.add_rms_norm
    ops = dataclasses.replace(ops, add_rms_norm=louder)
    mine, plain = Passes(ops, torch.float32), Passes(plainly(ops), torch.float32)
    with caplog.at_level("INFO"):
        assert torch.equal(mine.logits([1, 2, 3, 4]), plain.logits([1, 2, 3, 4]))
    assert mine.num_run == 6, "once in vain, then each pass"
    assert "not replayed" in caplog.text
    assert "aten.mul" in caplog.text


def test_a_model_that_the_kernels_do_not_suit_runs_as_it_is() -> None:
    """Heads of 16 are left to the reference, which reads the batch in its own ways."""
    config = {**CONFIG, "head_dim": 16}
    mine = Passes(make(names()[0]), torch.float32, config=config)
    plain = Passes(plainly(make(names()[0])), torch.float32, config=config)
    for neighbours in (0, 3):
        cuts = SCHEDULES[3]
        assert torch.equal(mine.logits(cuts, neighbours), plain.logits(cuts, neighbours))


def test_models_and_caches_keep_their_own_recordings() -> None:
    ops = make(names()[0])
    one, two = Passes(ops, torch.float32), Passes(ops, torch.float32)
    two.params = dataclasses.replace(two.params, norm=two.params.norm * 2)
    cuts = SCHEDULES[-1]
    first, second = one.logits(cuts), two.logits(cuts)
    assert torch.equal(one.logits(cuts), first)
    assert torch.equal(two.logits(cuts), second)
    assert not torch.equal(first, second)
    one.kv = tuple(dataclasses.replace(leaf, k=leaf.k.clone(), v=leaf.v.clone()) for leaf in one.kv)
    assert torch.equal(one.logits(cuts), first)


def test_a_cache_of_another_shape_at_the_same_place_is_another() -> None:
    run = Passes(make(names()[0]), torch.float32)
    run.logits(SCHEDULES[-1])
    before = run.num_run
    run.kv = tuple(DenseKV(leaf.k[:7], leaf.v[:7]) for leaf in run.kv)
    run.logits([TOKENS - 1])
    assert run.num_run == before + 2


def test_functions_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is made for the call would be recorded at every call."""
    run = Passes(make(names()[0]), torch.float32)
    plain = Passes(plainly(make(names()[0])), torch.float32)
    recorded: list[Batch] = []
    record = replay.Replays._record

    def noted(self: replay.Replays, forward: Any, kv: KVCache, batch: Batch, arrays: Any) -> Any:
        recorded.append(batch)
        return record(self, forward, kv, batch, arrays)

    def hidden(kv: KVCache, batch: Batch) -> tuple[Tensor, KVCache]:
        assert run.ops.replayed is not None
        return run.ops.replayed(lambda kv, batch: run.forward(kv, batch), kv, batch)

    monkeypatch.setattr(replay.Replays, "_record", noted)
    run.hidden = hidden
    assert torch.equal(run.logits([1, 2, 3]), plain.logits([1, 2, 3]))
    assert recorded == []


class Disturbed(Passes):
    """Another thread has something computed in the midst of each pass."""

    def forward(self, kv: KVCache, batch: Batch) -> tuple[Tensor, KVCache]:
        with ThreadPoolExecutor(1) as other:
            assert other.submit(self.computes).result()
        return super().forward(kv, batch)

    def computes(self) -> bool:
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
        _, total = self.ops.add_rms_norm(x, x, torch.ones(64), 1e-5)
        act = self.ops.gated_act(x, "silu")
        return torch.equal(total, 2 * x) and torch.allclose(act, reference.gated_act(x, "silu"))


def test_what_other_threads_call_while_a_pass_is_recorded_is_computed() -> None:
    run = Disturbed(make(names()[0]), torch.float32)
    plain = Passes(plainly(make(names()[0])), torch.float32)
    cuts = SCHEDULES[-1]
    for _ in range(2):
        assert torch.equal(run.logits(cuts), plain.logits(cuts))
    assert run.num_run < 5


def test_recordings_go_with_their_model() -> None:
    ops = make(names()[0])
    run = Passes(ops, torch.float32)
    run.logits(SCHEDULES[-1])
    assert isinstance(ops.replayed, replay.Replays)
    assert len(ops.replayed._passes) == 1
    gone = weakref.ref(run)
    del run
    gc.collect()
    assert gone() is None
    assert len(ops.replayed._passes) == 0


def test_a_recording_keeps_no_more_memory_than_a_few_layers_need() -> None:
    buffers = replay._Buffers(7)
    for _ in range(100):
        x = buffers.empty((7, 33), torch.bfloat16)
        assert x.data_ptr() % replay.ALIGNMENT == 0
        assert x.shape == (7, 33)
        y = buffers.empty((7, 33), torch.bfloat16)
        assert x.data_ptr() != y.data_ptr()
        del x, y
    assert len(buffers._all) == 2


def test_recordings_for_any_number_of_last_tokens_share_their_memory() -> None:
    mine = Passes(make(names()[0]), torch.bfloat16)
    sizes = []
    for neighbours in range(1, 6):
        for tokens in (110, 117, 128):
            batch = mine.batch(0, tokens, neighbours)
            for _ in range(2):
                mine.hidden(mine.kv, dataclasses.replace(batch, num_last=1 + neighbours))
        (buffers,) = mine.ops.replayed._buffers.values()  # pyright: ignore[reportOptionalMemberAccess, reportFunctionMemberAccess]
        sizes.append(len(buffers._all))
    # 3 to 5 rows of 192 bytes take a kilobyte: such memory comes in powers of two.
    assert sizes[1] == sizes[2] == sizes[3]


def test_sizes_met_once_are_forgotten_after_many_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MAX_MET", 2)
    mine = Passes(make(names()[0]), torch.float32)
    for tokens in (100, 101, 102, 100, 102):
        mine.hidden(mine.kv, mine.batch(0, tokens, 0))
    (passes,) = mine.ops.replayed._passes.values()  # pyright: ignore[reportOptionalMemberAccess, reportFunctionMemberAccess]
    assert list(passes.recorded) == [(102, 0)]
    assert len(passes.met) == 2


def test_larger_passes_are_recorded_when_their_size_comes_again() -> None:
    mine = Passes(make(names()[0]), torch.float32)
    plain = Passes(plainly(make(names()[0])), torch.float32)
    assert TOKENS > 2 * replay.SMALL
    cuts = [replay.SMALL + 1]
    want = plain.logits(cuts)
    for runs in (2, 4, 4, 4):
        assert torch.equal(mine.logits(cuts), want)
        assert mine.num_run == runs, "as it is, then recorded, then replayed"
    # neighbours are other sequences in the same number of tokens
    want = plain.logits([replay.SMALL - 1], neighbours=2)
    assert torch.equal(mine.logits([replay.SMALL - 1], neighbours=2), want)
    assert mine.num_run == 5, "one of these sizes is new"


def test_passes_of_very_many_tokens_are_never_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MAX_TOKENS", TOKENS - 1)
    mine = Passes(make(names()[0]), torch.float32)
    for runs in (1, 2, 3):
        mine.logits([])
        assert mine.num_run == runs


def test_recordings_are_bounded_and_the_longest_unused_go(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Passes(make(names()[0]), torch.float32)
    plain = Passes(plainly(make(names()[0])), torch.float32)
    mine.logits([1, 3])
    (passes,) = mine.ops.replayed._passes.values()  # pyright: ignore[reportOptionalMemberAccess, reportFunctionMemberAccess]
    assert list(passes.recorded) == [(1, 0), (2, 0)]
    monkeypatch.setattr(replay, "MAX_BYTES", sum(r.calls.nbytes for r in passes.recorded.values()))
    mine.logits([1, 4])  # 1 is used again, 3 is new
    assert list(passes.recorded) == [(1, 0), (3, 0)]
    for cuts in SCHEDULES:
        assert torch.equal(mine.logits(cuts), plain.logits(cuts))
        assert len(passes.recorded) == 2


@pytest.mark.parametrize("isa", names())
def test_rows_that_are_not_finite_are_found(isa: str) -> None:
    ops = make(isa)
    for width in (1, 15, 16, 33, 64, 1000):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.randn(6, width, generator=torch.Generator().manual_seed(width)) * 1000
            x[1, width - 1], x[3, 0], x[4, width // 2] = torch.inf, torch.nan, -torch.inf
            x = x.to(dtype)
            assert ops.finite(x).tolist() == [True, False, True, False, False, True]
            assert torch.equal(ops.finite(x), reference.finite(x))
            assert torch.equal(ops.finite(x[:, : width // 2]), reference.finite(x[:, : width // 2]))
