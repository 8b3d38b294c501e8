"""What a model is, without its tensors: the frozen ModelSpec, and the leaves of its tree.

`abstract(spec)` of a family gives its Params tree with a `Leaf` in place of each tensor. Loading,
random weights, sharding and shape tests read that tree and know nothing else about the family.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from xylite.errors import ConfigError
from xylite.ops import Activation, AttentionKind

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "divisors"]
ROPE_TYPES: Final = ("default", "linear", "dynamic", "llama3", "yarn", "divisors")

Role = Literal["linear", "gated", "embedding", "norm", "bias"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions in transformers' words.

    rot       leading elements of a head that turn
    divisors  "divisors": one per frequency, as GGUF files of Llama 3 carry them
    attention_factor   factor of cos and sin; None = what yarn's paper gives for `factor`
    """

    theta: float
    rot: int
    type: RopeType = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model's shape. Letters as in ops: H, G, D, C, F, V, L.

    vocab_size    V, rows of the embedding; may exceed the tokenizer's ids (padding)
    max_position  longest sequence the model was made for
    attention     the distinct kinds of attention, each with its own task table
    layer_kinds   [L] which of them each layer has
    kv_groups     layers that share a block table, group by group
    qkv_bias, out_bias, mlp_bias   which linear layers have one
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    act: Activation
    rms_eps: float
    rope: Rope
    tied: bool
    attention: tuple[AttentionKind, ...]
    layer_kinds: tuple[int, ...]
    kv_groups: tuple[tuple[int, ...], ...]
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a leaf that one tensor of the checkpoint fills. `name` is Hugging Face's."""

    name: str
    rows: int


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of a Params tree before it exists.

    axes    names, for sharding: "vocab", "embed", "qkv", "heads", "mlp", "gate_up", "norm"
    role    linear: through `ops.pack_linear`; gated: the same, gate rows then up rows;
            embedding: as linear, and a lookup table; norm: float32; bias: as activations
    parts   tensors whose rows, one after the other, make the leaf
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    role: Role
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class GgufSource:
    """Where a GGUF file keeps a tensor.

    name    its name there
    heads   > 0: rows of each of so many heads were reordered for rotary pairs (x[2i], x[2i + 1]),
            as llama.cpp's converter does for some architectures; loading undoes it
    """

    name: str
    heads: int = 0


def integer(
    config: Mapping[str, Any], name: str, low: int, high: int, default: int | None = None
) -> int:
    """An integer of config.json in [low, high]; `default` if it is absent or null.

    raises   ConfigError naming the field, its bounds and what it is
    """
    value = config.get(name)
    if value is None:
        value = default
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(
            f"config.json: {name} must be an integer from {low} to {high}, got {str(value)[:80]!r}",
            param="model",
        )
    return value


def real(
    config: Mapping[str, Any], name: str, low: float, high: float, default: float | None = None
) -> float:
    """A finite number of config.json in [low, high]; see `integer`."""
    value = config.get(name)
    if value is None:
        value = default
    # NaN fails the comparison, and True is an int that nobody means as a number.
    if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
        return float(value)
    raise ConfigError(
        f"config.json: {name} must be a number from {low:g} to {high:g}, got {str(value)[:80]!r}",
        param="model",
    )


def flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """True or false of config.json; see `integer`."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(
            f"config.json: {name} must be true or false, got {str(value)[:80]!r}", param="model"
        )
    return value


def rope_from_config(config: Mapping[str, Any], head_dim: int, max_position: int) -> Rope:
    """Rotary positions, from rope_parameters (new files) or rope_theta and rope_scaling."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"config.json: rope_scaling must be an object, got {str(given)[:80]!r}", param="model"
        )
    theta = real({**config, **given}, "rope_theta", 1.0, 1e15, 10000.0)
    rot = _rot(config, {**config, **given}, head_dim)
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "default":
        return Rope(theta=theta, rot=rot)
    if kind not in ROPE_TYPES:
        raise ConfigError(
            f"config.json: rope type {str(kind)[:80]!r} is not supported "
            f"(supported: {', '.join(ROPE_TYPES)})",
            param="model",
        )
    if kind == "divisors":
        return Rope(theta=theta, rot=rot, type="divisors", divisors=_divisors(given, rot // 2))
    original = integer(
        given,
        "original_max_position_embeddings",
        1,
        2**31,
        integer(config, "original_max_position_embeddings", 1, 2**31, max_position),
    )
    # Yarn files without a factor mean the ratio of the two lengths.
    factor = real(given, "factor", 1e-3, 1e6, max_position / original if kind == "yarn" else None)
    made = Rope(
        theta=theta,
        rot=rot,
        type=kind,
        factor=factor,
        original_max_position=original,
        low_freq_factor=real(given, "low_freq_factor", 1e-6, 1e6, 1.0),
        high_freq_factor=real(given, "high_freq_factor", 1e-6, 1e6, 4.0),
        beta_fast=real(given, "beta_fast", 1e-6, 1e6, 32.0),
        beta_slow=real(given, "beta_slow", 1e-6, 1e6, 1.0),
        attention_factor=(
            real(given, "attention_factor", 0, 1e6)
            if given.get("attention_factor") is not None
            else None
        ),
        mscale=real(given, "mscale", 0, 1e6, 0.0),
        mscale_all_dim=real(given, "mscale_all_dim", 0, 1e6, 0.0),
        truncate=flag(given, "truncate", True),
    )
    if kind == "llama3" and not made.low_freq_factor < made.high_freq_factor:
        raise ConfigError(
            f"config.json: low_freq_factor ({made.low_freq_factor:g}) must be below "
            f"high_freq_factor ({made.high_freq_factor:g})",
            param="model",
        )
    if (kind in ("yarn", "dynamic") and theta <= 1) or (kind == "dynamic" and rot <= 2):
        raise ConfigError(
            f"config.json: rope type {kind!r} needs rope_theta above 1 and more than 2 rotary "
            f"elements, got {theta:g} and {rot}",
            param="model",
        )
    return made


def _divisors(given: Mapping[str, Any], number: int) -> tuple[float, ...]:
    values = given.get("divisors")
    if (
        isinstance(values, list)
        and len(values) == number
        and all(isinstance(d, float) and 0 < d < math.inf for d in values)
    ):
        return tuple(values)
    raise ConfigError(
        f"rope_freqs.weight: must hold {number} positive numbers, got {str(values)[:80]}",
        param="model",
    )


def _rot(config: Mapping[str, Any], given: Mapping[str, Any], head_dim: int) -> int:
    """Elements of a head that turn, an even number: GGUF counts them, config.json has a share."""
    share = real(given, "partial_rotary_factor", 0.0, 1.0, 1.0)
    rot = integer(config, "rope_dimension_count", 0, head_dim, int(head_dim * share))
    if rot % 2:
        raise ConfigError(
            f"config.json: {rot} of head_dim {head_dim} elements turn by position; the number must "
            "be even",
            param="model",
        )
    return rot
