"""vLLM's LLM class. Its times hold scheduling, as xylite's do; no text is made."""

import time

from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports] (in its own environment)

from bench.compare import child


class Vllm:
    def __init__(self, start: child.Start):
        self._llm = LLM(model=start.model, enable_prefix_caching=False, **start.settings)
        self.vocab_size: int = self._llm.llm_engine.vllm_config.model_config.get_vocab_size()

    def prefill(self, prompt: list[int]) -> float:
        return self._seconds([prompt], 1)

    def decode(self, prompts: child.Prompts, new: int) -> float:
        """By the difference to the same prompts with one token: LLM tells no times of tokens."""
        first = self._seconds(prompts, 1)
        return len(prompts) * (new - 1) / (self._seconds(prompts, new) - first)

    def _seconds(self, prompts: child.Prompts, new: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self._llm.generate(asked, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(o.outputs[0].token_ids) == new for o in outputs), "an answer was cut short"
        return seconds


def load(start: child.Start) -> tuple[Vllm, dict[str, str]]:
    return Vllm(start), child.version("vllm", "torch")


# vLLM's workers import this module again.
if __name__ == "__main__":
    child.serve(load)
