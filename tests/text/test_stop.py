"""Stop strings: found wherever they lie, never in the text, nothing else lost."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xylite.errors import RequestError
from xylite.text.stop import MAX_STOP_BYTES, MAX_STOPS, StopChecker, StopStrings, check_stops


def by_definition(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The text up to the stop whose end comes first, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        here = [s for s in stops if text[:end].endswith(s)]
        if here:
            stop = max(here, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(parts: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    """What each `add` gave, then `flush` if nothing matched."""
    checker = StopChecker(stops, include)
    out: list[str] = []
    for part in parts:
        text, stop = checker.add(part)
        out.append(text)
        if stop is not None:
            return out, stop
    return [*out, checker.flush()], None


ALPHA = ["DEF", "GH", "I", "J", "K", "LM", "NO"]


@pytest.mark.parametrize(
    ("parts", "stops", "include", "sent", "stop"),
    [
        (ALPHA, ["DEFGHIJ"], False, ["", "", "", ""], "DEFGHIJ"),
        (ALPHA, ["GHIX"], False, ["DEF", "", "", "GHIJ", "K", "LM", "NO", ""], None),
        (ALPHA, ["KL"], False, ["DEF", "GH", "I", "J", "", ""], "KL"),
        (ALPHA, ["H"], False, ["DEF", "G"], "H"),
        (ALPHA, ["KL"], True, ["DEF", "GH", "I", "J", "", "KL"], "KL"),
        (ALPHA, ["NOP"], False, [*ALPHA[:-1], "", "NO"], None),
        ([" 8,", " 9,", " 10,"], [", 10"], False, [" 8", ", 9", ""], ", 10"),
        ([" 8,", " 9,", " 10,"], [", 10"], True, [" 8", ", 9", ", 10"], ", 10"),
        (["a\n", "\nb"], ["\n\n"], False, ["a", ""], "\n\n"),
        (["ab"], ["b", "ab"], False, [""], "ab"),
        (["abc", "d"], ["abcd", "bc"], False, ["a"], "bc"),
        (["aa", "ab"], ["aab"], False, ["", "a"], "aab"),
        (["x\u4f60", "\u597dy"], ["\u4f60\u597d"], False, ["x", ""], "\u4f60\u597d"),
        (["", "a", ""], ["b"], False, ["", "a", "", ""], None),
        (["abc"], [], False, ["abc", ""], None),
    ],
)
def test_stop_is_cut_where_it_begins(
    parts: list[str], stops: list[str], include: bool, sent: list[str], stop: str | None
):
    assert run(parts, stops, include) == (sent, stop)


@settings(max_examples=500)
@given(
    parts=st.lists(st.text("ab\u4f60", max_size=5), max_size=12),
    stops=st.lists(st.text("ab\u4f60", min_size=1, max_size=5), max_size=5),
    include=st.booleans(),
)
def test_any_split_gives_the_text_up_to_the_first_stop(
    parts: list[str], stops: list[str], include: bool
):
    sent, stop = run(parts, stops, include)
    assert ("".join(sent), stop) == by_definition("".join(parts), stops, include)
    want = by_definition("".join(parts), stops, include)[0]
    checker, seen, received = StopChecker(stops, include), "", ""
    for part in parts:
        text, matched = checker.add(part)
        seen, received = seen + text, received + part
        assert want.startswith(seen)
        if matched is not None:
            break
        # Held back is what could become a stop, and no more.
        could = (k for s in stops for k in range(1, len(s)) if received.endswith(s[:k]))
        assert len(received) - len(seen) == max(could, default=0)


def test_after_a_match_nothing_more_comes():
    checker = StopChecker(["b"])
    assert checker.add("abc") == ("a", "b")
    assert checker.add("def") == ("", "b")
    assert checker.flush() == ""


def test_prepared_stop_strings_serve_many_texts():
    stops = StopStrings(["ab"])
    one, two = StopChecker(stops), StopChecker(stops, include=True)
    assert (one.add("xa"), two.add("b")) == (("x", None), ("b", None))
    assert (one.add("b"), two.add("ab")) == (("", "ab"), ("ab", "ab"))


def test_flush_gives_held_text_once():
    checker = StopChecker(["abc"])
    assert checker.add("xab") == ("x", None)
    assert checker.flush() == "ab"
    assert checker.flush() == ""


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        ([""], r"stop\[0\] must be a string that is not empty"),
        (["a", 3], r"stop\[1\] must be a string"),
        (["x"] * (MAX_STOPS + 1), "stop has 17 entries, the limit is 16"),
        (["\u4f60" * 342], "has 1026 bytes, the limit is 1024"),
    ],
)
def test_bad_stop_lists_are_a_request_error(stops: list[str], message: str):
    with pytest.raises(RequestError, match=message) as caught:
        check_stops(stops)
    assert caught.value.param == "stop"


def test_largest_stop_lists_are_accepted():
    assert len(check_stops([chr(97 + i) * MAX_STOP_BYTES for i in range(MAX_STOPS)])) == MAX_STOPS
    assert check_stops(["a", "b", "a"]) == ("a", "b")


def test_cost_of_a_character_does_not_grow_with_the_stop_strings():
    def seconds(length: int) -> float:
        stops = ["a" * length + chr(98 + i) for i in range(MAX_STOPS)]
        checker = StopChecker(stops)
        begin = time.thread_time()
        for _ in range(5000):
            checker.add("a")
        return time.thread_time() - begin

    few = min(seconds(2) for _ in range(3))
    assert min(seconds(1000) for _ in range(3)) < 10 * few


def test_random_texts_of_one_letter_and_its_end():
    rng = random.Random(0)
    for _ in range(200):
        stops = ["a" * rng.randint(1, 6) + "b" * rng.randint(0, 2) for _ in range(3)]
        text = "".join(rng.choices("aab", k=30))
        sent, stop = run(list(text), stops)
        assert ("".join(sent), stop) == by_definition(text, stops, False)
