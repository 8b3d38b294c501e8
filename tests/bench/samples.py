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
