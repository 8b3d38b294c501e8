"""`xylite tune`: what the linear layers of a table leave open, measured for one model.

    products   the linear layers of a model, as one pass calls them
    measure    the fastest candidate for one of them and one range of rows

What the candidates are, how one is timed and where the choice is kept is each device's affair, see
`ops.Tuner`. No candidate changes a result by more than the order of its sums.
"""

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from xylite import models, ops, tree
from xylite.checkpoint import open_checkpoint
from xylite.config import EngineConfig
from xylite.errors import ConfigError, XyliteError
from xylite.models import served, weights
from xylite.models.spec import Leaf, ModelSpec
from xylite.ops import Batch, Ops, Product, Tuner

MOST_ROWS: Final = 8192  # of an iteration: the largest token budget that is chosen by itself
MOST_LOGIT_ROWS: Final = 256
LEAST_GAIN: Final = 1.03  # less is noise
LONGEST_S: Final = 0.25  # of one product: beyond, its larger ranges of rows are left as they are
MIN_ROUNDS: Final = 5
HOPELESS: Final = 1.5  # times the fastest, after two rounds

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Result:
    """What was found for one product and one range of rows (last 0 = and more).

    choice  None: what is used without measuring was the fastest
    before_s, after_s  time of one call with that, and with the choice
    """

    name: str
    format: str
    n: int
    k: int
    rows: tuple[int, int]
    before: str
    choice: str | None
    before_s: float
    after_s: float

    @property
    def gain(self) -> float:
        """By how much it is faster now: 0.1 = 10 %."""
        return self.before_s / self.after_s - 1


