"""Text to token ids and back, for one model.

Control tokens (`<|im_end|>`, `</s>`, ...) act as such only where the caller says so. Inside, the
tokenizer never reads them from text: a literal that shall act is replaced by an *alias*, a name
with a random part that no client can guess, and the alias's id by the token's own afterwards. So
one tokenizer, encoding each text in one call, serves trusted and foreign text alike.
"""

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import tokenizers
from tokenizers import AddedToken

from xylite.checkpoint import Checkpoint
from xylite.errors import ConfigError, RequestError, file_reason
from xylite.text.gguf_tokenizer import add_boundary_tokens, from_gguf

# Tokens that end a turn, for GGUF files that mark only the end of text. Names as llama.cpp's.
_END_OF_TURN = frozenset(
    ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>")
)
_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True, slots=True)
class Decoding:
    """How the bytes of tokens make text.

    byte_level     characters of a token stand for bytes (GPT-2's alphabet)
    blank          character that means " ", or None
    byte_fallback  tokens <0xHH> stand for one byte
    strip_first    one blank at the very start of a text is not part of it
    """

    byte_level: bool = False
    blank: str | None = None
    byte_fallback: bool = False
    strip_first: bool = False


def _decoding(decoder: Mapping[str, Any] | None) -> Decoding:
    """The Decoding that a tokenizer.json's "decoder" describes; ConfigError if there is none."""
    steps: list[dict[str, Any]] = [] if decoder is None else decoder.get("decoders", [decoder])
    found: dict[str, Any] = {}
    for step in steps:
        kind = step["type"]
        if kind == "ByteLevel":
            found["byte_level"] = True
        elif kind == "Metaspace":
            found["blank"] = step.get("replacement", "\u2581")
            found["strip_first"] = step.get("prepend_scheme", "always") != "never"
        elif kind == "Replace" and step["content"] == " ":
            found["blank"] = step["pattern"].get("String")
        elif kind == "ByteFallback":
            found["byte_fallback"] = True
        elif kind == "Strip" and step["content"] == " " and step["stop"] == 0:
            found["strip_first"] = step["start"] > 0
        elif kind != "Fuse":
            raise ConfigError(f"tokenizer.json has a decoder of type {kind}, which is not known")
    if not found.get("byte_level") and not found.get("blank"):
        raise ConfigError("tokenizer.json has no decoder that says how tokens make text")
    return Decoding(**found)


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's alphabet as a translation: code of the character -> the byte it stands for."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = (b for b in range(256) if b not in visible)
    return {b: b for b in visible} | {256 + i: b for i, b in enumerate(hidden)}


def _bytes_of_tokens(
    inner: tokenizers.Tokenizer, added: Mapping[int, AddedToken], decoding: Decoding
) -> list[bytes]:
    """The bytes of every token, by id; b"" where an id has no token."""
    vocab = inner.get_vocab(with_added_tokens=True)
    alphabet = _byte_alphabet()
    known = frozenset(map(chr, alphabet))
    byte_token = re.compile(r"<0x([0-9A-Fa-f]{2})>")
    out = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, i in vocab.items():
        if decoding.byte_level and i not in added and known.issuperset(token):
            out[i] = token.translate(alphabet).encode("latin-1")
        elif decoding.byte_fallback and (match := byte_token.fullmatch(token)):
            out[i] = bytes.fromhex(match[1])
        elif decoding.blank:
            out[i] = token.replace(decoding.blank, " ").encode("utf-8", "replace")
        else:
            out[i] = token.encode("utf-8", "replace")
    return out


def _content(token: Any) -> str | None:
    """Text of a token as tokenizer_config.json writes it: a string, or {"content": ...}."""
    text = cast("Mapping[str, Any]", token).get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str) or not text:
        return None
    if not _is_unicode(text):
        raise ConfigError(f"tokenizer_config.json: the token {text[:40]!r} is no valid Unicode")
    return text


