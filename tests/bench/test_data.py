"""What `bench serve` sends and when."""

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

from xylite.bench.client import Target, request_body
from xylite.bench.data import (
    FIRST_ID,
    Item,
    arrivals,
    as_text,
    backwards,
    cut,
    random_items,
    read_trace,
    read_workload,
)
from xylite.errors import ConfigError

TRACES = Path(__file__).parent.parent.parent / "bench" / "traces"


def make(seed: int = 0, **changes: float) -> list[Item]:
    options = {"input_len": 100, "output_len": 20, "range_ratio": 0.0, "prefix_len": 0}
    return random_items(50, random.Random(seed), **{**options, "vocab_size": 1000, **changes})


def test_random_requests_have_the_asked_lengths_and_repeat_with_the_seed():
    items = make()
    assert {(len(i.prompt), i.max_tokens) for i in items} == {(100, 20)}
    assert all(FIRST_ID <= t < 1000 for i in items for t in i.prompt)
    assert items == make()
    assert items != make(seed=1)


def test_random_lengths_stay_in_their_range_and_use_it():
    lengths = {len(i.prompt) for i in make(range_ratio=0.5)}
    assert min(lengths) >= 50
    assert max(lengths) <= 150
    assert len(lengths) > 20


def test_random_requests_share_the_prefix_and_nothing_else():
    prompts = [i.prompt for i in make(prefix_len=32)]
    assert len({p[:32] for p in prompts}) == 1
    assert len({p[32:36] for p in prompts}) == len(prompts)


def test_a_workload_file_gives_prefix_and_own_ids(tmp_path: Path):
    file = tmp_path / "w.jsonl"
    rows = [
        {"workload": "w", "prefixes": {"p": [1, 2]}},
        {"id": 0, "prefix": "p", "ids": [3], "max_tokens": 5, "arrival": 0.5},
        {"id": 1, "prefix": None, "ids": [4], "max_tokens": 6, "arrival": 1.5},
        {"prompt": "text", "output_tokens": 7},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert read_workload(file) == [
        Item((1, 2, 3), 5, 0.5),
        Item((4,), 6, 1.5),
        Item("text", 7),
    ]


def test_texts_for_drafts_are_read_whole_and_chats_with_their_messages(tmp_path: Path):
    text = (TRACES / "speculation.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    items = read_workload(TRACES / "speculation.jsonl")
    assert len(items) == len(rows)
    for row, item in zip(rows, items, strict=True):
        assert list(item.messages) == row.get("messages", [])
        assert item.prompt == row.get("prompt", row.get("messages", [{}])[-1].get("content"))
    target = Target(url="", backend="openai-chat", model="m", headers={}, body={})
    assert request_body(target, items[-1])["messages"] == items[-1].messages
    assert request_body(target, items[0])["messages"][0]["content"] == items[0].prompt
    file = tmp_path / "w.jsonl"
    file.write_text('{"messages": []}')
    with pytest.raises(ConfigError, match=r"request 1: IndexError"):
        read_workload(file)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no requests"),
        ("{", "line 1"),
        ("[1]", "line 1: an object"),
        ('{"prompt": "a"}\n{"max_tokens": 3}', "request 2: KeyError: 'prompt'"),
        ('{"workload": "w", "prefixes": {}}\n{"prefix": "p", "ids": []}', "'p'"),
        ('{"prompt": "a", "max_tokens": "x"}', "request 1"),
        ('{"prompt": 5}', "request 1: TypeError"),
        ('{"prompt": "a"}\n{"ids": null}', "request 2: TypeError"),
        ("[" * 100_000, "line 1: "),
        ('{"prompt": "\u00e4"}', "is not UTF-8 text"),
    ],
)
def test_a_broken_workload_file_is_named_with_the_line(tmp_path: Path, text: str, said: str):
    file = tmp_path / "w.jsonl"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"w\.jsonl") as e:
        read_workload(file)
    assert said in e.value.message


@pytest.mark.parametrize("name", ["nothing.jsonl", "nothing.csv"])
def test_a_missing_file_is_named(tmp_path: Path, name: str):
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / name, random.Random(0), 1000)


def test_traces_keep_recorded_lengths_and_times():
    items = read_trace(TRACES / "azure2023_conv_500.csv", random.Random(0), 1000)
    assert len(items) == 500
    assert [(len(i.prompt), i.max_tokens, i.arrival_s) for i in items[:2]] == [
        (374, 44, 0.0),
        (396, 109, 4.315),
    ]


