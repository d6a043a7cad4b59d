"""Draft rows within a millionth of the target's: what is left of p, and 1 - r, are small differences of large numbers.

A total that is off by 1e-7, as a sum in float32 is, moves these by a tenth, and with them one token in a hundred.
"""

import functools

import pytest
import torch

import specdec_kernels as sk
from verify_cases import BACKENDS, EMULATED, bounds, keys, running

REQUESTS, VOCABULARY, NEAR = 2000, 1000, 1e-7
# On GPUs totals are sums in float32 (docs/notes.md, known limits).
DOUBLE = [backend for backend in BACKENDS[1:] if backend != EMULATED]


def rows(count):
    """Target logits, their softmax, and draft rows that differ from it by 0 to 8 in ten millions, id by id."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(count, VOCABULARY, generator=generator)
    p = logits.double().softmax(1)
    return logits, p, p * (1 - NEAR * torch.randint(0, 8, p.shape, generator=generator))


@functools.cache
def verdict(rule, backend):
    """A draft that token refuses nearly always; or two, and block's r = 1 - 3e-7 behind the first, S as small."""
    logits, p, q = rows(3 if rule == "block" else 2)
    if rule == "token":
        q[0, 3] = 1.0
    else:
        q[0, 3], q[1, 4] = p[0, 3] * (1 + 3 * NEAR), 100 * p[1, 4]
    n, drafts = REQUESTS, [3, 4][: len(q) - 1]
    with running(backend):
        return sk.verify(
            logits.repeat(n, 1),
            torch.tensor(drafts).repeat(n),
            bounds([len(drafts)] * n),
            draft_probs=q[:-1].float().repeat(n, 1),
            rule=rule,
            **keys(n),
        )


def test_the_reference_refuses_where_it_matters():
    refused = {rule: (verdict(rule, "reference").num_accepted == 0).double().mean() for rule in ("token", "block")}
    assert refused["token"] > 0.9 and 0.2 < refused["block"] < 0.8


@pytest.mark.parametrize("backend", DOUBLE)
@pytest.mark.parametrize("rule", ["token", "block"])
def test_small_differences_are_exact(rule, backend):
    got, want = verdict(rule, backend), verdict(rule, "reference")
    assert torch.equal(got.num_accepted, want.num_accepted) and torch.equal(got.tokens, want.tokens)
