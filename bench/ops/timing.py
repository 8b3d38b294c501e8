"""How long something takes on a device, and the most that the device can do."""

import itertools
import statistics
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from xylite import tree
from xylite.ops import Ops

Run = Callable[[], Any]
# More than the last cache of any chip here (H200: 50 MB, Ascend 910B: 192 MB).
FLUSH_BYTES: Final = 256 << 20
MIN_REPEATS, MAX_REPEATS = 5, 200
ROOFLINE_BUDGETS: Final = 8  # of one figure


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call: median and least of `repeats`.

    replayed  a recorded graph was timed, so launches by the host are not in it
    """

    median: float
    least: float
    repeats: int
    replayed: bool = False


def num_bytes_of(leaf: Any) -> int:
    """Bytes of a weight as a table packed it."""
    return sum(t.nbytes for t in tree.leaves(leaf) if isinstance(t, Tensor))


class Clock:
    """Times calls on one device: by the device's own events where it has them, its caches flushed
    before each call; else by the host's clock.

    budget_s  about how long the repeats of one figure may take
    """

    def __init__(self, device: torch.device, budget_s: float = 0.2):
        self.device = device
        self.budget_s = budget_s
        self._api: Any = None if device.type == "cpu" else getattr(torch, device.type)
        self._flush: Tensor | None = None
        if self._api is not None:
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def synchronize(self) -> None:
        """Wait until everything submitted has run."""
        if self._api is not None:
            self._api.synchronize()

    def time(self, run: Run, budget_s: float | None = None, *, replay: bool = True) -> Timing:
        """Median of repeats after a warm-up; of the replays of a recording, where that works.

        replay  False: it waits for the host, so it is not even tried
        """
        budget_s = self.budget_s if budget_s is None else budget_s
        run()
        self.synchronize()
        if self._api is None:
            return self._on_host(run, budget_s)
        recorded = self._recorded(run) if replay else None
        return self._on_device(recorded or run, budget_s, recorded is not None)

    def _on_host(self, run: Run, budget_s: float) -> Timing:
        seconds: list[float] = []
        end = time.perf_counter() + budget_s
        while len(seconds) < MAX_REPEATS:
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
            late = time.perf_counter() > end
            # What takes seconds is not repeated for long.
            if late and (len(seconds) >= MIN_REPEATS or sum(seconds) > 4 * budget_s):
                break
        return Timing(statistics.median(seconds), min(seconds), len(seconds))

    def _on_device(self, run: Run, budget_s: float, replayed: bool) -> Timing:
        estimate = self._batch(run, 3)
        wanted = int(budget_s / max(statistics.median(estimate), 1e-6))
        seconds = self._batch(run, min(max(wanted, MIN_REPEATS), MAX_REPEATS))
        return Timing(statistics.median(seconds), min(seconds), len(seconds), replayed)

    def _batch(self, run: Run, repeats: int) -> list[float]:
        assert self._flush is not None
        pairs = [
            tuple(self._api.Event(enable_timing=True) for _ in range(2)) for _ in range(repeats)
        ]
        for start, end in pairs:
            self._flush.zero_()
            start.record()
            run()
            end.record()
        self.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]

    def _recorded(self, run: Run) -> Run | None:
        """What replays `run`; None if it cannot be recorded (it waits for the host, say)."""
        graph_of = {"cuda": "CUDAGraph", "npu": "NPUGraph"}.get(self.device.type)
        if graph_of is None:
            return None
        try:
            side = self._api.Stream()
            side.wait_stream(self._api.current_stream())
            with self._api.stream(side):
                run()
            self._api.current_stream().wait_stream(side)
            graph = getattr(self._api, graph_of)()
            with self._api.graph(graph):
                run()
            graph.replay()
            self.synchronize()
        except RuntimeError:
            return None
        return graph.replay


@dataclass(frozen=True, slots=True)
class Roofline:
    """The most that was measured on the device.

    flops      FLOP/s by weight format, "" = the dtype
    bandwidth  bytes/s of memory
    cache      bytes/s of the caches next to the cores; 0 = not measured, memory's count
    """

    flops: Mapping[str, float]
    bandwidth: float
    cache: float = 0.0

    def seconds(
        self, flops: float, num_bytes: float, form: str = "", *, cached_bytes: float = 0.0
    ) -> float:
        """The least time that so much work and traffic can take, all at the same time."""
        peak = self.flops.get(form, self.flops[""])
        if not self.cache:
            num_bytes, cached_bytes = num_bytes + cached_bytes, 0.0
        cached = cached_bytes / self.cache if cached_bytes else 0.0
        return max(flops / peak, num_bytes / self.bandwidth, cached)

    def only(self, forms: Container[str]) -> "Roofline":
        """The same for these formats."""
        flops = {form: rate for form, rate in self.flops.items() if form in forms}
        return Roofline(flops, self.bandwidth, self.cache)

    def or_more(self, other: "Roofline") -> "Roofline":
        """The greater of each."""
        flops = dict(self.flops)
        for form, rate in other.flops.items():
            flops[form] = max(rate, flops.get(form, 0.0))
        bandwidth = max(self.bandwidth, other.bandwidth)
        return Roofline(flops, bandwidth, max(self.cache, other.cache))


def roofline(ops: Ops, clock: Clock, dtype: torch.dtype, formats: Mapping[str, Any]) -> Roofline:
    """Measure it: the least time of torch and of the table's own kernels, at what suits them.

    formats  name -> packer; only those that compute in integers have a peak of their own
    """
    on_host = clock.device.type == "cpu"
    tiny = on_host and ops.device.kind != "cpu"  # a stand-in: nothing here is about speed
    integers = ("int8", "int4") if ops.device.kind == "cpu" else ("w8a8",)
    sizes = [(64, 64, 64)] if tiny else [(8192, 8192, 8192)]
    if ops.device.kind == "cpu":
        sizes = [(64, 2048, 512), (384, 512, 512)]  # what stays in cache
    flops: dict[str, float] = {}
    for (m, n, k), (form, pack) in itertools.product(sizes, formats.items()):
        if form not in ("", *integers):
            continue
        x = torch.randn(m, k, device=clock.device).to(ops.act_dtype(dtype))
        w = torch.randn(n, k, device=clock.device).to(dtype)
        packed = pack(w.clone())
        seconds = [_least(clock, partial(ops.linear, x, packed))]
        if form == "":
            seconds += [_torch_matmul(clock, x.to(t), w.to(t)) for t in {x.dtype, dtype}]
        elif form == "w8a8" and not on_host:
            seconds += _torch_int8(clock, n)
        flops[form] = max(2 * m * n * k / min(seconds), flops.get(form, 0.0))
    return Roofline(flops, _bandwidth(ops, clock, dtype, tiny))


def _least(clock: Clock, run: Run) -> float:
    """Least time of a call, tried for longer than others: a limit that others pull down for a
    moment is none."""
    end = time.perf_counter() + ROOFLINE_BUDGETS * clock.budget_s
    least = clock.time(run).least
    while time.perf_counter() < end:
        least = min(least, clock.time(run).least)
    return least


def _torch_matmul(clock: Clock, x: Tensor, w: Tensor) -> float:
    return _least(clock, lambda: x @ w.T)


def _torch_int8(clock: Clock, size: int) -> list[float]:
    a, b = (
        torch.randint(-128, 128, (size, size), dtype=torch.int8, device=clock.device)
        for _ in range(2)
    )
    multiply: Any = torch.ops.aten._int_mm
    try:
        return [_least(clock, lambda: multiply(a, b.T))]
    except RuntimeError:  # not on this device
        return []


def _copy(clock: Clock, num_bytes: int) -> float:
    source = torch.ones(num_bytes, dtype=torch.int8, device=clock.device)
    target = torch.empty_like(source)
    return _least(clock, lambda: target.copy_(source))


def _bandwidth(ops: Ops, clock: Clock, dtype: torch.dtype, tiny: bool) -> float:
    """Of a copy (read and write), and of one row times a large weight (read)."""
    num_bytes = 1 << 20 if tiny else 1 << 28 if clock.device.type == "cpu" else 1 << 30
    copied = 2 * num_bytes / _copy(clock, num_bytes)
    k = 64 if tiny else 1024
    n = num_bytes // dtype.itemsize // k
    packed = ops.pack_linear(torch.randn(n, k, device=clock.device).to(dtype))
    one = torch.randn(1, k, device=clock.device).to(ops.act_dtype(dtype))
    seconds = _least(clock, lambda: ops.linear(one, packed))
    return max(copied, num_bytes_of(packed) / seconds)
