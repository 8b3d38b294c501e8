"""Small tokenizers that tests build, and an independent reading of the demo model's."""

from collections.abc import Mapping, Sequence
from typing import Any

from xylite.checkpoint import Checkpoint
from xylite.text.tokenizer import Tokenizer


def byte_characters() -> list[str]:
    """GPT-2's character for each byte, in the order of the bytes."""
    shown = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    out, extra = [], 256
    for b in range(256):
        out.append(chr(b) if b in shown else chr(extra))
        extra += b not in shown
    return out


def checkpoint_of(
    metadata: Mapping[str, Any] | None = None,
    *,
    tokenizer_config: Mapping[str, Any] | None = None,
    tokenizer_json: str | None = None,
    config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
) -> Checkpoint:
    return Checkpoint(
        path="test",
        format="gguf" if metadata else "safetensors",
        config=config or {},
        generation_config=generation_config or {},
        tokenizer_config=tokenizer_config or {},
        chat_template=None,
        tokenizer_json=tokenizer_json,
        gguf_metadata=metadata,
        tensors={},
    )


def byte_level_metadata(
    *, control: Sequence[str] = ("<s>", "<|im_start|>", "<|im_end|>"), user: Sequence[str] = ()
) -> dict[str, Any]:
    """Tokens: control, then the 256 bytes, then user-defined ones, then "th" and "the"."""
    tokens = [*control, *byte_characters(), *user, "th", "the"]
    types = [3] * len(control) + [1] * 256 + [4] * len(user) + [1, 1]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["t h", "th e"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
    }


def byte_level(**kwargs: Any) -> Tokenizer:
    metadata = byte_level_metadata(**kwargs)
    named = {"bos_token": metadata["tokenizer.ggml.tokens"][0]}
    return Tokenizer.from_checkpoint(checkpoint_of(metadata, tokenizer_config=named))


SPM_PIECES = (
    *("\u2581", "a", "b", "c", "h", "e", "l", "o", "\u4f60"),
    *("he", "ll", "lo", "hell", "hello", "\u2581hello", "ab", "abc", "bc", "\u2581a", "\u2581ab"),
    *("\u2581\u2581", "aa", "aaaa", "ol", "el"),
)


def spm_metadata(*, add_space_prefix: bool, bytes_too: bool = True) -> dict[str, Any]:
    """<unk>, <s>, </s>, the bytes if wanted, then SPM_PIECES: longer and later ones preferred."""
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)] if bytes_too else []
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *SPM_PIECES]
    # Distinct scores, so that the order of merges is defined.
    scores = [0.0] * (3 + len(byte_tokens))
    scores += [-100.0 / len(p) + i / 1000 for i, p in enumerate(SPM_PIECES)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * len(byte_tokens) + [1] * len(SPM_PIECES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": add_space_prefix,
    }


def sentencepiece(*, add_space_prefix: bool, bytes_too: bool = True) -> Tokenizer:
    metadata = spm_metadata(add_space_prefix=add_space_prefix, bytes_too=bytes_too)
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return Tokenizer.from_checkpoint(checkpoint_of(metadata, tokenizer_config=named))
