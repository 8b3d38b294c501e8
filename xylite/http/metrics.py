"""Prometheus metrics under vLLM's names, for one engine, in a registry of their own.

Counters and gauges of the engine are read from `TextEngine.snapshot()` when they are scraped; what
must be seen per request arrives through `Metrics.on_finished`.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from xylite.runtime.stats import RequestRecord
from xylite.text_engine import TextEngine

FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS = (
    *(0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_TIME = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
QUEUE_TIME = (0.001, 0.005, 0.01, 0.05, 0.1, *REQUEST_TIME)
ITERATION_TOKENS = (1.0, *(float(2**i) for i in range(3, 15)))  # 1, 8, 16, ... 16384
FEW = (1.0, 2.0, 5.0, 10.0, 20.0)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def lengths_up_to(longest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to and including the first that reaches `longest`."""
    bounds: list[float] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            bounds.append(float(step * scale))
            if step * scale >= longest:
                return tuple(bounds)
        scale *= 10


class Histogram:
    """Counts of observations by upper bound. One bisection each: a request brings thousands."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count an observation, once or as often as it was made."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def observe_all(self, values: Iterable[float]) -> None:
        """Count many."""
        bounds, counts = self.bounds, self.counts
        total = 0.0
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self.total += total

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts, as the exposition wants them."""
        seen = 0
        rows: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            seen += count
            rows.append((bound, float(seen)))
        return rows


