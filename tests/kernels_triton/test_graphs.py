"""Forward passes recorded by bucket of tokens: a graph here is one whose replay runs the pass
again, over the recording's own arrays, which are larger than the batch."""

from tests.kernels_triton.stand_in import stand_in  # isort: skip  (chooses the interpreter)

import logging
from dataclasses import dataclass, field

import pytest
import torch

from tests.kernels_triton.tiny_run import all_tokens, driver
from xylite import tree
from xylite.kernels_triton.graphs import Graphs
from xylite.kernels_triton.launch import Counts


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_replayed_passes_give_the_tokens_of_the_reference(
    kind, checkpoint, expected, monkeypatch, caplog
):
    with caplog.at_level(logging.INFO, "xylite.kernels_triton.graphs"):
        made = driver(stand_in(kind, capture=lambda run: run), checkpoint, monkeypatch)
        made.run()
    assert all_tokens(made) == expected
    said = [r.getMessage() for r in caplog.records if r.name == "xylite.kernels_triton.graphs"]
    # The warm-up records both buckets and runs one size more.
    assert said == [
        "recorded the forward pass for up to 4 tokens",
        "recorded the forward pass for up to 24 tokens",
        "forward passes are not replayed beyond 24 tokens",
    ]


@tree.node
class Tables:
    tasks: torch.Tensor
    core_start: torch.Tensor


@tree.node
class SmallBatch:
    tokens: torch.Tensor
    block_table: torch.Tensor
    tree_mask: torch.Tensor
    tasks: tuple[Tables, ...]


def small_batch(tokens: int, blocks: int = 2, tasks: int = 3, trees: int = 0) -> SmallBatch:
    return SmallBatch(
        torch.arange(1, tokens + 1, dtype=torch.int32),
        torch.full((1, blocks), blocks, dtype=torch.int32),
        torch.zeros(trees, dtype=torch.bool),
        (Tables(torch.full((tasks, 2), tasks, dtype=torch.int32), torch.tensor([0, tasks])),),
    )


@dataclass
class Pass:
    """A pass that sums what it is given; its shapes are those of the recording."""

    counts: Counts
    shapes: list = field(default_factory=list)

    def __call__(self, kv, batch):
        told = int(self.counts(batch.tokens.shape[0]))
        self.shapes.append((batch.tokens.shape[0], batch.block_table.shape[1], told))
        end = int(batch.tasks[0].core_start[1])
        extra = batch.tasks[0].tasks[:end].sum() + batch.block_table[0, 0]
        return (batch.tokens + extra)[:, None].float(), kv


@pytest.fixture
def setup():
    counts = Counts(torch.device("cpu"))
    captures = []

    def capture(run):
        captures.append(run)
        run()
        return run

    return Pass(counts), Graphs(counts, capture, buckets=(4, 16)), captures


def answer(batch: SmallBatch) -> torch.Tensor:
    return Pass(Counts(torch.device("cpu")))(None, batch)[0]


def test_one_recording_serves_every_batch_of_its_bucket(setup):
    forward, graphs, captures = setup
    kv = (torch.zeros(1),)
    for tokens, blocks, tasks in ((3, 2, 3), (4, 1, 7), (1, 60, 64), (2, 2, 1)):
        batch = small_batch(tokens, blocks, tasks)
        hidden, same = graphs(forward, kv, batch)
        assert torch.equal(hidden, answer(batch)) and same is kv
    assert len(captures) == 1
    assert {(t, b) for t, b, _ in forward.shapes} == {(4, 64)}
    assert [told for *_, told in forward.shapes[1:]] == [3, 4, 1, 2]


def test_a_bucket_is_recorded_anew_when_tasks_or_blocks_outgrow_it(setup):
    forward, graphs, captures = setup
    kv = (torch.zeros(1),)
    for batch in (small_batch(3), small_batch(3, tasks=65), small_batch(3, blocks=100)):
        assert torch.equal(graphs(forward, kv, batch)[0], answer(batch))
    assert len(captures) == 3


def test_another_cache_discards_all_recordings(setup):
    forward, graphs, captures = setup
    first, second = (torch.zeros(1),), (torch.zeros(1),)
    for kv in (first, tuple(first), second):
        graphs(forward, kv, small_batch(3))
    assert len(captures) == 2


def test_results_are_not_overwritten_by_the_next_replay(setup):
    forward, graphs, _ = setup
    kv = (torch.zeros(1),)
    hidden, _ = graphs(forward, kv, small_batch(3))
    before = hidden.clone()
    graphs(forward, kv, small_batch(3, tasks=9))
    assert torch.equal(hidden, before)


@pytest.mark.parametrize(
    "batch, reason",
    [
        (small_batch(0), "without tokens"),
        (small_batch(17), "beyond 16 tokens"),
        (small_batch(3, trees=4), "with draft trees"),
    ],
)
def test_what_cannot_be_replayed_runs_directly_and_says_why_once(setup, caplog, batch, reason):
    forward, graphs, captures = setup
    with caplog.at_level(logging.INFO, "xylite.kernels_triton.graphs"):
        for _ in range(2):
            assert torch.equal(graphs(forward, (torch.zeros(1),), batch)[0], answer(batch))
    assert not captures
    said = [r.getMessage() for r in caplog.records]
    assert said == [f"forward passes are not replayed {reason}"]


def test_a_device_that_cannot_record_is_served_directly(caplog):
    counts = Counts(torch.device("cpu"))

    def capture(run):
        raise RuntimeError("operation not permitted when stream is capturing")

    forward, graphs = Pass(counts), Graphs(counts, capture)
    with caplog.at_level(logging.INFO, "xylite.kernels_triton.graphs"):
        for _ in range(2):
            batch = small_batch(3)
            assert torch.equal(graphs(forward, (torch.zeros(1),), batch)[0], answer(batch))
    assert "recording one failed (operation not permitted" in caplog.text
    assert len(caplog.records) == 1
