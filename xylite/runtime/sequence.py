"""One stream of tokens being extended.

There is no phase. A sequence has tokens and computed tokens, and the scheduler lets the second
catch up with the first; chunking, prefix hits, preemption and speculation are all this one rule.
"""

from typing import Any

from xylite.runtime.logprobs import PromptLogprobs
from xylite.runtime.request import Constraint, Draft, FinishReason, Request

_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = 2**64 - 1


def _mixed_seed(seed: int, index: int) -> int:
    """The seed of sequence `index` of a request: the request's own for the first, unrelated ones
    for the others (SplitMix64, Steele et al. 2014)."""
    if index == 0:
        return seed
    z = (seed + index * _GOLDEN) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (z ^ (z >> 31)) - 2**63


class Sequence:
    """Mutable state of one sequence. Only the scheduler and KVBlocks write it.

    tokens         prompt and output so far; tokens[:num_computed] have their KV stored. Until the
                   first output the list may be that of others of the request: `append` only
    num_planned    tokens whose KV is stored once every submitted step has run
    num_pending    1 if a step in flight will add one token that is not in `tokens` yet
    blocks         KV blocks in order; the first num_shared are owned by the prefix tree
    node           deepest node of the prefix tree on this sequence's path
    diverged       another sequence published the next block first: this one stays private
    serial         order of arrival among all sequences of the scheduler
    row            place in the scheduler's row arrays while running, else -1
    epoch          counts how often computed state was dropped; a step planned in an earlier
                   epoch no longer concerns this sequence
    allowed_bits   allowed_token_ids as a bit mask, made when first needed
    num_inflight   submitted steps that hold a chunk of this sequence
    """

    __slots__ = (
        "allowed_bits",
        "arrival",
        "blocks",
        "constraint",
        "diverged",
        "draft",
        "epoch",
        "finish",
        "index",
        "last_step",
        "node",
        "num_cached",
        "num_computed",
        "num_inflight",
        "num_pending",
        "num_planned",
        "num_preemptions",
        "num_prompt",
        "num_shared",
        "owns_tokens",
        "poisoned",
        "prompt_logprobs",
        "request",
        "row",
        "sample_row",
        "seed",
        "serial",
        "tokens",
    )

    def __init__(
        self,
        request: Request,
        index: int,
        arrival: float,
        serial: int = 0,
        prompt: list[int] | None = None,
    ):
        """prompt: the request's, as a list that all its sequences share; None = a list of its own.

        A prompt of 100,000 tokens takes half a millisecond to copy, which n = 128 would do in one
        turn of the event loop.
        """
        self.request = request
        self.index = index
        self.arrival = arrival
        self.serial = serial
        self.seed = _mixed_seed(request.seed, index)
        self.tokens: list[int] = list(request.prompt) if prompt is None else prompt
        self.owns_tokens = prompt is None
        self.num_prompt = len(self.tokens)
        self.num_computed = 0
        self.num_planned = 0
        self.num_pending = 0
        self.draft: Draft | None = None
        self.blocks: list[int] = []
        self.num_shared = 0
        self.node: Any = None
        self.diverged = False
        self.poisoned = False
        self.allowed_bits: Any = None
        self.row = -1
        self.epoch = 0
        self.num_inflight = 0
        self.sample_row = -1
        self.last_step = -1
        self.finish: FinishReason | None = None
        self.num_cached = -1
        self.num_preemptions = 0
        self.prompt_logprobs = PromptLogprobs(request.prompt, request.params.prompt_logprobs or 0)
        self.constraint: Constraint | None = (
            request.constraint() if request.constraint is not None else None
        )

    def append(self, token: int) -> None:
        """One more token of output."""
        if not self.owns_tokens:
            self.tokens, self.owns_tokens = self.tokens.copy(), True
        self.tokens.append(token)

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def wants_prompt_logprobs(self) -> bool:
        """The first sequence of a request scores the prompt for all of them."""
        return self.index == 0 and self.request.params.prompt_logprobs is not None

    @property
    def max_len(self) -> int:
        """Tokens this sequence may reach, prompt included."""
        return self.num_prompt + self.request.max_tokens

    @property
    def remaining(self) -> int:
        """Known or promised tokens that no submitted step computes."""
        return len(self.tokens) + self.num_pending - self.num_planned

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request.id}.{self.index} {self.num_computed}/{self.num_planned}/"
            f"{len(self.tokens)}+{self.num_pending} blocks={len(self.blocks)} {self.finish or ''}>"
        )