# name, explanation, bounds (None = token lengths up to the context)
_HISTOGRAMS: tuple[tuple[str, str, tuple[float, ...] | None], ...] = (
    ("time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN),
    ("inter_token_latency_seconds", "Between two tokens of a sequence.", BETWEEN_TOKENS),
    ("request_time_per_output_token_seconds", "Mean after the first token.", BETWEEN_TOKENS),
    ("e2e_request_latency_seconds", "From arrival to the end.", REQUEST_TIME),
    ("request_queue_time_seconds", "Waiting to be planned.", QUEUE_TIME),
    ("request_inference_time_seconds", "From the first plan to the end.", REQUEST_TIME),
    ("request_prefill_time_seconds", "From the first plan to the first token.", REQUEST_TIME),
    ("request_decode_time_seconds", "From the first token to the last.", REQUEST_TIME),
    ("request_prompt_tokens", "Tokens in prompts.", None),
    ("request_generation_tokens", "Tokens given.", None),
    ("request_max_num_generation_tokens", "Tokens of the longest sequence.", None),
    ("request_params_max_tokens", "max_tokens as asked for.", None),
    ("request_prefill_kv_computed_tokens", "Prompt tokens not found in the cache.", None),
    ("request_params_n", "n as asked for.", FEW),
    ("request_num_preemptions", "How often a request gave its blocks back.", FEW),
)

# name in the exposition, key of the snapshot, explanation
_GAUGES = (
    ("num_requests_running", "num_running", "Sequences being computed."),
    ("num_requests_waiting", "num_waiting", "Sequences waiting."),
    ("kv_cache_usage_perc", "kv_usage", "Share of the KV blocks in use, 0 to 1."),
)
_COUNTERS = (
    ("prefix_cache_queries", "prefix_queries", "Prompt tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "prefix_hits", "Prompt tokens found in the prefix cache."),
    ("num_preemptions", "num_preemptions", "Times a sequence gave its blocks back."),
    ("prompt_tokens", "prompt_tokens", "Prompt tokens taken."),
    ("prompt_tokens_cached", "prompt_tokens_cached", "Prompt tokens not computed again."),
    ("generation_tokens", "generation_tokens", "Tokens given."),
    ("corrupted_requests", "corrupted", "Sequences ended by a number that was not finite."),
    ("spec_decode_num_drafts", "spec_num_drafts", "Drafts verified."),
    ("spec_decode_num_draft_tokens", "spec_num_draft_tokens", "Draft tokens verified."),
    ("spec_decode_num_accepted_tokens", "spec_num_accepted_tokens", "Draft tokens accepted."),
)
# What vLLM has no word for.
_OWN_GAUGES = (
    (
        "attention_balance",
        "attention_balance",
        "Load of the slowest core over the mean in the latest iteration's attention, 1 = even.",
    ),
)
_OWN_COUNTERS = (
    ("steps", "num_steps", "Iterations computed."),
    ("step_tokens", "step_tokens", "Tokens computed, of every stage."),
    ("failed_steps", "failed_steps", "Iterations that raised."),
    ("engine_step_seconds", "step_seconds", "Time in iterations."),
    ("host_gap_seconds", "host_gap_seconds", "Time the device waited for the next iteration."),
)
# name, label, key of the snapshot: a mapping from label value to count
_COUNTERS_BY = (
    (
        "request_success",
        "finished_reason",
        "finished",
        "Requests that ended, by reason; one of several sequences counts once, by its worst.",
    ),
    ("admission_rejections", "reason", "rejections", "Requests refused for lack of room."),
)


class Metrics(Collector):
    """The numbers of one application and its engine.

    num_slow_clients  streams closed because nobody read them
    """

    def __init__(self, engine: TextEngine):
        self.registry = CollectorRegistry(auto_describe=False)
        self.num_slow_clients = 0
        self._engine = engine
        self._histograms: dict[str, Histogram] = {}
        self._http_counts: dict[tuple[str, str, str], int] = {}
        self._http_seconds: dict[tuple[str, str], Histogram] = {}
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are fixed, and the engine may not have started yet."""
        return ()

    def count_http(self, method: str, handler: str | None, status: int, seconds: float) -> None:
        """Count an HTTP request; handler is its route's template, None where there was none."""
        method = method if method in METHODS else "other"
        handler = handler or "other"
        key = (method, handler, str(status))
        self._http_counts[key] = self._http_counts.get(key, 0) + 1
        histogram = self._http_seconds.get(key[:2])
        if histogram is None:
            histogram = self._http_seconds[key[:2]] = Histogram(QUEUE_TIME)
        histogram.observe(seconds)

    def on_finished(self, record: RequestRecord) -> None:
        """Observe a request that has ended; called by the engine."""
        observe = self._observe
        observe("time_to_first_token_seconds", record.ttft_s)
        self._histogram("inter_token_latency_seconds").observe_all(record.itl_s)
        if record.num_output > record.n:
            after_first = (record.num_output - record.n) / record.n
            observe("request_time_per_output_token_seconds", record.decode_s / after_first)
        observe("e2e_request_latency_seconds", record.e2e_s)
        observe("request_queue_time_seconds", record.queue_s)
        observe("request_inference_time_seconds", record.inference_s)
        observe("request_prefill_time_seconds", record.prefill_s)
        observe("request_decode_time_seconds", record.decode_s)
        observe("request_prompt_tokens", record.num_prompt)
        observe("request_generation_tokens", record.num_output)
        observe("request_max_num_generation_tokens", -(-record.num_output // record.n))
        observe("request_params_max_tokens", record.max_tokens)
        observe("request_prefill_kv_computed_tokens", record.num_prompt - record.num_cached)
        observe("request_params_n", record.n)
        observe("request_num_preemptions", record.num_preemptions)

    def collect(self) -> Iterator[Metric]:
        """Everything, as of now."""
        names = getattr(self._engine, "model_names", ())
        if names:
            yield from self._of_engine(self._engine.snapshot(), [names[0], "0"])
        yield from self._of_http()

    def _observe(self, name: str, value: float | None) -> None:
        if value is not None:
            self._histogram(name).observe(value)

    def _histogram(self, name: str) -> Histogram:
        histogram = self._histograms.get(name)
        if histogram is None:
            bounds = next(b for known, _, b in _HISTOGRAMS if known == name)
            longest = self._engine.limits.max_model_len
            histogram = self._histograms[name] = Histogram(
                lengths_up_to(longest) if bounds is None else bounds
            )
        return histogram

    def _of_engine(self, now: Mapping[str, Any], own: list[str]) -> Iterator[Metric]:
        labels = ["model_name", "engine"]
        gauges = [(f"vllm:{name}", *rest) for name, *rest in _GAUGES]
        gauges += [(f"xylite:{name}", *rest) for name, *rest in _OWN_GAUGES]
        for name, key, about in gauges:
            gauge = GaugeMetricFamily(name, about, labels=labels)
            gauge.add_metric(own, now.get(key, 0))
            yield gauge
        counters = [(f"vllm:{name}", *rest) for name, *rest in _COUNTERS]
        counters += [(f"xylite:{name}", *rest) for name, *rest in _OWN_COUNTERS]
        for name, key, about in counters:
            counter = CounterMetricFamily(name, about, labels=labels)
            counter.add_metric(own, now.get(key, 0))
            yield counter
        for name, label, key, about in _COUNTERS_BY:
            counter = CounterMetricFamily(f"vllm:{name}", about, labels=[*labels, label])
            counts: Mapping[str, int] = now.get(key, {})
            for value, count in sorted(counts.items()):
                counter.add_metric([*own, value], count)
            yield counter
        yield self._waiting_by_reason(now, labels, own)
        yield self._iteration_tokens(now, labels, own)
        yield self._accepted_by_position(now, labels, own)
        yield self._cache_config(now, labels, own)
        for name, about, _ in _HISTOGRAMS:
            histogram = self._histogram(name)
            family = HistogramMetricFamily(f"vllm:{name}", about, labels=labels)
            family.add_metric(own, histogram.buckets(), histogram.total)
            yield family

    @staticmethod
    def _waiting_by_reason(
        now: Mapping[str, Any], labels: list[str], own: list[str]
    ) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Sequences waiting, for room or for something else.",
            labels=[*labels, "reason"],
        )
        gauge.add_metric([*own, "capacity"], now.get("num_waiting", 0))
        gauge.add_metric([*own, "deferred"], 0)  # nothing else is waited for
        return gauge

    @staticmethod
    def _iteration_tokens(
        now: Mapping[str, Any], labels: list[str], own: list[str]
    ) -> HistogramMetricFamily:
        histogram = Histogram(ITERATION_TOKENS)
        iterations: Mapping[int, int] = now.get("iterations", {})
        for num_tokens, times in iterations.items():
            histogram.observe(num_tokens, times)
        family = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens of an iteration.", labels=labels
        )
        family.add_metric(own, histogram.buckets(), histogram.total)
        return family

    @staticmethod
    def _accepted_by_position(
        now: Mapping[str, Any], labels: list[str], own: list[str]
    ) -> CounterMetricFamily:
        counter = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by place in the draft.",
            labels=[*labels, "position"],
        )
        accepted: Sequence[int] = now.get("spec_accepted_per_pos", ())
        for position, count in enumerate(accepted):
            counter.add_metric([*own, str(position)], count)
        return counter

    def _cache_config(
        self, now: Mapping[str, Any], labels: list[str], own: list[str]
    ) -> GaugeMetricFamily:
        config = self._engine.config
        about = {
            "block_size": str(now.get("block_size", 0)),
            "num_gpu_blocks": str(now.get("num_blocks", 0)),
            "cache_dtype": (
                config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
            ),
            "enable_prefix_caching": str(now.get("enable_prefix_caching", True)),
        }
        gauge = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache; always 1.", labels=[*labels, *about]
        )
        gauge.add_metric([*own, *about.values()], 1)
        return gauge

    def _of_http(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "http_requests", "HTTP requests.", labels=["method", "handler", "status"]
        )
        for key, count in sorted(self._http_counts.items()):
            requests.add_metric(list(key), count)
        yield requests
        seconds = HistogramMetricFamily(
            "http_request_duration_seconds", "HTTP requests.", labels=["method", "handler"]
        )
        for route, histogram in sorted(self._http_seconds.items()):
            seconds.add_metric(list(route), histogram.buckets(), histogram.total)
        yield seconds
        slow = CounterMetricFamily(
            "xylite:slow_client_closed", "Streams closed because nobody read them."
        )
        slow.add_metric([], self.num_slow_clients)
        yield slow
