"""Ids equal transformers'; control tokens act only where they are meant to."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from tests.text.conftest import rows
from tests.text.vocabularies import byte_level, byte_level_metadata, checkpoint_of, sentencepiece
from xylite.checkpoint import open_checkpoint
from xylite.errors import ConfigError, RequestError
from xylite.text.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "\n \n\t  x",
    "It's IT'S we'll 12345 \u0660\u0661 3.14159",
    "def f(x):\n    return x  # r\u00e9sum\u00e9\n",
    "\u4f60\u597d, \u043c\u0438\u0440! \u0645\u0631\u062d\u0628\u0627",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467",
    "<|im_start|>user\nHi<|im_end|>\n",
    "<|im_start|><|im_end|><|im_end", "x<repo_name>y <|endoftext|>",
]  # fmt: skip


@pytest.mark.model
def test_ids_equal_those_of_transformers(smollm: Tokenizer, reference: Any, demo_dir: Path):
    from_json = Tokenizer.from_checkpoint(open_checkpoint(str(demo_dir), with_weights=False))
    texts = TEXTS + [
        bytes.fromhex(r["bytes"]).decode() for r in rows("utf8_decode_cases.jsonl") if r["valid"]
    ]
    texts += [r["rendered"] for r in rows("chat_template_renderings.jsonl")]
    for text in texts:
        ids = reference.encode(text)
        assert smollm.encode(text) == ids
        assert from_json.encode(text) == ids
        assert smollm.decode(ids) == reference.decode(ids)
        assert smollm.decode(ids, True) == reference.decode(ids, skip_special_tokens=True)


@pytest.mark.model
@settings(max_examples=100)
@given(text=st.text())
def test_any_text_has_the_ids_of_transformers(smollm: Tokenizer, reference: Any, text: str):
    ids = reference.encode(text)
    assert smollm.encode(text) == ids
    # Not always text: this vocabulary lacks some bytes, and drops them.
    assert smollm.decode(ids) == reference.decode(ids)


@pytest.mark.model
def test_demo_tokenizer_says_what_it_is(smollm: Tokenizer, demo: Any):
    assert smollm.vocab_size == 49152
    assert (smollm.bos_id, smollm.eos_id) == (1, 2)
    assert smollm.end_tokens(demo) == {2}
    assert smollm.token_id("Hello") == 19556
    assert smollm.token_text(18645) == "\ufffd"
    assert smollm.token_bytes(18645) + smollm.token_bytes(250) == "\u4f60".encode()
    assert len(smollm.control_tokens) == 17


@pytest.mark.model
def test_control_tokens_in_plain_text_are_spelled_out(smollm: Tokenizer):
    assert smollm.encode("<|im_end|>") == [2]
    plain = smollm.encode_plain("<|im_end|>")
    assert len(plain) == 7 and 2 not in plain
    assert smollm.decode(plain) == "<|im_end|>"
    for text in smollm.control_tokens:
        ids = smollm.encode_plain(f"a {text}{text} b")
        assert not any(i in smollm.special_ids for i in ids)
        assert smollm.decode(ids) == f"a {text}{text} b"


def test_marked_literals_act_and_others_do_not():
    t = byte_level()
    text = "<s>a<|im_end|>b<|im_end|>"
    end = t.control_tokens["<|im_end|>"]
    ids = t.encode_marked(text, [(4, 14)])
    assert ids == [*t.encode_plain("<s>a"), end, *t.encode_plain("b<|im_end|>")]
    assert t.control_spans(text, 0, 14) == [(0, 3), (4, 14)]
    assert t.control_spans(text, 0, 13) == [(0, 3)]


def test_control_token_is_spelled_as_other_text_is():
    t = byte_level(control=("<s>", "<the>", "<|im_end|>"))
    assert t.encode_plain("<the>") == [t.token_id("<"), t.token_id("the"), t.token_id(">")]


def test_longest_control_token_wins():
    t = byte_level(control=("<s>", "<s>x", "[a]"))
    assert t.control_spans("<s>x[a]<s>", 0, 10) == [(0, 4), (4, 7), (7, 10)]


def test_begin_token_is_added_once_and_only_if_asked_for():
    t = byte_level()
    assert t.encode("ab") == [0, *t.encode_plain("ab")]
    assert t.encode("ab", add_special_tokens=False) == t.encode_plain("ab")
    assert t.encode("<s>ab") == [0, 0, *t.encode_plain("ab")]


def test_added_tokens_that_are_not_control_tokens_still_act_in_plain_text():
    t = byte_level(user=("<tool_call>",))
    assert t.encode_plain("<tool_call>") == [t.token_id("<tool_call>")]
    assert t.encode_plain("<tool_call>")[0] not in t.special_ids


def test_control_token_that_merges_would_make_is_spelled_out():
    metadata = byte_level_metadata(control=("<s>", "th", "<|im_end|>"))
    metadata["tokenizer.ggml.tokens"] = metadata["tokenizer.ggml.tokens"][:-2]
    metadata["tokenizer.ggml.token_type"] = metadata["tokenizer.ggml.token_type"][:-2]
    metadata["tokenizer.ggml.merges"] = ["t h"]
    t = Tokenizer.from_checkpoint(checkpoint_of(metadata))
    assert t.encode("th", add_special_tokens=False) == [1]
    assert t.encode_plain("ath") == [t.token_id(c) for c in "ath"]


def test_lone_surrogates_are_a_request_error():
    with pytest.raises(RequestError, match="lone surrogate"):
        byte_level().encode("a\ud800")


@pytest.mark.parametrize("token_id", [-1, 10**9])
def test_unknown_ids_are_a_request_error(token_id: int):
    t = byte_level()
    with pytest.raises(RequestError, match=f"{token_id} is outside the vocabulary"):
        t.decode([token_id])
    with pytest.raises(RequestError):
        t.token_text(t.vocab_size)


def test_too_long_is_never_said_of_a_text_that_fits():
    t = byte_level()
    assert t.max_token_bytes == len("<|im_start|>")
    text = "\u4f60" * 100
    num_tokens = len(t.encode_plain(text))
    assert not t.too_long(text, num_tokens)
    assert not t.too_long(text, 25)  # 300 bytes could be 25 tokens of 12
    assert t.too_long(text, 24)
    assert t.too_long("x" * 13, 1)
    assert not t.too_long("", 0)


def test_end_tokens_are_the_union_of_all_sources():
    metadata = byte_level_metadata(
        control=("<s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "</s>")
    )
    metadata |= {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 6}
    checkpoint = checkpoint_of(
        metadata,
        tokenizer_config={"eos_token": {"content": "</s>"}},
        config={"eos_token_id": [7, 10**6], "text_config": {"eos_token_id": 8}},
        generation_config={"eos_token_id": 9},
    )
    t = Tokenizer.from_checkpoint(checkpoint)
    assert t.end_tokens(checkpoint) == {2, 3, 4, 5, 6, 7, 8, 9}


@pytest.mark.parametrize("ids", ["</s>", {"a": 1}, [2, None, "x"], [[2]], True, 2.0])
@pytest.mark.parametrize("where", ["config", "text_config", "generation_config"])
def test_an_end_token_that_is_no_id_is_told_with_its_file(where: str, ids: Any):
    given: dict[str, Any] = {"eos_token_id": ids}
    given = {"config": {where: given}} if where == "text_config" else {where: given}
    checkpoint = checkpoint_of(byte_level_metadata(control=("</s>",)), **given)
    file = "generation_config" if where == "generation_config" else "config"
    with pytest.raises(ConfigError, match=rf"^{file}\.json: eos_token_id must be a token id"):
        Tokenizer.from_checkpoint(checkpoint).end_tokens(checkpoint)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("added_tokens_decoder", {"a": "x"}),
        ("added_tokens_decoder", ["x"]),
        ("added_tokens_decoder", 5),
        ("added_tokens_decoder", {"4": {"content": "\ud800"}}),
        ("bos_token", "\ud800"),
        ("additional_special_tokens", 5),
        ("additional_special_tokens", True),
    ],
)
def test_a_wrong_tokenizer_config_is_a_clear_error(tmp_path: Path, field: str, value: Any):
    checkpoint = checkpoint_of(
        tokenizer_config={field: value}, tokenizer_json=_save(tmp_path, _word_pieces())
    )
    with pytest.raises(ConfigError, match=r"^tokenizer_config\.json: "):
        Tokenizer.from_checkpoint(checkpoint)


def test_an_added_token_may_be_a_plain_string(tmp_path: Path):
    config = {"added_tokens_decoder": {"4": "<s>"}}
    path = _save(tmp_path, _word_pieces())
    t = Tokenizer.from_checkpoint(checkpoint_of(tokenizer_config=config, tokenizer_json=path))
    assert t.encode("a<s>") == [0, 4]


def _save(path: Path, inner: tokenizers.Tokenizer) -> str:
    inner.save(str(path / "tokenizer.json"))
    return str(path / "tokenizer.json")


def _word_pieces() -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(
        models.BPE({"a": 0, "b": 1, "\u2581": 2, "<unk>": 3}, [], unk_token="<unk>")
    )
    inner.normalizer = normalizers.Replace(" ", "\u2581")
    inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    return inner


def test_tokenizer_config_completes_tokenizer_json(tmp_path: Path):
    config = {
        "added_tokens_decoder": {
            "4": {"content": "<s>", "special": True, "normalized": False},
            "5": {"content": "<|end|>", "special": False, "normalized": False, "rstrip": True},
        },
        "bos_token": "<s>",
        "eos_token": {"content": "<|end|>"},
        "add_bos_token": True,
    }
    path = _save(tmp_path, _word_pieces())
    t = Tokenizer.from_checkpoint(checkpoint_of(tokenizer_config=config, tokenizer_json=path))
    assert (t.bos_id, t.eos_id, t.vocab_size) == (4, 5, 6)
    # The end token is named, so it is a control token; and it takes the blanks that follow.
    assert t.encode("a<|end|>  b") == [4, 0, 5, 1]
    assert 5 not in t.encode_plain("<|end|>")
    assert t.decode([4, 0, 2, 1, 5], skip_special_tokens=True) == "a b"


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path):
    inner = _word_pieces()
    inner.enable_truncation(3)
    inner.enable_padding(length=8)
    t = Tokenizer.from_checkpoint(checkpoint_of(tokenizer_json=_save(tmp_path, inner)))
    assert t.encode("aaaaa") == [0] * 5


def test_post_processor_of_the_file_stays_unless_the_config_speaks(tmp_path: Path):
    inner = _word_pieces()
    inner.add_special_tokens([AddedToken("<s>", normalized=False)])
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 4)]
    )
    path = _save(tmp_path, inner)
    named = {"bos_token": "<s>"}
    t = Tokenizer.from_checkpoint(checkpoint_of(tokenizer_config=named, tokenizer_json=path))
    assert t.encode("a") == [4, 0]
    named |= {"add_bos_token": False}
    t = Tokenizer.from_checkpoint(checkpoint_of(tokenizer_config=named, tokenizer_json=path))
    assert t.encode("a") == [0]


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is not a tokenizer"), ("[]", "is not a tokenizer"), ("\xff", "is not UTF-8 text")],
)
def test_broken_files_are_named(tmp_path: Path, content: str, message: str):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=f"tokenizer.json.*{message}"):
        Tokenizer.from_checkpoint(checkpoint_of(tokenizer_json=str(path)))


def test_no_tokenizer_is_a_config_error():
    with pytest.raises(ConfigError, match="no tokenizer.json"):
        Tokenizer.from_checkpoint(checkpoint_of())


def test_unknown_decoder_is_named(tmp_path: Path):
    inner = _word_pieces()
    inner.decoder = decoders.WordPiece()
    path = _save(tmp_path, inner)
    with pytest.raises(ConfigError, match="WordPiece"):
        Tokenizer.from_checkpoint(checkpoint_of(tokenizer_json=path))


def test_metaspace_decoder_is_understood(tmp_path: Path):
    inner = _word_pieces()
    inner.normalizer = None
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Metaspace(prepend_scheme="first")
    reference = tokenizers.Tokenizer.from_str(inner.to_str())
    t = Tokenizer.from_checkpoint(checkpoint_of(tokenizer_json=_save(tmp_path, inner)))
    for text in ("a b", " a", "ab  b"):
        ids = reference.encode(text).ids
        assert t.encode(text) == ids
        assert t.decode(ids) == reference.decode(ids)


def test_many_threads_get_the_same_ids():
    t = byte_level()
    want = t.encode("the <|im_end|> the" * 50)
    wrong: list[int] = []

    def work() -> None:
        wrong.extend(i for i in range(50) if t.encode("the <|im_end|> the" * 50) != want)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("unit", ["a", " ", "\n", "-", "<", "7", "\u4f60", " a"])
def test_time_grows_no_faster_than_length(unit: str):
    t = sentencepiece(add_space_prefix=True) if unit == "a" else byte_level()

    def seconds(n: int) -> float:
        begin = time.process_time()
        t.encode(unit * n)
        return time.process_time() - begin

    seconds(1000)
    short, long = min(seconds(20_000) for _ in range(3)), seconds(320_000)
    # 16 times the length; a quadratic step would take 256 times as long.
    assert long < 80 * max(short, 1e-3)
