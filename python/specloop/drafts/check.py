"""What a proposal has to be so that it can be verified, whoever made it."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection

from .base import Proposal

MOST_NODES = 64  # of a tree


def checked(found: Proposal, k: int, vocab_size: int, eos_ids: Collection[int]) -> Proposal:
    """A copy, of plain integers: a chain of at most ``k`` ids that ends with the first EOS id and before the first row
    that has a NaN (which is its ``fault`` then), or a tree at most ``k`` deep.

    Raises ValueError or TypeError for anything else.
    """
    tokens = [operator.index(token) for token in found.tokens]
    bad = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise ValueError(f"token id {bad} proposed, the vocabulary has {vocab_size}")
    if found.parents is None:
        return _chain(
            Proposal(tokens, None, found.logits, found.ids, found.fault, found.source), k, vocab_size, eos_ids
        )
    if found.logits is not None:
        raise ValueError("logits proposed with a tree, whose nodes are chosen, not drawn")
    parents = [operator.index(parent) for parent in found.parents]
    _check_tree(tokens, parents, k, vocab_size)
    return Proposal(tokens, parents, fault=found.fault, source=found.source)


def _check_tree(tokens, parents, k, vocab_size):
    from specdec_kernels.tree import tree_depth

    if len(parents) != len(tokens):
        raise ValueError(f"{len(parents)} parents for a tree of {len(tokens)} nodes")
    if len(tokens) > MOST_NODES:
        raise ValueError(f"a tree of {len(tokens)} nodes proposed, {MOST_NODES} are allowed")
    depth = tree_depth(tokens, parents, vocab_size)
    if depth > k:
        raise ValueError(f"a tree {depth} deep proposed, {k} asked for")


def _chain(found, k, vocab_size, eos_ids):
    if len(found.tokens) > k:
        raise ValueError(f"{len(found.tokens)} tokens proposed, {k} asked for")
    if found.logits is not None:
        _check_rows(found, vocab_size)
    elif found.ids is not None:
        raise ValueError("ids of a cut vocabulary proposed without logits")
    end = next((i for i, token in enumerate(found.tokens) if token in eos_ids), None)
    if end is not None:
        found = found.first(end + 1)
    if found.logits is not None:
        for i, total in enumerate(found.logits.sum(-1).tolist()):
            if math.isnan(total) and bool(found.logits[i].isnan().any()):  # inf - inf in the sum is no fault
                return found.first(i, f"the draft's logits of token {i + 1} have NaN")
    return found


def _check_rows(found, vocab_size):
    import torch

    from specdec_kernels.validate import ascending

    logits, ids = found.logits, found.ids
    if not isinstance(logits, torch.Tensor) or logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"logits: expected a tensor of floats, got {getattr(logits, 'dtype', type(logits))}")
    if ids is not None:
        if not isinstance(ids, torch.Tensor) or ids.dtype != torch.int32 or ids.dim() != 1 or not len(ids):
            raise ValueError("ids: expected a tensor of int32 [Vd] that the columns of the logits stand for")
        if not ascending(ids, vocab_size):
            raise ValueError(f"ids: expected ascending ids in [0, {vocab_size})")
    wanted = [len(found.tokens), vocab_size if ids is None else len(ids)]
    if list(logits.shape) != wanted or (wanted[1] > 1 and logits.stride(1) != 1):
        raise ValueError(f"logits: expected shape {wanted} with rows in one piece, got {list(logits.shape)}")