def _special_tokens(checkpoint: Checkpoint) -> dict[str, str]:
    """Named special tokens, as templates know them: {"bos_token": "<s>", ...}."""
    config = checkpoint.tokenizer_config or {}
    return {f"{n}_token": t for n in _NAMED if (t := _content(config.get(f"{n}_token")))}


def _load_json(checkpoint: Checkpoint) -> tokenizers.Tokenizer:
    """tokenizer.json's tokenizer, completed from tokenizer_config.json as transformers does."""
    path = checkpoint.tokenizer_json
    if not path:
        raise ConfigError(f"{checkpoint.path} has no tokenizer.json")
    inner: Any  # its methods are typed in part only
    try:
        with open(path, encoding="utf-8") as file:
            inner = tokenizers.Tokenizer.from_str(file.read())
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: {file_reason(e)}") from e
    except Exception as e:  # tokenizers raises plain Exception
        raise ConfigError(f"{path} is not a tokenizer that this version can load: {e}") from e
    config = checkpoint.tokenizer_config or {}
    added: Any = config.get("added_tokens_decoder") or {}
    if not isinstance(added, dict) or not all(map(str.isdecimal, cast("dict[str, Any]", added))):
        raise ConfigError("tokenizer_config.json: added_tokens_decoder must map ids to tokens")
    added = cast("dict[str, Any]", added)
    for i, token in sorted(added.items(), key=lambda item: int(item[0])):
        content = _content(token)
        if content and inner.token_to_id(content) is None:
            inner.add_tokens([_added(content, token)])
            if inner.token_to_id(content) != int(i):
                raise ConfigError(
                    f"tokenizer_config.json gives {content!r} the id {i}, but {path} leads to "
                    f"{inner.token_to_id(content)}"
                )
    extra: Any = config.get("additional_special_tokens") or config.get("extra_special_tokens") or ()
    if isinstance(extra, dict):  # name -> token
        extra = cast("dict[str, Any]", extra).values()
    elif not isinstance(extra, list | tuple):
        raise ConfigError("tokenizer_config.json: additional_special_tokens must be a list")
    extra = cast("list[Any]", extra)
    names = [*_special_tokens(checkpoint).values(), *filter(None, map(_content, extra))]
    present = {t.content: t for t in inner.get_added_tokens_decoder().values()}
    for name in names:
        if inner.token_to_id(name) is not None:
            had = present.get(name)
            flags = {} if had is None else {"lstrip": had.lstrip, "rstrip": had.rstrip}
            inner.add_special_tokens([AddedToken(name, normalized=False, special=True, **flags)])
    if inner.post_processor is None or "add_bos_token" in config or "add_eos_token" in config:
        special = _special_tokens(checkpoint)

        def boundary(name: str) -> tuple[str, int] | None:
            token = special.get(f"{name}_token")
            i = inner.token_to_id(token) if token else None
            return (
                (token, i) if config.get(f"add_{name}_token") and token and i is not None else None
            )

        add_boundary_tokens(inner, boundary("bos"), boundary("eos"))
    return inner


def _added(content: str, token: Any) -> AddedToken:
    names = ("lstrip", "rstrip", "normalized", "special")
    flags = cast("dict[str, Any]", token if isinstance(token, dict) else {})
    return AddedToken(content, **{n: bool(flags.get(n, False)) for n in names})


