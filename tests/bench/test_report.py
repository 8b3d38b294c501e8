"""Numbers and table of `bench serve`."""

import pytest

from xylite.bench.client import Outcome
from xylite.bench.report import errors, measure, table

METRICS = ("ttft", "tpot", "itl", "e2el")


def outcome(start: float, ttft: float, gaps: list[float], **changes: object) -> Outcome:
    fields = {"input_tokens": 10, "output_tokens": len(gaps) + 1, "latency": ttft + sum(gaps)}
    return Outcome(start=start, ttft=ttft, itls=gaps, **{**fields, **changes})


RUN = [
    outcome(100.0, 0.1, [0.01] * 10),
    outcome(100.1, 0.3, [0.02] * 10, cached_tokens=4),
    outcome(101.5, 0.2, []),
    Outcome(start=100.0, error="HTTP 503: full"),
]


def measured(**changes: object) -> dict[str, object]:
    options = {"metrics": METRICS, "percentiles": (50, 99.9), "goodput": {}}
    return measure(RUN, 2.0, **{**options, **changes})


def test_totals_count_successes_only_and_come_from_usage():
    result = measured()
    assert (result["completed"], result["failed"]) == (3, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 23)
    assert result["total_cached_tokens"] == 4
    assert result["output_throughput"] == 11.5
    assert result["total_token_throughput"] == 26.5
    assert result["request_throughput"] == 1.5


def test_latencies_are_in_ms_and_an_answer_of_one_token_has_no_tpot():
    result = measured()
    assert result["mean_ttft_ms"] == pytest.approx(200)
    assert result["p50_ttft_ms"] == pytest.approx(200)
    assert result["mean_tpot_ms"] == pytest.approx(15)
    assert result["mean_itl_ms"] == pytest.approx(15)
    assert result["median_e2el_ms"] == pytest.approx(200)
    assert result["p99.9_ttft_ms"] == pytest.approx(300, abs=0.3)


def test_peaks_are_within_one_second_and_at_one_moment():
    result = measured()
    assert result["max_output_tokens_per_s"] == 22
    assert result["max_concurrent_requests"] == 2


@pytest.mark.parametrize("seconds", [0.41, 0.9, 1.05, 1.9, 2.0, 7.7])
def test_the_peak_is_never_below_the_mean(seconds: float):
    gap = (seconds - 0.1) / 20
    run = [outcome(100.0, 0.1, [gap] * 20), outcome(100.0, 0.1, [gap] * 20)]
    result = measure(run, seconds, metrics=METRICS, percentiles=(99,), goodput={})
    assert result["max_output_tokens_per_s"] >= result["output_throughput"]
    assert result["max_output_tokens_per_s"] < 2.5 * result["output_throughput"]


def test_goodput_counts_requests_that_keep_every_limit():
    assert measured()["request_goodput"] is None
    assert measured(goodput={"ttft": 250})["request_goodput"] == 1.0
    assert measured(goodput={"ttft": 250, "e2el": 199})["request_goodput"] == 0.0
    assert measured(goodput={"tpot": 15})["request_goodput"] == 1.0


def test_a_run_without_success_gives_zeros():
    result = measure(RUN[3:], 1.0, metrics=METRICS, percentiles=(99,), goodput={})
    assert (result["completed"], result["max_concurrent_requests"]) == (0, 0)
    assert result["p99_itl_ms"] == 0


def test_the_table_has_the_lines_vllm_prints():
    result = measured() | {"max_concurrency": 8, "request_rate": 2.5}
    lines = table(result, metrics=("ttft", "tpot"), percentiles=(50, 99.9)).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert "Successful requests:                     3" in lines
    assert "Maximum request concurrency:             8" in lines
    assert "Request rate configured (RPS):           2.50" in lines
    assert "Output token throughput (tok/s):         11.50" in lines
    assert "---------------Time to First Token----------------" in lines
    assert "-----Time per Output Token (excl. 1st token)------" in lines
    assert "Mean TTFT (ms):                          200.00" in lines
    assert "P99.9 TPOT (ms):                         19.99" in lines
    assert "Median TTFT (ms):                        200.00" in lines
    assert not any(line.startswith("P50 ") for line in lines), "it is the median"
    assert not any("ITL" in line or "goodput" in line for line in lines)
    assert lines[-1] == "=" * 50


def test_errors_are_counted_by_kind_and_capped():
    many = [Outcome(start=0, error=f"e{i}") for i in range(7)]
    assert errors(RUN) == "1 x HTTP 503: full"
    assert errors([*many, many[0]]).splitlines()[0] == "2 x e0"
    assert errors(many).splitlines()[-1] == "and 2 other kinds"
    assert errors(RUN[:3]) == ""
