"""Any schedule gives the tokens that full recomputation gives."""

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.runtime.driver import Driver
from tests.toy import SumConstraint, ToyDrafter, V, drawn_request, expected_tokens
from xylite.runtime.request import SamplingParams


@st.composite
def worlds(draw):
    block_size = draw(st.sampled_from([1, 2, 4, 5, 16]))
    capacity = draw(st.integers(24, 60))
    spare = draw(st.sampled_from([0, 1, 3, 40 // block_size]))
    num_blocks = -(-capacity // block_size) + spare
    return {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "budget": draw(st.sampled_from([1, 2, 3, 5, 8, 16, 64])),
        "mixed_budget": draw(st.sampled_from([None, None, 1, 4, 12])),
        "max_num_seqs": draw(st.integers(1, 6)),
        "reuse": draw(st.booleans()) or draw(st.booleans()),
        "max_draft": draw(st.sampled_from([0, 0, 0, 0, 1, 3, 5])),
    }, capacity


@st.composite
def requests(draw, capacity):
    stem = draw(st.sampled_from([[1] * 30, list(range(30)), [3, 5] * 15, [2] * 9 + [9] * 21]))
    cut = draw(st.integers(0, min(20, capacity - 4)))
    tail = draw(st.lists(st.integers(0, V - 1), min_size=0 if cut else 1, max_size=6))
    prompt = (stem[:cut] + tail)[: capacity - 2]
    most = capacity - len(prompt)
    max_tokens = draw(st.integers(0, min(most, 14)))
    params = SamplingParams(
        n=draw(st.sampled_from([1, 1, 1, 2, 3])),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(3, max_tokens))),
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(-3, 3)),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.0])),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, V - 1), max_size=2))),
        banned_token_ids=tuple(draw(st.lists(st.integers(0, V - 1), max_size=3))),
        allowed_token_ids=draw(st.sampled_from([None, None, None, tuple(range(4, 40))])),
        logprobs=draw(st.sampled_from([None, None, 0, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
    )
    return {
        "prompt": prompt,
        "params": params,
        "cache_salt": draw(st.sampled_from(["", "", "other"])),
        "priority": draw(st.sampled_from([0, 0, 0, -1, 5])),
        "constraint": draw(st.sampled_from([None, None, SumConstraint])),
        "at": draw(st.integers(0, 12)),
        "abort_at": draw(st.sampled_from([None] * 5 + [3, 6, 9])),
    }


@settings(
    max_examples=600,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.data(), st.integers(0, 2**32))
def test_any_schedule_gives_the_tokens_of_full_recomputation(data, seed):
    world, capacity = data.draw(worlds())
    wanted = data.draw(st.lists(requests(capacity), min_size=1, max_size=9))
    raises = data.draw(st.sets(st.integers(0, 40), max_size=2))
    corrupts = data.draw(st.sets(st.tuples(st.integers(0, 40), st.integers(0, 3)), max_size=2))
    rng = random.Random(seed)
    driver = Driver(**world)
    driver.executor.raise_at = raises
    driver.executor.corrupt = corrupts
    built = {}
    later = []
    for i, w in enumerate(wanted):
        request = drawn_request(f"r{i}", w, capacity)
        built[request.id] = (request, w)
        later.append((w["at"], request))
    aborted = set()

    def on_step(number):
        for at, request in list(later):
            if at <= number:
                later.remove((at, request))
                driver.add(request)
        for request, w in built.values():
            if w["abort_at"] is not None and w["abort_at"] + w["at"] == number:
                aborted.add(request.id)
                for i in range(request.params.n):
                    seq = driver.sequences.get((request.id, i))
                    if seq is not None:
                        driver.queues.stop(seq, "abort")

    drafter = ToyDrafter(rng, world["max_draft"])
    while True:
        driver.run(
            ahead=lambda: rng.random() < 0.7,
            propose=drafter.propose if world["max_draft"] else None,
            on_step=on_step,
        )
        if not later:
            break
        _, request = later.pop(0)
        driver.add(request)

    for request, _ in built.values():
        for i in range(request.params.n):
            truth = expected_tokens(request, i)
            got = driver.tokens(request.id, i)
            assert got == truth[: len(got)], (request, i)
            finish = driver.finish(request.id, i)
            if finish == "error":
                assert raises or corrupts
            elif request.id not in aborted:
                assert got == truth
                ends = request.end_tokens | set(request.params.stop_token_ids)
                at_end = got and got[-1] in ends and len(got) > request.params.min_tokens
                assert finish == ("stop" if at_end else "length")
                _check_logprobs(driver, request, i, got)
    assert driver.blocks.num_free == world["num_blocks"]
    driver.blocks.check([])
    assert not driver.queues.num_unfinished
    assert len(driver.queues.free_rows) == world["max_num_seqs"]


def _check_logprobs(driver, request, i, got):
    events = driver.events[request.id, i]
    if request.params.logprobs is not None:
        entries = [x for e in events for x in e.logprobs or ()]
        assert [x.token for x in entries] == got
        assert [x.logprob for x in entries] == [-float(t) for t in got]
        assert all(len(x.top) == request.params.logprobs for x in entries)
    if request.params.prompt_logprobs is not None and i == 0:
        scored = next(e.prompt_logprobs for e in events if e.prompt_logprobs is not None)
        prompt = request.prompt
        assert scored[0] is None and len(scored) == len(prompt)
        for k in range(1, len(prompt)):
            assert scored[k].token == prompt[k]
            assert scored[k].logprob == -(prompt[k - 1] * 1000.0 + prompt[k])