def _shrink(normalizer: Mapping[str, Any] | None) -> int:
    """How many times shorter, at most, normalisation makes a text."""
    steps: list[dict[str, Any]] = (
        [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    )
    keeps = all(step["type"] in ("Replace", "Prepend") for step in steps)
    return 1 if keeps else 4  # NFC joins up to 9 bytes (three jamo) into 3


class Tokenizer:
    """Token ids of text and text of token ids. Thread-safe: nothing changes after construction.

    vocab_size       ids with a meaning are [0, vocab_size)
    control_tokens   text -> id of tokens that structure a prompt; never read from foreign text
    special_tokens   the named ones: {"bos_token": "<s>", ...}
    special_ids      tokens that skip_special_tokens leaves out of texts
    bos_id, eos_id   their ids, if the model has them
    max_token_bytes  no token stands for more bytes of text than this
    decoding         how token bytes make text
    """

    def __init__(self, inner: tokenizers.Tokenizer, special_tokens: Mapping[str, str]):
        inner.no_padding()
        inner.no_truncation()
        description = json.loads(inner.to_str())
        added = inner.get_added_tokens_decoder()
        self.decoding = _decoding(description["decoder"])
        self._bytes = _bytes_of_tokens(inner, added, self.decoding)
        self.special_ids = frozenset(i for i, t in added.items() if t.special)
        self.vocab_size = len(self._bytes)
        self.special_tokens = dict(special_tokens)
        self.control_tokens: Mapping[str, int] = {
            t.content: i for i, t in added.items() if t.special
        }
        self.bos_id = self._id_of("bos_token")
        self.eos_id = self._id_of("eos_token")
        longest = max(map(len, self._bytes), default=1)
        self.max_token_bytes = max(1, longest) * _shrink(description["normalizer"])
        # What the model makes of text it does not know is no control token, whatever its type.
        self._unknown = {inner.token_to_id(t) for t in [self.special_tokens.get("unk_token")] if t}
        self._control_ids = self.special_ids - self._unknown

        nonce = secrets.token_hex(16)
        self._alias = {t: f"\ue000{nonce}:{i}\ue001" for t, i in self.control_tokens.items()}
        inner.encode_special_tokens = True
        cast(Any, inner).add_tokens(  # typed in part only
            [
                AddedToken(
                    self._alias[t.content],
                    lstrip=t.lstrip,
                    rstrip=t.rstrip,
                    normalized=False,
                    special=False,
                )
                for t in added.values()
                if t.special
            ]
        )
        self._real_id = {
            inner.token_to_id(alias): self.control_tokens[t] for t, alias in self._alias.items()
        }
        # Some models have thousands of control tokens: find their beginnings, then look them up.
        self._lengths = sorted({len(t) for t in self.control_tokens}, reverse=True)
        self._head = min(4, *self._lengths, 4)
        self._heads = frozenset(t[: self._head] for t in self.control_tokens)
        firsts = "".join(sorted({t[0] for t in self.control_tokens}))
        self._first = re.compile(f"[{re.escape(firsts)}]" if firsts else "(?!)")
        self._inner = inner

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> "Tokenizer":
        """The checkpoint's own tokenizer: tokenizer.json, else the GGUF file's vocabulary.

        ConfigError if there is none, or one that is not supported.
        """
        if checkpoint.tokenizer_json or checkpoint.gguf_metadata is None:
            inner = _load_json(checkpoint)
        else:
            inner = from_gguf(checkpoint.gguf_metadata)
        return cls(inner, _special_tokens(checkpoint))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of text, control tokens in it recognised; with the model's BOS if it uses one.

        RequestError if text is not valid Unicode. Releases the GIL for most of its time.
        """
        return self.encode_marked(text, self.control_spans(text, 0, len(text)), add_special_tokens)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text in which nothing acts as a control token, and none is added."""
        return self.encode_marked(text, ())

    def control_spans(self, text: str, start: int, end: int) -> list[tuple[int, int]]:
        """Where text[start:end] spells control tokens, leftmost and longest first."""
        spans: list[tuple[int, int]] = []
        while match := self._first.search(text, start, end):
            a = match.start()
            start = a + 1
            if text[a : a + self._head] in self._heads:
                for n in self._lengths:
                    if a + n <= end and text[a : a + n] in self.control_tokens:
                        start = a + n
                        spans.append((a, start))
                        break
        return spans

    def encode_marked(
        self, text: str, spans: Sequence[tuple[int, int]], add_special_tokens: bool = False
    ) -> list[int]:
        """Ids of text where exactly the literals at `spans` act as control tokens.

        spans  half-open, ascending, disjoint; each spells a control token
        """
        if spans:
            parts: list[str] = []
            end = 0
            for a, b in spans:
                parts += (text[end:a], self._alias[text[a:b]])
                end = b
            text = "".join((*parts, text[end:]))
        try:
            # Unlike encode, the batch form releases the GIL, so other threads go on.
            (encoding,) = self._inner.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except (TypeError, UnicodeEncodeError):  # which one depends on the version
            raise RequestError(
                "the text is not valid Unicode: it holds a lone surrogate", param="prompt"
            ) from None
        ids: list[int] = encoding.ids
        own = self._boundary(ids) if add_special_tokens else (0, len(ids))
        if not self._control_ids.isdisjoint(ids[own[0] : own[1]]):
            ids = [*ids[: own[0]], *self._respelled(ids[own[0] : own[1]]), *ids[own[1] :]]
        if spans:
            real = self._real_id
            ids = [real.get(i, i) for i in ids]
        return ids

    def _boundary(self, ids: Sequence[int]) -> tuple[int, int]:
        """The part of ids that the text made, without what the post-processor added."""
        start, end = 0, len(ids)
        while start < end and ids[start] in self._control_ids:
            start += 1
        while end > start and ids[end - 1] in self._control_ids:
            end -= 1
        return start, end

    def _respelled(self, ids: Sequence[int]) -> Iterable[int]:
        """The same text without control tokens that the model's own merges have put together."""
        for i in ids:
            if i in self._control_ids:
                for character in self._bytes[i].decode("utf-8", "replace"):
                    (one,) = self._inner.encode_batch_fast([character], add_special_tokens=False)
                    yield from one.ids
            else:
                yield i

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD. RequestError for unknown ids.

        Equals what Detokenizer gives for the same ids, however they are cut.
        """
        text = b"".join(
            self.token_bytes(i) for i in ids if not (skip_special_tokens and i in self.special_ids)
        ).decode("utf-8", "replace")
        return text[1:] if self.decoding.strip_first and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; may be part of a character."""
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(
                f"token id {token_id} is outside the vocabulary of {self.vocab_size} tokens",
                param="tokens",
            )
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """One token as text, for showing; U+FFFD stands for parts of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """Id of a token by its text in the vocabulary."""
        i = self._inner.token_to_id(token)
        return i if i is not None and i < self.vocab_size else None

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.control_tokens.get(token)

    def too_long(self, text: str, max_tokens: int) -> bool:
        """Whether text has more than max_tokens tokens for sure, told from its length alone."""
        limit = max_tokens * self.max_token_bytes
        # Characters first: encoding a large text only to count its bytes takes memory.
        return len(text) > limit or (len(text) * 4 > limit and _utf8_length(text) > limit)

    def end_tokens(self, checkpoint: Checkpoint) -> frozenset[int]:
        """Ids that end an answer: all that config, generation_config, tokenizer and GGUF name."""
        found: set[int] = set() if self.eos_id is None else {self.eos_id}
        config = checkpoint.config or {}
        for name, source in (
            ("config.json", config),
            ("config.json", config.get("text_config")),
            ("generation_config.json", checkpoint.generation_config),
        ):
            found.update(_end_ids(name, source))
        metadata = checkpoint.gguf_metadata
        if metadata is not None:
            ids = (metadata.get(f"tokenizer.ggml.{n}_token_id") for n in ("eos", "eot", "eom"))
            found.update(int(i) for i in ids if i is not None)
            found.update(i for t in _END_OF_TURN if (i := self.control_tokens.get(t)) is not None)
        return frozenset(i for i in found if 0 <= i < self.vocab_size)


def _end_ids(name: str, config: Any) -> list[int]:
    """eos_token_id of a configuration file of that name: an id, a list of ids, or nothing."""
    given = cast("dict[str, Any]", config).get("eos_token_id") if isinstance(config, dict) else None
    ids = cast("list[Any]", given if isinstance(given, list) else [given])
    for i in ids:
        if i is not None and type(i) is not int:
            raise ConfigError(
                f"{name}: eos_token_id must be a token id or a list of them, got {repr(i)[:40]}"
            )
    return [i for i in ids if i is not None]


def _is_unicode(text: str) -> bool:
    """Whether UTF-8 has it all: JSON can hold halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _utf8_length(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
