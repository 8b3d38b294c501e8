"""transformers in this process: eager, sdpa attention, its dynamic cache."""

import time

import torch
from transformers import AutoModelForCausalLM

from bench.compare import child


class Transformers:
    def __init__(self, start: child.Start):
        if start.threads:
            torch.set_num_threads(start.threads)
        self._model = AutoModelForCausalLM.from_pretrained(
            start.model, dtype=getattr(torch, start.settings["dtype"]), attn_implementation="sdpa"
        ).eval()
        self.vocab_size: int = self._model.config.vocab_size

    def _forward(self, ids: torch.Tensor, cache: object) -> tuple[torch.Tensor, object]:
        """The next token of each row, and the cache with these."""
        out = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> float:
        start = time.perf_counter()
        self._forward(torch.tensor([prompt]), None)
        return time.perf_counter() - start

    @torch.inference_mode()
    def decode(self, prompts: child.Prompts, new: int) -> float:
        ids, cache = self._forward(torch.tensor(prompts), None)
        start = time.perf_counter()
        for _ in range(new - 1):
            ids, cache = self._forward(ids, cache)
        return len(prompts) * (new - 1) / (time.perf_counter() - start)


def load(start: child.Start) -> tuple[Transformers, dict[str, str]]:
    return Transformers(start), child.version("transformers", "torch")


if __name__ == "__main__":
    child.serve(load)
