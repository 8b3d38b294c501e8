"""Text of tokens that arrive one by one equals the text of all at once."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.conftest import rows
from tests.text.vocabularies import byte_characters, byte_level, sentencepiece
from xylite.errors import RequestError
from xylite.text.detokenize import Detokenizer
from xylite.text.tokenizer import Tokenizer

BYTES = byte_level()
PIECES = sentencepiece(add_space_prefix=True)


def pieces(t: Tokenizer, ids: list[int], sizes: list[int], **kwargs: Any) -> list[str]:
    """What each `add` gave for ids cut into chunks of these sizes, and what `finish` gave."""
    detokenizer = Detokenizer(t, **kwargs)
    out, at = [], 0
    for size in [*sizes, len(ids)]:
        out.append(detokenizer.add(ids[at : at + size]))
        at += size
    return [*out, detokenizer.finish()]


def byte_ids(data: bytes) -> list[int]:
    """Tokens of BYTES that stand for exactly these bytes."""
    characters = byte_characters()
    ids = [BYTES.token_id(characters[b]) for b in data]
    assert None not in ids
    return [i for i in ids if i is not None]


@pytest.mark.parametrize("t", [BYTES, PIECES], ids=["byte-level", "sentencepiece"])
@settings(max_examples=200)
@given(data=st.data())
def test_any_split_of_any_tokens_gives_the_same_text(t: Tokenizer, data: st.DataObject):
    ids = data.draw(st.lists(st.integers(0, t.vocab_size - 1), max_size=30))
    sizes = data.draw(st.lists(st.integers(0, 4), max_size=30))
    skip = data.draw(st.booleans())
    got = "".join(pieces(t, ids, sizes, skip_special_tokens=skip))
    assert got == t.decode(ids, skip_special_tokens=skip)
    got.encode("utf-8")


@pytest.mark.parametrize("case", rows("utf8_decode_cases.jsonl"), ids=lambda c: c["id"])
def test_bytes_become_the_text_that_unicode_recommends(case: dict[str, Any]):
    data = bytes.fromhex(case["bytes"])
    want = data if case["valid"] else bytes.fromhex(case["replace"])
    ids = byte_ids(data)
    assert BYTES.decode(ids).encode() == want
    assert "".join(pieces(BYTES, ids, [1] * len(ids))).encode() == want


def test_unfinished_character_waits_for_its_last_token():
    ids = byte_ids("a\u4f60\U0001f600b".encode())
    assert pieces(BYTES, ids, [1] * 9) == [
        *("a", "", "", "\u4f60", "", "", "", "\U0001f600", "b"),
        *("", ""),
    ]


def test_character_cut_off_at_the_end_is_one_replacement():
    for n in (1, 2, 3):
        ids = byte_ids("a\U0001f600".encode()[: 1 + n])
        assert "".join(pieces(BYTES, ids, [1] * len(ids))) == "a\ufffd" == BYTES.decode(ids)


def test_character_that_begins_in_the_prompt_is_completed():
    prompt, answer = byte_ids("x\u4f60".encode()[:2]), byte_ids("x\u4f60".encode()[2:])
    assert "".join(pieces(BYTES, answer, [1], prompt_tail_ids=prompt)) == "\u4f60"


def test_character_that_the_prompt_leaves_unfinished_is_no_text_of_the_answer():
    prompt = byte_ids("x\u4f60".encode()[:2])
    for answer, text in ((b"ab", "ab"), (b"", ""), (b"\xbd", ""), (b"\xff", "\ufffd")):
        ids = byte_ids(answer)
        assert "".join(pieces(BYTES, ids, [1], prompt_tail_ids=prompt)) == text


def test_blank_before_the_first_word_is_text_only_after_a_prompt():
    ids = [i for i in [PIECES.token_id("\u2581hello")] if i is not None]
    assert "".join(pieces(PIECES, ids * 2, [1])) == "hello hello" == PIECES.decode(ids * 2)
    assert "".join(pieces(PIECES, ids * 2, [1], prompt_tail_ids=ids)) == " hello hello"


def test_special_tokens_are_left_out_or_shown():
    end = BYTES.control_tokens["<|im_end|>"]
    ids = [*byte_ids(b"a"), end, *byte_ids(b"b")]
    assert "".join(pieces(BYTES, ids, [1, 1])) == "ab"
    assert "".join(pieces(BYTES, ids, [1, 1], skip_special_tokens=False)) == "a<|im_end|>b"


def test_special_token_within_a_character_does_not_lose_it():
    first, *rest = byte_ids("\u4f60".encode())
    end = BYTES.control_tokens["<|im_end|>"]
    ids = [first, end, *rest]
    assert "".join(pieces(BYTES, ids, [1] * 4)) == "\u4f60" == BYTES.decode(ids, True)
    shown = "".join(pieces(BYTES, ids, [1] * 4, skip_special_tokens=False))
    assert shown == BYTES.decode(ids) == "\ufffd<|im_end|>\ufffd\ufffd"


def test_unknown_id_is_a_request_error():
    with pytest.raises(RequestError, match="outside the vocabulary"):
        Detokenizer(BYTES).add([BYTES.vocab_size])


@pytest.mark.model
def test_texts_of_the_demo_model_equal_those_of_transformers(smollm: Tokenizer, reference: Any):
    rng = random.Random(0)
    texts = [r["rendered"] for r in rows("chat_template_renderings.jsonl")]
    texts += [" \u4f60\u597d \u4f60\u597d", " \u010f\u00e1bel", "\U0001f469\u200d\U0001f467"]
    for text in texts:
        ids = reference.encode(text)
        for sizes in ([1] * len(ids), [rng.randint(1, 5) for _ in ids]):
            got = pieces(smollm, ids, sizes, skip_special_tokens=False)
            assert "".join(got) == reference.decode(ids)
            assert not any("\ufffd" in piece for piece in got)
    ids = [rng.randrange(smollm.vocab_size) for _ in range(2000)]
    got = pieces(smollm, ids, [1] * len(ids), skip_special_tokens=False)
    assert "".join(got) == reference.decode(ids)


@pytest.mark.model
def test_length_limit_within_a_character_leaves_valid_text(smollm: Tokenizer):
    # " " and the two tokens of each character, as the demo model writes them
    ids = [216, 18645, 250, 48392, 138]
    for n, text in ((2, " \ufffd"), (3, " \u4f60"), (4, " \u4f60\ufffd"), (5, " \u4f60\u597d")):
        assert "".join(pieces(smollm, ids[:n], [1] * n)) == text == smollm.decode(ids[:n])
