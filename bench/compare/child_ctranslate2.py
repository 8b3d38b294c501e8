"""CTranslate2's Generator, with a model that its converter made."""

import json
import os
import time
from pathlib import Path

import ctranslate2  # pyright: ignore[reportMissingImports] (in its own environment)

from bench.compare import child


class CTranslate2:
    def __init__(self, start: child.Start):
        self._generator = ctranslate2.Generator(
            start.model,
            device="cpu",
            compute_type=start.settings["compute_type"],
            inter_threads=1,
            intra_threads=start.threads or len(os.sched_getaffinity(0)),
        )
        # It takes tokens as text: one for each id.
        self._tokens: list[str] = json.loads((Path(start.model) / "vocabulary.json").read_text())
        self.vocab_size = len(self._tokens)

    def prefill(self, prompt: list[int]) -> float:
        return self._seconds([prompt], 1)

    def decode(self, prompts: child.Prompts, new: int) -> float:
        """By the difference to the same prompts with one token: it tells no times of tokens."""
        first = self._seconds(prompts, 1)
        return len(prompts) * (new - 1) / (self._seconds(prompts, new) - first)

    def _seconds(self, prompts: child.Prompts, new: int) -> float:
        asked = [[self._tokens[i] for i in ids] for ids in prompts]
        start = time.perf_counter()
        results = self._generator.generate_batch(
            asked,
            max_length=new,
            min_length=new,
            sampling_topk=1,
            end_token=[],
            include_prompt_in_result=False,
            max_batch_size=0,
        )
        seconds = time.perf_counter() - start
        assert all(len(r.sequences_ids[0]) == new for r in results), "an answer was cut short"
        return seconds


def load(start: child.Start) -> tuple[CTranslate2, dict[str, str]]:
    return CTranslate2(start), child.version("ctranslate2")


if __name__ == "__main__":
    child.serve(load)
