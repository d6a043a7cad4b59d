"""Which ids a draft may say: the most frequent of the target's own answers, and those that no text gets by without."""

from __future__ import annotations

from typing import NamedTuple

import torch

SIZE = 8192


class Vocabulary(NamedTuple):
    ids: torch.Tensor  # int64, ascending
    coverage: float  # share of the answers' ids that is among them


def choose(counts, tokenizer, size=SIZE) -> Vocabulary:
    """``counts``: int64 [vocab], how often each id is in the answers. ``size`` ids, all of them if there are no more.

    Always among them: ids that end a text, other control ids, digits and newlines (:func:`needed`).
    """
    vocab = counts.numel()
    always = torch.zeros(vocab, dtype=torch.bool)
    always[sorted(needed(tokenizer, vocab))] = True
    order = torch.argsort(counts + always * (counts.max() + 1), descending=True, stable=True)
    return covering(order[: min(max(size, int(always.sum())), vocab)].sort().values, counts)


def among(ids, counts, tokenizer, size) -> Vocabulary:
    """As :func:`choose`, of these ids."""
    if size >= len(ids):
        return covering(ids, counts)
    there = torch.zeros(counts.numel(), dtype=torch.bool)
    there[ids] = True
    chosen = choose(torch.where(there, counts, -1), tokenizer, size).ids
    return covering(chosen[there[chosen]], counts)


def covering(ids, counts) -> Vocabulary:
    """These ids."""
    return Vocabulary(ids, counts[ids].sum().item() / max(1, counts.sum().item()))


def needed(tokenizer, vocab) -> set[int]:
    """Ids without which a draft could not end a text, write a number or a line."""
    named = (getattr(tokenizer, name, None) for name in ("bos_id", "eos_id", "pad_id"))
    ids = {id for id in named if id is not None} | set(tokenizer.eos_ids)
    for id in range(min(vocab, tokenizer.vocab_size)):
        text = tokenizer.token_bytes(id)
        control = bool(text) and not tokenizer.token_bytes(id, special=False)
        digit = len(text) == 1 and text.isdigit()
        newline = b"\n" in text and not text.strip()
        if control or digit or newline:
            ids.add(id)
    return {id for id in ids if id < vocab}
