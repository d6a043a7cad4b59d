"""What the GPU benchmarks measure against: eager PyTorch written well for a device, and FlashInfer where installed.

Nothing here waits for the device (no boolean indexing, no torch.multinomial), so that a CUDA graph can hold it.
"""

import inspect

import torch
from verify_rivals import probabilities


def draw(weights):
    """One id per row, proportional to its weight: the first of exponential clocks to ring."""
    return weights.div(torch.empty_like(weights).exponential_()).argmax(-1)


def greedy(rows, ids):
    best = rows.argmax(-1)
    return best, (best[:, :-1] == ids).long().cumprod(1).sum(1)


def token_rule(rows, ids, temperature, top_p, draft_probs=None):
    """Rows [B, K + 1, V], drafts [B, K], their probabilities [B, K, V] or None -> last token, accepted drafts [B]."""
    p = probabilities(rows, temperature, top_p)
    at_draft = p[:, :-1].gather(-1, ids[..., None])[..., 0]
    coin = torch.rand(ids.shape, device=rows.device)
    if draft_probs is not None:
        coin = coin * draft_probs.gather(-1, ids[..., None])[..., 0]
    count = (coin < at_draft).long().cumprod(1).sum(1)
    last = _row(p, count)
    at = count.clamp(max=ids.shape[1] - 1)
    if draft_probs is None:
        left = last.scatter(-1, ids.gather(1, at[:, None]), 0.0)
    else:
        left = (last - _row(draft_probs, at)).clamp_(min=0)
    return draw(torch.where((count < ids.shape[1])[:, None], left, last)), count


def _row(rows, index):
    return rows.gather(1, index[:, None, None].expand(-1, 1, rows.shape[-1]))[:, 0]


def sample(rows, temperature, top_p):
    return draw(probabilities(rows, temperature, top_p))


def flashinfer_rule(device):
    """FlashInfer's softmax, top-p and chain_speculative_sampling as engines call them; None where it is missing."""
    try:
        from flashinfer import sampling
    except ImportError:
        return None
    chain, seeds = sampling.chain_speculative_sampling, {}
    if (
        "seed" in inspect.signature(chain).parameters
    ):  # tensors where it takes them, or a graph would freeze the numbers
        seeds = dict.fromkeys(("seed", "offset"), torch.tensor([1], dtype=torch.int64, device=device))

    def run(rows, ids, temperature, top_p, draft_probs):
        p = sampling.softmax(rows.flatten(0, 1).float(), temperature)
        if top_p < 1:
            p = sampling.top_p_renorm_probs(p, top_p)
        return chain(draft_probs, ids, p.view(rows.shape), **seeds)

    return run