def tune(config: EngineConfig, budget_s: float = 0.4) -> tuple[Path, Iterator[Result]]:
    """Load the model and measure; each result is in the file once it is given.

    config    model, device, dtype, load_format, quantization and num_threads count
    budget_s  for one product and range of rows, beside what compiling takes
    returns   the file, and the results as they come
    raises    ConfigError: a setting or a checkpoint does not work out, or the device has nothing
              to tune
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    table = ops.load(config.device)
    tuner = table.tuner
    if tuner is None:
        raise ConfigError(
            f"device {table.name} has nothing to tune: its linear layers are torch's own",
            param="device",
        )
    checkpoint = open_checkpoint(config.model, with_weights=config.load_format != "dummy")
    family, spec = models.describe(checkpoint.config, checkpoint.path)
    dtype = weights.resolve_dtype(checkpoint, config.dtype)
    table = served.quantising(table, config.quantization)
    params = served.load(config, checkpoint, (family, spec), table, dtype)
    found = products(family, spec, params, table, table.act_dtype(dtype))
    return tuner.path, _measure_all(tuner, found, budget_s)


def _measure_all(tuner: Tuner, found: Sequence[Product], budget_s: float) -> Iterator[Result]:
    with torch.inference_mode():
        for product in found:
            for bucket in tuner.buckets(product):
                result = measure(tuner, product, bucket, budget_s)
                if result is None:
                    break
                yield result
                if result.before_s > LONGEST_S:
                    break


# The linear layers of a model


class _Recorder:
    """A forward pass over the abstract tree: shapes only, and every linear layer is noted."""

    def __init__(self, packed: dict[int, Any], spec: ModelSpec):
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []
        self.most = MOST_ROWS
        self._packed = packed
        self._spec = spec

    def embed(self, leaf: Leaf, tokens: Tensor) -> Tensor:
        return _shape(leaf.shape[-1])

    def linear(
        self,
        x: Tensor,
        w: Leaf,
        bias: Any = None,
        *,
        residual: Any = None,
        act: Any = None,
        cap: float = 0.0,
    ) -> Tensor:
        n, k = w.shape
        call = n, k, bias is not None, residual is not None, act, cap, self.most
        self.calls.append((self._packed[id(w)], call))
        return _shape(n // 2 if act else n)

    def grouped_linear(self, x: Tensor, w: Leaf, *args: Any, **kwargs: Any) -> Tensor:
        """Experts use the rows of a plain layer of their shape, if it has any."""
        return _shape(w.shape[-2] // 2 if kwargs.get("act") else w.shape[-2])

    def add_rms_norm(self, x: Tensor, residual: Any, *rest: Any) -> tuple[Tensor, Tensor]:
        return x, x

    def qk_norm_rope_append(self, qkv: Tensor, positions: Any, rope: Any, kv: Any, *args: Any,
                            **kwargs: Any) -> tuple[Tensor, Any]:  # fmt: skip
        return qkv, kv

    def attention(self, *args: Any) -> Tensor:
        return _shape(self._spec.num_heads * self._spec.head_dim)

    def gated_act(self, x: Tensor, kind: Any) -> Tensor:
        return _shape(x.shape[1] // 2)


def _shape(width: int) -> Tensor:
    return torch.empty(1, width, device="meta")


def products(
    family: ModuleType, spec: ModelSpec, params: Any, table: Ops, dtype: torch.dtype
) -> list[Product]:
    """The linear layers of a model in the order of a pass, equal ones as one; dtype is that of
    activations."""
    abstract, packed = family.abstract(spec), {}

    def note(leaf: Leaf, made: Any) -> None:
        packed[id(leaf)] = made

    tree.map(note, abstract, params)
    recorder = _Recorder(packed, spec)
    names = ("embed", "linear", "grouped_linear", "add_rms_norm", "qk_norm_rope_append",
             "attention", "gated_act")  # fmt: skip
    shapes = replace(table, **{name: getattr(recorder, name) for name in names})
    one = torch.empty(1, dtype=torch.int32, device="meta")
    skipped = ("tasks", "num_last")
    arrays: dict[str, Any] = {f.name: one for f in fields(Batch) if f.name not in skipped}
    batch = Batch(**arrays)
    hidden, _ = family.forward(abstract, (None,) * spec.num_layers, batch, spec, shapes)
    recorder.most = MOST_LOGIT_ROWS
    family.logits(abstract, hidden, spec, shapes)
    alike: dict[tuple[Any, ...], list[Any]] = {}
    assert table.tuner is not None
    for weight, call in recorder.calls:
        alike.setdefault((table.tuner.format_of(weight), *call), []).append(weight)
    return [
        Product(tuple(made), n, k, bias, residual, act, cap, most, dtype)
        for (_, n, k, bias, residual, act, cap, most), made in alike.items()
    ]


# One choice


def measure(
    tuner: Tuner,
    product: Product,
    bucket: tuple[int, int],
    budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Result | None:
    """The fastest choice for this product and range of rows, kept in the tuner's file; None if
    there is nothing to choose, or nothing that works.

    Candidates are timed by turns, so that a disturbance hits all alike, and the best of them once
    more in pairs with what is used without measuring: of many that are equally fast, one always
    seems faster than the others.
    """
    first = list(tuner.candidates(product, bucket))
    if len(first) < 2:
        return None

    def timed(choices: Iterable[Any], budget_s: float) -> dict[Any, float]:
        return _least(lambda c: tuner.seconds(product, bucket, c), choices, budget_s, clock)

    builtin, seen = first[0], dict.fromkeys(first)
    times = timed(first, budget_s / 2)
    best = min(times, key=times.__getitem__)
    while near := [c for c in tuner.near(product, best) if c not in seen]:
        seen.update(dict.fromkeys(near))
        times = timed((best, *near), budget_s / 2)
        before, best = best, min(times, key=times.__getitem__)
        if best == before:
            break
    if times[best] == math.inf:
        log.warning("no candidate works for %s", _title(tuner, product))
        return None
    before_s = after_s = times[best]
    if best != builtin:
        before_s, after_s = _pair(
            lambda c: tuner.seconds(product, bucket, c), builtin, best, budget_s / 2, clock
        )
        if before_s < after_s * LEAST_GAIN:
            best, after_s = builtin, before_s
    try:
        tuner.keep(product, bucket, None if best == builtin else best)
    except OSError as e:
        raise XyliteError(f"{tuner.path} cannot be written: {e.strerror}") from None
    return Result(
        name=_name(product),
        format=tuner.format_of(product.weights[0]),
        n=product.n,
        k=product.k,
        rows=bucket,
        before=tuner.describe(builtin),
        choice=None if best == builtin else tuner.describe(best),
        before_s=before_s,
        after_s=after_s,
    )


def _least(
    seconds: Callable[[Any], float],
    choices: Iterable[Any],
    budget_s: float,
    clock: Callable[[], float],
) -> dict[Any, float]:
    """Least time of each choice, by turns; those that are far behind drop out early."""
    least = dict.fromkeys(choices, math.inf)
    for choice in least:  # what is compiled at the first call does not count
        seconds(choice)
    end, rounds = clock() + budget_s, 0
    left = list(least)
    while rounds < MIN_ROUNDS or clock() < end:
        for choice in left:
            least[choice] = min(least[choice], seconds(choice))
        rounds += 1
        fastest = min(least.values())
        if fastest == math.inf:
            break
        if rounds >= 2:
            left = [c for c in left if least[c] <= fastest * HOPELESS]
    return least


def _pair(
    seconds: Callable[[Any], float],
    first: Any,
    second: Any,
    budget_s: float,
    clock: Callable[[], float],
) -> tuple[float, float]:
    """Times of two choices, whose ratio is the smaller of two: that of their least times, and the
    median over pairs measured one right after the other, now this first, now that."""
    pairs, end = [], clock() + budget_s
    while len(pairs) < MIN_ROUNDS or clock() < end:
        if len(pairs) % 2:
            b, a = seconds(second), seconds(first)
        else:
            a, b = seconds(first), seconds(second)
        pairs.append((a, b))
    after = min(b for _, b in pairs)
    ratio = min(min(a for a, _ in pairs) / after, statistics.median(a / b for a, b in pairs))
    return after * ratio, after


def _name(product: Product) -> str:
    parts = ["gated" if product.act else "linear"]
    parts += ["bias"] * product.bias + ["residual"] * product.residual + ["cap"] * bool(product.cap)
    return "+".join(parts)


def _title(tuner: Tuner, product: Product) -> str:
    form = tuner.format_of(product.weights[0])
    return f"{_name(product)} {form} {product.n} x {product.k}"


# What the command prints


def lines(results: Iterable[Result]) -> Iterator[str]:
    """A table with a line per result, and what all came to."""
    yield (
        f"{'op':<12} {'format':<9} {'N':>6} {'K':>6} {'rows':>11} {'before':>10} {'after':>10} "
        f"{'gain':>6}  choice"
    )
    count = faster = 0
    for r in results:
        count += 1
        faster += r.choice is not None
        first, last = r.rows
        rows = f"{first}-{last}" if last else f"{first}-"
        gain = f"{100 * r.gain:.0f} %" if r.choice else "-"
        yield (
            f"{r.name:<12} {r.format:<9} {r.n:>6} {r.k:>6} {rows:>11} {_time(r.before_s):>10} "
            f"{_time(r.after_s):>10} {gain:>6}  {r.choice or f'as built in ({r.before})'}"
        )
    yield f"{faster} of {count} choices are faster than the built-in ones."


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < math.inf else "-"
