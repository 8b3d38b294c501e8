"""vLLM's LLM class. Its times hold scheduling, as xylite's do; no text is made."""

import time

from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports] (in its own environment)

from bench.compare import child


def load(start: child.Start) -> tuple[child.Model, dict[str, str]]:
    llm = LLM(model=start.model, enable_prefix_caching=False, **start.settings)

    def seconds(prompts: child.Prompts, new: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = llm.generate(asked, params, use_tqdm=False)
        took = time.perf_counter() - begin
        assert all(len(o.outputs[0].token_ids) == new for o in outputs), "an answer was cut short"
        return took

    vocab_size = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    return child.Model(vocab_size, seconds), child.version("vllm", "torch")


# vLLM's workers import this module again.
if __name__ == "__main__":
    child.serve(load)
