"""Strings that know what the template wrote: they equal str, and vouch for nothing else."""

from string import Formatter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xylite.text.written import (
    Written,
    format_written,
    joined,
    plain,
    spans_of,
    wholly_written,
    written,
)

# Letters that the template writes, and those of clients: so the right answer can be read off.
OURS, THEIRS = "ab .", "xy\u00e9"


@st.composite
def texts(draw: st.DrawFn) -> str:
    """A text whose letters of OURS are written by the template, and no others."""
    parts = draw(st.lists(st.text(OURS, max_size=3) | st.text(THEIRS, max_size=3), max_size=5))
    return joined([written(p) if p and p[0] in OURS else p for p in parts])


def marked(text: str) -> str:
    """The parts that the template wrote, joined."""
    return "".join(plain(text)[a:b] for a, b in spans_of(text))


def ours(text: str) -> str:
    return "".join(c for c in plain(text) if c in OURS)


@given(a=texts(), b=texts(), i=st.integers(-6, 6), j=st.integers(-6, 6))
def test_operations_keep_exactly_what_was_written(a: str, b: str, i: int, j: int):
    p, q = plain(a), plain(b)
    results = [
        (a + b, p + q),
        (a[i:j], p[i:j]),
        (a.strip(), p.strip()),
        (a.strip("ax"), p.strip("ax")),
        (a.lstrip(), p.lstrip()),
        (a.rstrip("."), p.rstrip(".")),
        (a.removeprefix("a"), p.removeprefix("a")),
        (a.removesuffix("x"), p.removesuffix("x")),
        (a * 2, p * 2),
        (joined(list(a)), p),
        *zip(a.split(), p.split(), strict=True),
        *zip(a.split("a"), p.split("a"), strict=True),
        *zip(a.split("x", 1), p.split("x", 1), strict=True),
        *zip(a.rsplit(" ", 1), p.rsplit(" ", 1), strict=True),
        *zip(a.splitlines(True), p.splitlines(True), strict=True),
    ]
    for got, want in results:
        assert plain(got) == want
        assert marked(got) == ours(want)
    assert marked(a + q) == ours(p) == marked(q + a)


@given(a=texts(), b=texts())
def test_no_operation_marks_what_the_template_did_not_write(a: str, b: str):
    results: list[tuple[Any, Any]] = [
        (a.replace("x", plain(b)), plain(a).replace("x", plain(b))),
        (a.replace("", b), plain(a).replace("", plain(b))),
        (a.replace("a", b, 1), plain(a).replace("a", plain(b), 1)),
        (a.upper(), plain(a).upper()),
        (a.title(), plain(a).title()),
        (a[::-1], plain(a)[::-1]),
        (a.center(20), plain(a).center(20)),
        (b.join([a, plain(a)]), plain(b).join([plain(a)] * 2)),
        (f"{a}{b}", plain(a) + plain(b)),
    ]
    for got, want in results:
        assert plain(got) == want
        assert not set(marked(got)) & set(THEIRS + THEIRS.upper())


@pytest.mark.parametrize(
    ("template", "values"),
    [
        ("<%s>", "x"),
        ("<%s%%%s>", ("x", "y")),
        ("%(k)s.", {"k": "x"}),
        ("<%5s>", "x"),
        ("<%d>", 3),
        ("<>", {}),
    ],
)
def test_percent_formatting_equals_that_of_strings(template: str, values: Any):
    got = written(template) % values
    assert plain(got) == template % values
    assert not set(marked(got)) & set(THEIRS)


@pytest.mark.parametrize(("template", "values"), [("%s%s", "x"), ("a", "x"), ("%s", ("x", "y"))])
def test_percent_formatting_fails_as_that_of_strings(template: str, values: Any):
    with pytest.raises(TypeError):
        template % values
    with pytest.raises(TypeError):
        written(template) % values


@pytest.mark.parametrize("template", ["<{}>{}", "<{1}{0}>", "{k}.", "{k!r:>5}{{}}", "{0[0]}"])
def test_brace_formatting_equals_that_of_strings(template: str):
    args, kwargs = ("xy", 7), {"k": "x"}
    got = format_written(Formatter(), written(template), args, kwargs)
    assert plain(got) == template.format(*args, **kwargs)
    assert not set(marked(got)) & set(THEIRS)


def test_written_text_behaves_as_a_string():
    text = written("ab")
    assert text == "ab" and hash(text) == hash("ab") and {"ab": 1}[text] == 1
    assert isinstance(text, Written) and str(text) is text and type(plain(text)) is str
    assert wholly_written(text) and not wholly_written(text + "x")
    assert text[-1] == "b"
    with pytest.raises(IndexError):
        text[2]
    with pytest.raises(TypeError):
        text + 3
    with pytest.raises(TypeError):
        text.join([3])
