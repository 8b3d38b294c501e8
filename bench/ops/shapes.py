"""Shapes of models whose ops are measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Experts:
    """A layer's experts: a token goes to `top` of `num`, each of width `inner`."""

    num: int
    top: int
    inner: int


@dataclass(frozen=True, slots=True)
class Shape:
    """One model's layer. Letters as in xylite.ops: C, H, G, D, F, V; rope turns whole heads."""

    name: str
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    layers: int
    qk_norm: bool = False
    experts: Experts | None = None

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def weights(self) -> Mapping[str, tuple[int, int, bool]]:
        """Linear layers by name: N, K, and whether gate and up rows make one output."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (q + 2 * kv, self.width, False),
            "out": (self.width, q, False),
            "gate_up": (2 * self.inner, self.width, True),
            "down": (self.width, self.inner, False),
        }

    def llama_config(self) -> dict[str, Any]:
        """config.json of a Llama of this geometry, embedding and head shared as SmolLM2's are."""
        return {
            "model_type": "llama",
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.inner,
            "vocab_size": self.vocab,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": self.name in ("demo", "tiny"),
        }


# From the models' config.json. "demo" is SmolLM2-135M, which has no experts: those are made up, as
# is all of "tiny".
SHAPES: Final[Mapping[str, Shape]] = {
    s.name: s
    for s in (
        Shape("llama-3-8b", 4096, 32, 8, 128, 14336, 128256, 32),
        Shape("qwen3-8b", 4096, 32, 8, 128, 12288, 151936, 36, qk_norm=True),
        Shape("qwen3-32b", 5120, 64, 8, 128, 25600, 151936, 64, qk_norm=True),
        Shape(
            "qwen3-30b-a3b", 2048, 32, 4, 128, 6144, 151936, 48, True, Experts(128, 8, 768)
        ),
        Shape("demo", 576, 9, 3, 64, 1536, 49152, 30, False, Experts(8, 2, 384)),
        Shape("tiny", 128, 3, 1, 64, 96, 160, 2, True, Experts(4, 2, 32)),
    )
}  # fmt: skip
