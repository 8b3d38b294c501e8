"""A `tokenizers.Tokenizer` from the vocabulary that a GGUF file carries.

Two kinds exist: "gpt2", byte-level BPE whose splitting rule is only named in the file, and "llama",
SentencePiece BPE, whose merges have to be rebuilt from the scores of the pieces.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from xylite.errors import ConfigError

# Token types of the GGUF specification.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

BLANK = "\u2581"  # SentencePiece's visible blank

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _TAIL
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _TAIL
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _TAIL
)


@dataclass(frozen=True, slots=True)
class _Splitting:
    """How text is cut into words before BPE: patterns applied one after the other.

    ignore_merges  a word that is a token itself is taken whole
    add_bos        what the file means when it does not say
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


# Names that llama.cpp writes into tokenizer.ggml.pre, by the rule they mean.
_SPLITTINGS: Mapping[str, _Splitting] = {
    name: splitting
    for names, splitting in (
        (
            ("default",),
            _Splitting((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
        ),
        (("gpt-2", "phi-2", "mpt", "olmo", "jais"), _Splitting((_GPT2,))),
        (
            ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
            _Splitting((r"\p{N}", _GPT2)),
        ),
        (
            ("llama-bpe", "llama3", "llama-v3", "falcon3"),
            _Splitting((_LLAMA3,), ignore_merges=True, add_bos=True),
        ),
        (("dbrx", "smaug-bpe", "chatglm-bpe"), _Splitting((_LLAMA3,))),
        (("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), _Splitting((_QWEN2,))),
        (("tekken",), _Splitting((_TEKKEN,), ignore_merges=True, add_bos=True)),
        (("gpt-4o", "llama4"), _Splitting((_GPT4O,))),
        (
            ("deepseek-v3",),
            _Splitting((r"\p{N}{1,3}", r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3)),
        ),
    )
    for name in names
}


def _field(metadata: Mapping[str, Any], name: str) -> Any:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        raise ConfigError(f"the GGUF file has no tokenizer.ggml.{name}, so it has no tokenizer")
    return value


def _token_types(metadata: Mapping[str, Any], num_tokens: int) -> list[int]:
    """The type of each token; all are normal where the file does not say."""
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return [NORMAL] * num_tokens
    try:
        return [int(t) for t in types]
    except (TypeError, ValueError):
        raise ConfigError("tokenizer.ggml.token_type must be an array of numbers") from None


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise ConfigError(f"tokenizer.ggml.{name} must be true or false, got {str(value)[:40]!r}")
    return value


def _template(bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> Any:
    single = [f"{t[0]}:0" if t else "" for t in (bos, None, eos)]
    single[1] = "$A:0"
    pair = [*single, *(s.replace(":0", ":1").replace("$A", "$B") for s in single)]
    return processors.TemplateProcessing(
        single=[s for s in single if s],
        pair=[s for s in pair if s],
        special_tokens=[t for t in dict.fromkeys((bos, eos)) if t],
    )


def add_boundary_tokens(
    tokenizer: Tokenizer, bos: tuple[str, int] | None, eos: tuple[str, int] | None
) -> None:
    """Make `tokenizer` put bos before and eos after a text that asks for special tokens."""
    tokenizer.post_processor = _template(bos, eos)


def spm_merges(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """BPE merges in order of preference, from the scores of SentencePiece pieces.

    SentencePiece joins the neighbours whose union has the best score. So every way to cut a piece
    into two pieces is a merge, ranked by the piece's score; ties go by position in the vocabulary.
    """
    ids = {t: i for i, t in enumerate(tokens) if types[i] in (NORMAL, USER_DEFINED)}
    # Runs of blanks and line feeds are user-defined in Gemma's vocabulary, yet made by merging.
    mergeable = [
        i
        for i, t in enumerate(tokens)
        if len(t) > 1
        and (types[i] == NORMAL or (types[i] == USER_DEFINED and not t.strip(BLANK + "\n\t")))
    ]
    mergeable.sort(key=lambda i: -scores[i])
    merges: list[tuple[str, str]] = []
    for i in mergeable:
        cuts = ((tokens[i][:k], tokens[i][k:]) for k in range(1, len(tokens[i])))
        found = [(a, b) for a, b in cuts if a in ids and b in ids]
        merges += sorted(found, key=lambda cut: (ids[cut[0]], ids[cut[1]]))
    return merges


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre") or "default"
    splitting = _SPLITTINGS.get(name)
    if splitting is None:
        raise ConfigError(
            f"tokenizer.ggml.pre {name!r} is not known; known are {', '.join(sorted(_SPLITTINGS))}"
        )
    merges = [tuple(m.split(" ", 1)) for m in _field(metadata, "merges")]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={t: i for i, t in enumerate(tokens)},
            merges=merges,
            ignore_merges=splitting.ignore_merges,
        )
    )
    splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in splitting.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splitting.add_bos


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> Tokenizer:
    vocab: dict[str, int] = {}
    for i, token in enumerate(tokens):
        vocab.setdefault(token, i)
    scores = list(_field(metadata, "scores"))
    if len(scores) != len(tokens):
        raise ConfigError(
            f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens"
        )
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=spm_merges(tokens, types, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=BYTE in types,
        )
    )
    prefix = _flag(metadata, "add_space_prefix", True)
    to_blank = normalizers.Replace(" ", BLANK)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(BLANK), to_blank]) if prefix else to_blank
    )
    steps: list[Any] = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a GGUF file; ConfigError naming what is missing or not known."""
    model: str = _field(metadata, "model")
    tokens: list[str] = list(_field(metadata, "tokens"))
    types = _token_types(metadata, len(tokens))
    if len(types) != len(tokens):
        raise ConfigError(
            f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    for name in ("bos", "eos", "unknown"):
        i = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if i is not None and not 0 <= i < len(tokens):
            raise ConfigError(
                f"tokenizer.ggml.{name}_token_id is {i}, outside the {len(tokens)} tokens"
            )
    tokenizer: Any  # its methods are typed in part only
    try:
        if model == "gpt2":
            tokenizer, add_bos = _byte_level(metadata, tokens)
        elif model == "llama":
            tokenizer, add_bos = _sentencepiece(metadata, tokens, types), True
        else:
            raise ConfigError(f"tokenizer.ggml.model {model!r} is not known; known: gpt2, llama")
    except ConfigError:
        raise
    except Exception as e:  # tokenizers raises plain Exception for a vocabulary that does not fit
        raise ConfigError(f"the GGUF file's tokenizer cannot be built: {e}") from e
    control = [t for t, y in zip(tokens, types, strict=True) if y == CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    user = [
        t
        for t, y in zip(tokens, types, strict=True)
        if y == USER_DEFINED and (model == "gpt2" or t.strip(BLANK + "\n\t"))
    ]
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in user])

    def boundary(name: str, default: bool) -> tuple[str, int] | None:
        i: int | None = metadata.get(f"tokenizer.ggml.{name}_token_id")
        wanted = _flag(metadata, f"add_{name}_token", default)
        return (tokens[int(i)], int(i)) if wanted and i is not None else None

    add_boundary_tokens(tokenizer, boundary("bos", add_bos), boundary("eos", False))
    return tokenizer
