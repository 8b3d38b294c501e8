"""Drawing tokens, checking drafts and scoring, in plain torch: what the reference table does.

It computes in float32, or in float64 if given it. R = 0 is ordinary.
"""

import torch
from torch import Tensor

from xylite.ops import SampleBatch, SamplerState


def sample(
    logits: Tensor, batch: SampleBatch, state: SamplerState | None, mask: Tensor | None
) -> Tensor:
    """The token of each row of logits [R, V], [R] int64. The logits are consumed.

    V must be the number of ids that have a meaning: the caller cuts padding columns off.
    mask [rows, ceil(V / 32)] int32, bit t % 32 of word t // 32 = token t allowed; see `mask_row`.

    The order is vLLM's: mask, sparse bias and bans, penalties (repetition as in transformers over
    prompt and output, then frequency and presence over the output), temperature, min_p, top_k,
    top_p. Rows at temperature 0 take the largest logit, the lowest id among equals. Others take
    the first id whose cumulated probability, in id order, exceeds the row's uniform. Values equal
    to the last one that top_k or top_p keeps are kept too, so a result never depends on how a sort
    breaks ties. A row is computed from itself alone: neighbours and the batch flags change no bit.
    A row that allows nothing gives some id of the vocabulary.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if mask is not None:
        logits = logits.masked_fill_(~_allowed(mask, batch.mask_row, logits.shape[1]), -torch.inf)
    logits.index_put_(
        (batch.bias_row, batch.bias_token), batch.bias_value.to(logits.dtype), accumulate=True
    )
    if batch.penalised:
        logits = _penalised(logits, batch, state)
    best = logits.argmax(-1)
    if batch.greedy:
        return best
    hot = batch.temperature > 0
    # Measured from the row's maximum, no temperature however small overflows.
    top = logits.gather(1, best[:, None])
    heat = torch.where(hot, batch.temperature, 1.0).to(logits.dtype)
    logits = logits.sub_(top).div_(heat[:, None])
    if batch.filtered:
        (rows,) = torch.where(hot & _filters(batch))
        logits[rows] = _filtered(
            logits[rows], batch.top_k[rows], batch.top_p[rows], batch.min_p[rows]
        )
    total = logits.softmax(-1).to(torch.float64).cumsum(-1)
    target = batch.uniform.to(torch.float64)[:, None] * total[:, -1:]
    drawn = torch.searchsorted(total, target, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)
    return torch.where(hot, drawn, best)


def _allowed(mask: Tensor, mask_row: Tensor, num_ids: int) -> Tensor:
    """[R, V] bool of the rows' bit masks; rows without one allow everything."""
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    words = mask[mask_row.clamp(min=0)]
    allowed = (words[:, :, None] >> bits & 1).bool().flatten(1)[:, :num_ids]
    return allowed | (mask_row < 0)[:, None]


def _penalised(logits: Tensor, batch: SampleBatch, state: SamplerState | None) -> Tensor:
    """Logits after repetition, frequency and presence penalties."""
    assert state is not None, "penalties need the sampler's token counts"
    row = batch.state_row.clamp(min=0)
    counted = (batch.state_row >= 0)[:, None]
    count = state.count[row] * counted
    one = count.new_ones(batch.seen_row.shape[0])
    count.index_put_((batch.seen_row, batch.seen_token), one, accumulate=True)
    known = (count > 0) | (state.in_prompt[row] & counted)
    repetition = batch.repetition_penalty.to(logits.dtype)[:, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(known, repeated, logits)
    logits = logits - batch.frequency_penalty.to(logits.dtype)[:, None] * count
    return logits - batch.presence_penalty.to(logits.dtype)[:, None] * (count > 0)


def _filters(batch: SampleBatch) -> Tensor:
    return (batch.top_k > 0) | (batch.top_p < 1) | (batch.min_p > 0)


def _filtered(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Scaled logits [n, V] (maximum 0) with what min_p, top_k and top_p leave out at -inf."""
    num_ids = logits.shape[1]
    floor = min_p.to(logits.dtype).log()[:, None]
    logits = logits.masked_fill(logits < floor, -torch.inf)
    top_k = torch.where((top_k <= 0) | (top_k > num_ids), num_ids, top_k)
    # The few best decide nearly always; a full sort of the vocabulary is the exception.
    for width in (min(1024, num_ids), num_ids):
        best = logits.topk(width).values
        kth = best.gather(1, (top_k.clamp(max=width) - 1)[:, None].long())
        kth = torch.where((top_k < num_ids)[:, None], kth, -torch.inf)
        kept = logits.masked_fill(logits < kth, -torch.inf)
        share = (best - torch.logsumexp(kept, -1, keepdim=True)).exp()
        before = share.cumsum(-1) - share
        inside = (before < top_p[:, None]) & (best >= kth) & (best > -torch.inf)
        inside[:, 0] = True  # also of a row that allows nothing, or is not finite
        last = best.gather(1, inside.sum(-1, keepdim=True) - 1)
        # Exact if the row's cut lies among the best, or nothing is cut by this row at all.
        known = (top_k <= width) | (top_k == num_ids)
        known &= ~inside[:, -1] | (top_p >= 1)
        if width == num_ids or bool(known.all()):
            break
    last = torch.where((top_p < 1)[:, None], last, -torch.inf)
    return kept.masked_fill(kept < last, -torch.inf)


def finite(x: Tensor) -> Tensor:
    """[R] bool: the row of x [R, C] has no infinity and no NaN."""
    return torch.isfinite(x).all(-1)


def verify(ids: Tensor, parent: Tensor, draft_token: Tensor, depth: Tensor) -> Tensor:
    """[R] bool: the row is its chunk's first, or its parent is accepted and drew its token.

    ids [R] drawn; parent, draft_token, depth [R] as in SampleTable.
    """
    first = parent < 0
    up = torch.where(first, torch.arange(parent.shape[0], device=parent.device), parent.long())
    accepted = first | (ids[up] == draft_token)
    # Twice as many ancestors with each round.
    for _ in range(int(depth.max()).bit_length() if depth.numel() else 0):
        accepted = accepted & accepted[up]
        up = up[up]
    return accepted


def logprobs(logits: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of ids [R] and of the k most likely tokens under raw logits [R, V].

    Returns ([R] float32, ids [R, K] int32, [R, K] float32, ranks [R] int32), best first, K =
    min(k, V). The chosen token's value is read from the same tensor, so it equals its own entry
    among the best exactly; its rank counts the tokens that are as likely or more so, as vLLM does.
    """
    logp = logits.float().log_softmax(-1)
    chosen = logp.gather(1, ids.long()[:, None])[:, 0]
    top, top_ids = logp.topk(min(k, logp.shape[1]))
    rank = (logp >= chosen[:, None]).sum(-1)
    return chosen, top_ids.int(), top, rank.int()
