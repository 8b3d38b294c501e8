"""Made-up results of bench.compare."""

from typing import Any


def sample(engine: str, repeat: int, tok_s: float, **fields: Any) -> dict[str, Any]:
    made = {"engine": engine, "workload": "decode 1", "repeat": repeat, "attempt": 0}
    return {**made, "figures": {"tok_s": tok_s}, "others": 0.0, "clean": True} | fields


def result(*samples: dict[str, Any], **fields: Any) -> dict[str, Any]:
    engines = [
        {"name": "xylite auto", "precision": "bf16", "is_ours": True},
        {"name": "slow", "precision": "bf16", "is_ours": False},
        {"name": "fast", "precision": "bf16", "is_ours": False},
        {"name": "small", "precision": "int4", "is_ours": False},
    ]
    found = {
        "engines": engines,
        "samples": list(samples),
        "machine": {"cpu": "A CPU", "cores": 2, "flags": ["avx2"]},
        "versions": {"slow": {"slow": "1.0"}},
        "date": "2026-01-02T03:04:05Z",
        "commit": "abc",
        "model": "m",
        "quick": False,
    }
    return found | fields


def three(engine: str, *values: float, **fields: Any) -> list[dict[str, Any]]:
    return [sample(engine, i, v, **fields) for i, v in enumerate(values)]


def steps_result(**fields: Any) -> dict[str, Any]:
    """A made-up result of bench.ops.steps, of the same machine: two formats of two steps."""

    def step(seconds: float, least: float, bandwidth: float) -> dict[str, Any]:
        op = {"seconds": 0.9 * seconds, "roofline_percent": 100 * least / (0.9 * seconds)}
        flops = {"dtype": 2e12, "bfloat16": 2e12, "float32": 1e12, "int8": 4e12}
        return {
            "tokens": 8,
            "seconds": seconds,
            "tok_s": 8 / seconds,
            "least_seconds": least,
            "most_tok_s": 8 / least,
            "roofline_percent": 100 * least / seconds,
            "ops_seconds": 0.9 * seconds,
            "roofline": {"flops": flops, "bytes_per_s": bandwidth, "cached_bytes_per_s": 4e11},
            "ops": {"linear 2 of 3": op},
        }

    formats = {
        "plain": {"decode at 1": step(0.04, 0.02, 5e10), "mixed": step(0.4, 0.3, 6e10)},
        "int8": {"decode at 1": step(0.02, 0.015, 7e10)},
    }
    found = {
        "machine": {"cpu": "A CPU", "cores": 2, "flags": ["avx2"]},
        "versions": {"torch": "2.0"},
        "date": "2026-05-06T00:00:00Z",
        "commit": "fed",
        "command": "python -m bench.ops.steps",
        "device": {"dtype": "bfloat16"},
        "formats": formats,
    }
    return found | fields
