"""What `make_request` lets through fits into the context and the KV pool."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xylite.errors import RequestError
from xylite.runtime.request import Limits, SamplingParams, check_params, make_request
from xylite.runtime.sequence import Sequence


def accepted(num_prompt, max_tokens, max_kv_tokens=100, **params):
    """max_tokens as resolved; None if the request is refused as too long."""
    limits = Limits(vocab_size=50, max_model_len=20, max_kv_tokens=max_kv_tokens)
    try:
        request = make_request(
            "r",
            [1] * num_prompt,
            SamplingParams(max_tokens=max_tokens, **params),
            limits=limits,
            end_tokens=frozenset(),
            default_seed=0,
        )
    except RequestError as e:
        assert e.code == "context_length_exceeded"
        assert e.param in ("prompt", "max_tokens")
        return None
    return request.max_tokens


@given(st.integers(1, 60), st.none() | st.integers(0, 60), st.integers(1, 40))
def test_accepted_requests_fit_and_none_that_fits_is_refused(num_prompt, asked, max_kv_tokens):
    got = accepted(num_prompt, asked, max_kv_tokens)
    least = num_prompt + (1 if asked is None else asked)
    assert (got is not None) == (least <= min(20, max_kv_tokens))
    if got is not None:
        assert got >= 1 or asked == 0
        assert num_prompt + got <= min(20, max_kv_tokens)
        assert asked is None or got == asked


@pytest.mark.parametrize(
    ("num_prompt", "asked", "resolved"),
    [
        (19, None, 1),
        (20, None, None),
        (21, None, None),
        (500, None, None),
        (20, 0, 0),
        (21, 0, None),
        (15, 5, 5),
        (15, 6, None),
    ],
)
def test_prompts_at_the_edge_of_the_context(num_prompt, asked, resolved):
    assert accepted(num_prompt, asked) == resolved


@pytest.mark.parametrize(
    ("num_prompt", "asked", "default", "min_tokens", "resolved"),
    [
        (10, None, 4, 0, 4),
        (10, None, 10, 0, 10),
        (10, None, 16, 0, 10),
        (19, None, 16, 0, 1),
        (20, None, 16, 0, None),
        (10, None, 4, 6, 6),
        (10, None, 4, 16, 10),
        (10, 6, 4, 0, 6),
        (10, 16, 4, 0, None),
        (10, 16, 16, 0, None),
    ],
)
def test_a_default_length_is_cut_to_the_room_and_a_named_one_is_not(
    num_prompt, asked, default, min_tokens, resolved
):
    params = {"default_max_tokens": default, "min_tokens": min_tokens}
    assert accepted(num_prompt, asked, **params) == resolved
    # The room in the KV pool counts like that in the context.
    kv = accepted(num_prompt, asked, max_kv_tokens=14, **params)
    left = 14 - num_prompt
    if left < 1 or (asked is not None and asked > left):
        assert kv is None
    else:
        assert kv == min(left, resolved or left)


WRONG_KINDS = [
    *[(name, value) for name in ("n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs",
      "prompt_logprobs", "default_max_tokens") for value in ("1", 1.0, True)],
    *[(name, value) for name in ("temperature", "top_p", "min_p", "presence_penalty",
      "frequency_penalty", "repetition_penalty") for value in ("1", None, True, [1])],
    ("logit_bias", {1: "1"}),
    ("logit_bias", {"1": 1}),
    *[(name, ids) for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids")
      for ids in (("1",), (1, 2.0), (True,), (None,), 1, "1", b"1", {1: 1}, {1}, iter([1]))],
    *[(name, value) for name in ("stop_token_ids", "banned_token_ids", "logit_bias", "stop")
      for value in (None, 1, True, b"1")],
    ("logit_bias", [(1, 1)]),
    *[(name, value) for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
      "spaces_between_special_tokens") for value in (None, 1, "no", [])],
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG_KINDS)
def test_values_of_another_kind_are_refused_by_name(name, value):
    """Callers in the same process, too: what is no number fails here and not on the device."""
    params = SamplingParams(**{"max_tokens": 4, name: value})
    with pytest.raises(RequestError, match=f"^{name} must ") as caught:
        check_params(params, Limits(vocab_size=50, max_model_len=20, max_kv_tokens=100))
    assert caught.value.param == name


@pytest.mark.parametrize("token", ["a", 1.5, None, True])
def test_prompts_hold_token_ids_only(token):
    with pytest.raises(RequestError, match="^prompt must hold token ids"):
        make_request(
            "r",
            [1, token],
            SamplingParams(max_tokens=1),
            limits=Limits(vocab_size=50, max_model_len=20, max_kv_tokens=100),
            end_tokens=frozenset(),
            default_seed=0,
        )


@pytest.mark.parametrize("prompt", [None, 1, b"ab", "ab", {1: 2}, iter([1])])
def test_prompts_are_lists_of_token_ids(prompt):
    with pytest.raises(RequestError, match="^prompt must be a list of token ids, got "):
        make_request(
            "r",
            prompt,
            SamplingParams(max_tokens=1),
            limits=Limits(vocab_size=150, max_model_len=20, max_kv_tokens=100),
            end_tokens=frozenset(),
            default_seed=0,
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [("priority", "a"), ("priority", 1.5), ("priority", None), ("priority", 2**31)]
    + [("cache_salt", None), ("cache_salt", 5), ("cache_salt", b"a")],
)
def test_priority_and_salt_are_checked_too(name, value):
    with pytest.raises(RequestError, match=f"^{name} must be .*, got "):
        make_request(
            "r",
            [1],
            SamplingParams(max_tokens=1),
            limits=Limits(vocab_size=150, max_model_len=20, max_kv_tokens=100),
            end_tokens=frozenset(),
            default_seed=0,
            **{name: value},
        )


@pytest.mark.parametrize("params", [None, {"max_tokens": 1}, SamplingParams, 1])
def test_params_are_sampling_params(params):
    with pytest.raises(RequestError, match="^params must be SamplingParams, got "):
        check_params(params, Limits(vocab_size=50, max_model_len=20, max_kv_tokens=100))


def test_numbers_of_numpy_are_numbers():
    import numpy as np

    params = {
        "temperature": np.float32(0.5),
        "top_k": np.int64(3),
        "stop_token_ids": (np.int32(4),),
    }
    assert accepted(3, np.int64(4), **params) == 4


@pytest.mark.parametrize(("min_tokens", "num_banned"), [(0, 50), (1, 48)])
def test_a_request_that_could_choose_no_token_is_refused(min_tokens, num_banned):
    def made(num):
        return make_request(
            "r",
            [1],
            SamplingParams(
                max_tokens=4,
                min_tokens=min_tokens,
                banned_token_ids=tuple(range(num)),
                stop_token_ids=(48,),
            ),
            limits=Limits(vocab_size=50, max_model_len=20, max_kv_tokens=100),
            end_tokens=frozenset({49, 50}),
            default_seed=0,
        )

    assert made(num_banned - 1)
    with pytest.raises(RequestError, match="^banned_token_ids leaves no token") as caught:
        made(num_banned)
    assert caught.value.param == "banned_token_ids"


def test_a_seed_of_numpy_is_a_seed():
    request = make_request(
        "r",
        [1],
        SamplingParams(max_tokens=4, seed=np.int64(2**62), n=3),
        limits=Limits(vocab_size=50, max_model_len=20, max_kv_tokens=100),
        end_tokens=frozenset(),
        default_seed=0,
    )
    seeds = [Sequence(request, i, 0.0).seed for i in range(3)]
    assert seeds[0] == 2**62
    assert len({type(s) for s in seeds} | {int}) == 1
