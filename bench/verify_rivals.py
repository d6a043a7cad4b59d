"""What verify is measured against: eager PyTorch written well, and transformers' own function for one request."""

import torch


def probabilities(rows, temperature, top_p):
    """Softmax at a temperature, cut to its nucleus: the shortest prefix of the sorted ids that holds ``top_p``."""
    p = torch.softmax(rows.float() / temperature, -1)
    if top_p < 1:
        ordered, ids = p.sort(-1, descending=True)
        ordered[ordered.cumsum(-1) - ordered >= top_p] = 0
        p.zero_().scatter_(-1, ids, ordered)
        p /= p.sum(-1, keepdim=True)
    return p


def greedy(rows, ids):
    """Rows [B, K + 1, V] and drafts [B, K] -> ids [B, K + 1], number accepted [B]."""
    best = rows.argmax(-1)
    return best, (best[:, :-1] == ids).long().cumprod(1).sum(1)


def token_rule(rows, ids, temperature, top_p, draft_logits=None, draft_probs=None):
    """Softmaxes, coins, and one draw per request from what is left: -> last token [B], number accepted [B]."""
    p = probabilities(rows, temperature, top_p)
    at_draft = p[:, :-1].gather(-1, ids[..., None])[..., 0]
    if draft_logits is not None:
        q = probabilities(draft_logits, temperature, top_p)
    else:
        q = None if draft_probs is None else draft_probs.float()
    coin = torch.rand(ids.shape)
    if q is not None:
        coin *= q.gather(-1, ids[..., None])[..., 0]
    count = (coin < at_draft).long().cumprod(1).sum(1)
    which, refused = torch.arange(len(p)), count < ids.shape[1]
    last = p[which, count]
    where, at = which[refused], count[refused]
    if q is None:
        last[where, ids[where, at]] = 0
    else:
        last[where] = (last[where] - q[where, at]).clamp_(min=0)
    return torch.multinomial(last, 1)[:, 0], count


def transformers_rule(temperature, top_p):
    """transformers' verification of one request as its assisted decoding calls it, or None without transformers."""
    try:
        from transformers.generation.logits_process import TemperatureLogitsWarper, TopPLogitsWarper
        from transformers.generation.utils import _speculative_sampling
    except ImportError:
        return None
    warpers = [TemperatureLogitsWarper(temperature)] + ([TopPLogitsWarper(top_p)] if top_p < 1 else [])

    def run(rows, ids, draft_logits):
        rows = rows.to(torch.float32, copy=True)
        for i in range(rows.shape[1]):
            for warp in warpers:
                rows[:, i] = warp(None, rows[:, i])
        return _speculative_sampling(ids, draft_logits.float(), ids.shape[1], rows)

    return run
