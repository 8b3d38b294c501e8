"""CTranslate2's Generator, with a model that its converter made."""

import json
import os
import time
from pathlib import Path

import ctranslate2  # pyright: ignore[reportMissingImports] (in its own environment)

from bench.compare import child


def load(start: child.Start) -> tuple[child.Model, dict[str, str]]:
    generator = ctranslate2.Generator(
        start.model,
        device="cpu",
        compute_type=start.settings["compute_type"],
        inter_threads=1,
        intra_threads=start.threads or len(os.sched_getaffinity(0)),
    )
    # It takes tokens as text: one for each id.
    tokens: list[str] = json.loads((Path(start.model) / "vocabulary.json").read_text())

    def seconds(prompts: child.Prompts, new: int) -> float:
        asked = [[tokens[i] for i in ids] for ids in prompts]
        begin = time.perf_counter()
        results = generator.generate_batch(
            asked,
            max_length=new,
            min_length=new,
            sampling_topk=1,
            end_token=[],
            include_prompt_in_result=False,
            max_batch_size=0,
        )
        took = time.perf_counter() - begin
        assert all(len(r.sequences_ids[0]) == new for r in results), "an answer was cut short"
        return took

    return child.Model(len(tokens), seconds), child.version("ctranslate2")


if __name__ == "__main__":
    child.serve(load)