def test_prompts_share_as_many_tokens_as_the_trace_says_blocks():
    items = read_trace(TRACES / "mooncake_conversation_200.jsonl", random.Random(0), 50000)
    first, second = items[0].prompt, items[1].prompt
    assert (len(first), len(second)) == (6758, 7322)
    assert first[:512] == second[:512]
    assert first[512:520] != second[512:520]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("t.csv", "a,b\n1,2\n", "is not a trace"),
        ("t.csv", "arrival_ms,input_tokens,output_tokens\n1,2\n", "is not a trace"),
        ("t.csv", "arrival_ms,input_tokens,output_tokens\n1,2," + "3" * 200_000, "is not a trace"),
        ("t.csv", "arrival_ms,input_tokens,output_tokens\n1,0,3\n", "has no requests"),
        ("t.jsonl", '{"timestamp": null, "input_length": 5, "output_length": 3}', "is not a trace"),
        ("t.jsonl", '{"timestamp": 1, "input_length": 5, "output_length": []}', "is not a trace"),
        (
            "t.jsonl",
            '{"timestamp": 1, "input_length": 5, "output_length": 3, "hash_ids": 5}',
            "is not a trace",
        ),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, name: str, text: str, said: str):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_trace(file, random.Random(0), 1000)


def test_committed_workloads_are_what_their_headers_say():
    for name in ("chat", "rag", "agent"):
        head = json.loads((TRACES / f"{name}.jsonl").read_text().partition("\n")[0])
        items = read_workload(TRACES / f"{name}.jsonl")
        assert len(items) == head["requests"]
        assert sum(len(i.prompt) for i in items) == head["prompt_tokens"]
        assert sum(i.max_tokens for i in items) == head["output_tokens"]


def test_cutting_shortens_ids_and_outputs_only():
    items = [Item((1, 2, 3), 9), Item("a b c", 2)]
    assert cut(items, 2, 5) == [Item((1, 2), 5), Item("a b c", 2)]
    assert cut(items, None, None) == items


def test_a_chat_gets_as_many_words_as_ids():
    text = as_text(Item((1,) * 30, 5), random.Random(0))
    assert isinstance(text.prompt, str)
    assert len(text.prompt.split()) == 30
    assert as_text(Item("own text", 5), random.Random(0)).prompt == "own text"


ITEMS = [Item((1,), 1, float(t)) for t in (0, 1, 2, 8)]
NO_TIMES = [Item((1,), 1)] * 4000


def test_an_item_backwards_is_as_long_and_begins_in_another_way():
    assert backwards(Item((1, 2, 3), 5, 0.5)) == Item((3, 2, 1), 5, 0.5)
    assert backwards(Item("one two\nthree", 5)).prompt == "three two one"
    assert backwards(Item("\u4e00\u4e8c", 5)).prompt == "\u4e8c\u4e00"
    picture = {"type": "image_url", "image_url": {"url": "text of no kind"}}
    chat = (
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": None, "name": "a"},
        {"role": "user", "content": [{"type": "text", "text": "what is this"}, picture]},
    )
    assert backwards(Item("what is this", 5, None, chat)).messages == (
        {"role": "system", "content": "brief. Be"},
        {"role": "assistant", "content": None, "name": "a"},
        {"role": "user", "content": [{"type": "text", "text": "this is what"}, picture]},
    )


def test_recorded_times_are_replayed_at_the_asked_speed():
    times = arrivals(ITEMS, random.Random(0), rate=float("inf"), burstiness=1, speed=2.0)
    assert times == [0, 0.5, 1, 4]


def test_recorded_times_are_stretched_to_the_asked_rate():
    times = arrivals(ITEMS, random.Random(0), rate=4.0, burstiness=1, speed=None)
    assert times == [0, 0.125, 0.25, 1]


def test_an_infinite_rate_sends_all_at_once():
    assert arrivals(ITEMS, random.Random(0), rate=float("inf"), burstiness=1, speed=None) == [0] * 4


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_drawn_gaps_have_the_asked_rate_and_burstiness(burstiness: float):
    times = arrivals(NO_TIMES, random.Random(0), rate=5.0, burstiness=burstiness, speed=None)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((g - mean) ** 2 for g in gaps) / len(gaps)
    assert mean == pytest.approx(1 / 5, rel=0.1)
    assert variance / mean**2 == pytest.approx(1 / burstiness, rel=0.25)


def test_gaps_are_drawn_at_the_ends_of_what_flags_allow():
    times = arrivals(NO_TIMES, random.Random(0), rate=1e308, burstiness=1e6, speed=None)
    assert len(times) == len(NO_TIMES) and 0 <= max(times) < 1e-300


def test_speed_without_recorded_times_is_refused():
    with pytest.raises(ConfigError, match="no arrival times"):
        arrivals(NO_TIMES, random.Random(0), rate=1, burstiness=1, speed=1.0)
