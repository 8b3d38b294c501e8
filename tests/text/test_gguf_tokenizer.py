"""Tokenizers built from GGUF metadata, against SentencePiece's own rule and the splitting rules."""

import random
from typing import Any

import numpy as np
import pytest

from tests.text.vocabularies import (
    SPM_PIECES,
    byte_level_metadata,
    checkpoint_of,
    sentencepiece,
    spm_metadata,
)
from xylite.errors import ConfigError
from xylite.text.gguf_tokenizer import from_gguf, spm_merges
from xylite.text.tokenizer import Tokenizer


def best_score_first(metadata: dict[str, Any], text: str) -> list[int]:
    """SentencePiece BPE by definition: join the neighbours whose union scores best, repeatedly."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {t: i for i, t in enumerate(tokens)}
    scores = metadata["tokenizer.ggml.scores"]
    symbols = list(text.replace(" ", "\u2581"))
    while True:
        best = None
        for i in range(len(symbols) - 1):
            union = symbols[i] + symbols[i + 1]
            if union in SPM_PIECES and (best is None or scores[ids[union]] > best[0]):
                best = (scores[ids[union]], i)
        if best is None:
            break
        i = best[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    out: list[int] = []
    for symbol in symbols:
        if symbol in SPM_PIECES:
            out.append(ids[symbol])
        else:
            out += [ids[f"<0x{b:02X}>"] for b in symbol.encode()]
    return out


@pytest.mark.parametrize("add_space_prefix", [False, True])
def test_ids_follow_from_the_scores_of_sentencepiece(add_space_prefix: bool):
    metadata = spm_metadata(add_space_prefix=add_space_prefix)
    t = sentencepiece(add_space_prefix=add_space_prefix)
    rng = random.Random(0)
    prefix = " " if add_space_prefix else ""
    for _ in range(400):
        text = "".join(rng.choices("abchelo \u4f60\u00e9", k=rng.randint(1, 24)))
        want = best_score_first(metadata, prefix + text)
        assert t.encode_plain(text) == want, text
        assert t.encode(text) == [1, *want]
        assert t.decode(want) == text


def test_merges_are_ordered_by_score_and_then_by_vocabulary():
    tokens = ["<s>", "a", "b", "ab", "ba", "aba", "c<s>"]
    types = [3, 1, 1, 1, 1, 1, 1]
    scores = [0.0, 0.0, 0.0, -2.0, -1.0, -3.0, -4.0]
    assert spm_merges(tokens, types, scores) == [("b", "a"), ("a", "b"), ("a", "ba"), ("ab", "a")]
    order = spm_merges(["ab", "ba", "a", "b", "aba"], [1] * 5, [0.0, 0.0, 0.0, 0.0, 1.0])
    assert order[:2] == [("ab", "a"), ("a", "ba")]


def test_text_that_no_piece_covers_is_unknown_without_byte_tokens():
    t = sentencepiece(add_space_prefix=False, bytes_too=False)
    assert t.encode_plain("a\u00e9b") == [t.token_id("a"), 0, t.token_id("b")]


def _words(pre: str, text: str) -> list[str]:
    metadata = byte_level_metadata() | {"tokenizer.ggml.pre": pre}
    splitter = from_gguf(metadata).pre_tokenizer
    assert splitter is not None
    return [text[a:b] for _, (a, b) in splitter.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "It's 1234  ok!!", ["It", "'s", " 1234", " ", " ok", "!!"]),
        ("default", "a$1234.5", ["a", "$", "123", "4", ".", "5"]),
        ("smollm", "a 12b", ["a", " ", "1", "2", "b"]),
        ("llama-bpe", "IT'S 12345 x\n\n y", ["IT", "'S", " ", "123", "45", " x", "\n\n", " y"]),
        ("llama3", "(hello", ["(hello"]),
        ("qwen2", "a 12\n", ["a", " ", "1", "2", "\n"]),
        ("tekken", "HelloWorld 12/\n", ["Hello", "World", " ", "1", "2", "/\n"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
        ("deepseek-v3", "a1234\u4f60\u597db", ["a", "123", "4", "\u4f60\u597d", "b"]),
    ],
)
def test_words_are_cut_as_the_named_rule_says(pre: str, text: str, words: list[str]):
    assert _words(pre, text) == words


def test_word_that_is_a_token_is_taken_whole_where_the_rule_says_so():
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.merges"] = []
    for pre, num_tokens in (("gpt-2", 3), ("llama-bpe", 1)):
        t = Tokenizer.from_checkpoint(checkpoint_of(metadata | {"tokenizer.ggml.pre": pre}))
        assert len(t.encode_plain("the")) == num_tokens


def test_begin_token_follows_the_flag_and_else_the_rule():
    metadata = byte_level_metadata()
    for pre, flag, want in (
        ("llama-bpe", None, True),
        ("gpt-2", None, False),
        ("llama-bpe", False, False),
        ("gpt-2", True, True),
    ):
        changed = metadata | {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": flag}
        if flag is None:
            del changed["tokenizer.ggml.add_bos_token"]
        t = Tokenizer.from_checkpoint(checkpoint_of(changed))
        assert (t.encode("a")[0] == 0) is want


def test_end_token_is_added_if_the_file_says_so():
    metadata = byte_level_metadata() | {"tokenizer.ggml.add_eos_token": True}
    ids = Tokenizer.from_checkpoint(checkpoint_of(metadata)).encode("a")
    assert (ids[0], ids[-1], len(ids)) == (0, 2, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert' is not known"),
        ({"tokenizer.ggml.pre": "nonesuch"}, "'nonesuch' is not known"),
        ({"tokenizer.ggml.merges": None}, "no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.model": None}, "no tokenizer.ggml.model"),
        ({"tokenizer.ggml.merges": ["q zz"]}, "cannot be built"),
        ({"tokenizer.ggml.merges": ["qzz"]}, "cannot be built"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 entries for 261 tokens"),
        ({"tokenizer.ggml.token_type": 1}, "token_type must be an array of numbers"),
        ({"tokenizer.ggml.token_type": ["a"] * 261}, "token_type must be an array of numbers"),
        ({"tokenizer.ggml.add_bos_token": np.array([1, 2])}, "add_bos_token must be true or false"),
        ({"tokenizer.ggml.add_eos_token": "yes"}, "add_eos_token must be true or false"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "bos_token_id is 1000000"),
        ({"tokenizer.ggml.model": "llama"}, "no tokenizer.ggml.scores"),
    ],
)
def test_metadata_that_cannot_be_used_is_named(change: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        from_gguf(byte_level_metadata() | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.scores": [0.0]}, "scores has 1 entries"),
        ({"tokenizer.ggml.add_space_prefix": []}, "add_space_prefix must be true or false"),
    ],
)
def test_metadata_of_pieces_that_cannot_be_used_is_named(change: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        from_gguf(spm_metadata(add_space_prefix=False) | change)
