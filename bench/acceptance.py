"""How often a draft model's tokens would be accepted, by several ways to accept them.

    python -m bench.acceptance [--model DIR]

Texts are sampled from the model at temperature 1. At each of their positions p is what the model
says next and q what a draft made from it says: weights rounded to fewer bits, or fewer layers.
Printed are the mean chances that a draft token is accepted:

    here      both draw by cumulated probability in id order with one uniform, as xylite does
    residual  rejection with residual draws: sum of min(p, q), the most there can be
    noise     both take the largest logit plus Gumbel noise, the same for both

transformers computes; it must be installed.
"""

import argparse
import copy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.compare.peers import ROOT

NEW_TOKENS: Final = 80
GROUP: Final = 32  # weights that share a scale
NOISE_DRAWS: Final = 6
TEXTS: Final = (
    "Once upon a time, in a village by the sea,",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "The capital of France is Paris. The capital of Italy is",
    "Water boils at 100 degrees Celsius because",
)
CHATS: Final = (
    "Explain why the sky is blue.",
    "Write a short email asking for a day off.",
)


def rounded(model: Any, bits: int) -> Any:
    """A copy whose matrices, but for the embedding, are rounded in groups."""
    made = copy.deepcopy(model)
    for name, w in made.named_parameters():
        if w.dim() == 2 and "embed" not in name and "lm_head" not in name:
            x = w.data.view(w.shape[0], -1, GROUP)
            scale = x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
            w.data = ((x / scale).round() * scale).view_as(w)
    return made


def shortened(model: Any, num_layers: int) -> Any:
    """A copy without the last layers."""
    made = copy.deepcopy(model)
    made.model.layers = made.model.layers[:num_layers]
    made.config.num_hidden_layers = num_layers
    return made


def chances(p: Tensor, q: Tensor) -> tuple[float, float, float]:
    """Here, residual, noise: means over rows of p and q, [positions, V] float64."""
    end_p, end_q = p.cumsum(-1), q.cumsum(-1)
    shared = torch.minimum(end_p, end_q) - torch.maximum(end_p - p, end_q - q)
    generator = torch.Generator().manual_seed(3)
    log_p, log_q = p.float().log(), q.float().log()
    alike = 0.0
    for _ in range(NOISE_DRAWS):
        noise = -torch.empty_like(log_p).exponential_(generator=generator).log()
        alike += ((log_p + noise).argmax(-1) == (log_q + noise).argmax(-1)).double().mean().item()
    return (
        shared.clamp(min=0).sum(-1).mean().item(),
        torch.minimum(p, q).sum(-1).mean().item(),
        alike / NOISE_DRAWS,
    )


def filtered(p: Tensor, top_k: int, top_p: float) -> Tensor:
    """Probabilities after top_k and top_p."""
    best, ids = p.sort(-1, descending=True)
    kept = (best.cumsum(-1) - best < top_p) & (torch.arange(p.shape[1]) < top_k)
    cut = torch.zeros_like(p).scatter(-1, ids, best * kept)
    return cut / cut.sum(-1, keepdim=True)


@torch.inference_mode()
def sampled(model: Any, tokenizer: Any) -> list[tuple[Tensor, int]]:
    """Texts as ids [length], and how many of them are prompt."""
    torch.manual_seed(1)
    prompts = list(TEXTS)
    for chat in CHATS:
        turn = [{"role": "user", "content": chat}]
        prompts.append(
            tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        )
    found: list[tuple[Tensor, int]] = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
        out = model.generate(ids, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **length)
        found.append((out[0], ids.shape[1]))
    return found


@torch.inference_mode()
def probabilities(model: Any, texts: list[tuple[Tensor, int]]) -> Tensor:
    """[positions, V] float64: what the model says at each sampled token."""
    rows = [model(ids[None]).logits[0, n - 1 : -1].double().softmax(-1) for ids, n in texts]
    return torch.cat(rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.acceptance")
    parser.add_argument("--model", type=Path, help="default: the demo model")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="xylite-acceptance-") as folder:
        path = args.model or Path(folder) / "model"
        if args.model is None:
            command = [sys.executable, "-m", "bench.model_dir", str(path)]
            subprocess.run(command, check=True, cwd=ROOT)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(path)
    layers = model.config.num_hidden_layers
    drafts: Mapping[str, Callable[[], Any]] = {
        "8-bit weights": lambda: rounded(model, 8),
        "4-bit weights": lambda: rounded(model, 4),
        f"{layers - 2} of {layers} layers": lambda: shortened(model, layers - 2),
    }
    texts = sampled(model, tokenizer)
    p = probabilities(model, texts)
    print(f"{'draft':<18}{'sampling':<24}{'here':>8}{'residual':>10}{'noise':>8}")
    for name, make in drafts.items():
        q = probabilities(make(), texts)
        for sampling, (a, b) in {
            "temperature 1": (p, q),
            "top_k 50, top_p 0.95": (filtered(p, 50, 0.95), filtered(q, 50, 0.95)),
        }.items():
            here, residual, noise = chances(a, b)
            print(f"{name:<18}{sampling:<24}{here:>8.2f}{residual:>10.2f}{noise:>8.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
