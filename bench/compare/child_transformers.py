"""transformers in this process: eager, sdpa attention, its dynamic cache."""

import time

import torch
from transformers import AutoModelForCausalLM

from bench.compare import child


def load(start: child.Start) -> tuple[child.Model, dict[str, str]]:
    if start.threads:
        torch.set_num_threads(start.threads)
    model = AutoModelForCausalLM.from_pretrained(
        start.model, dtype=getattr(torch, start.settings["dtype"]), attn_implementation="sdpa"
    ).eval()

    @torch.inference_mode()
    def seconds(prompts: child.Prompts, new: int) -> float:
        begin = time.perf_counter()
        ids, cache = torch.tensor(prompts), None
        for _ in range(new):
            out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids, cache = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
        return time.perf_counter() - begin

    return child.Model(model.config.vocab_size, seconds), child.version("transformers", "torch")


if __name__ == "__main__":
    child.serve(load)
