"""Rolling back rejected drafts: what is kept keeps every byte, codes and scales; nothing of the rejected remains."""

import random

import pytest
import torch

import specdec_kernels as sk
from int8_backends import CPU, running
from specloop.models.pool import PAGE, Pool, page_nbytes
from tiny_llama import CONFIG, build

TOKENS = [int(t) for t in torch.randint(0, CONFIG.vocab, (200,), generator=torch.Generator().manual_seed(7))]


def kept_bytes(cache):
    """The first ``length`` tokens of every tensor of every layer, as bytes."""
    flat = (
        t[cache.pages].flatten(0, 1)[: cache.length].contiguous()
        for layer in cache.pool.layers
        for t in layer
        if t is not None
    )
    return [t.view(torch.uint8).clone() for t in flat]


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def rounds(model, wanted, seed, reached=40):
    """Decodes ``wanted`` with drafts that are right at first and wrong from some point on; yields the cache and the
    bytes kept before each round.
    """
    rng = random.Random(seed)
    cache = model.new_cache()
    model.forward(wanted[:reached], cache, last=1)
    while reached < len(wanted):
        before = kept_bytes(cache)
        width = min(rng.randrange(1, 9), len(wanted) - reached)
        right = rng.randrange(1, width + 1)  # the token that the model chose itself, and its accepted drafts
        wrong = [
            (t + 1 + rng.randrange(CONFIG.vocab - 1)) % CONFIG.vocab for t in wanted[reached + right : reached + width]
        ]
        model.forward(wanted[reached : reached + right] + wrong, cache, last=width)
        cache.truncate(reached + right)
        reached += right
        yield cache, before


@pytest.mark.parametrize("kv", ["int8", "f16", "f32"])
@pytest.mark.parametrize("backend", ["reference", *CPU[-2:]])
def test_kept_bytes_stay_and_rejected_ones_leave_no_trace(backend, kv):
    """About 40 rounds from token 40 to 150, over the page borders at 64 and 128 (the slow reference: 55 to 75)."""
    model = build("f32" if backend == "reference" else "int8", kv=kv)
    start, stop = (55, 75) if backend == "reference" else (40, 150)
    with running(backend):
        plain = model.new_cache()
        for token in TOKENS[:stop]:
            model.forward([token], plain, last=0)
        count = 0
        for cache, before in rounds(model, TOKENS[:stop], backend, start):
            after = kept_bytes(cache)
            assert equal([t[: len(b)] for t, b in zip(after, before, strict=True)], before), "a kept byte changed"
            count += 1
    assert count > (stop - start) // 8 and cache.length == stop and start < PAGE < stop
    assert equal(kept_bytes(cache), kept_bytes(plain)), "the bytes differ from those of plain decoding"


def test_the_check_sees_a_single_byte():
    """The same check with one bit of one code, or of one scale, changed in a kept token."""
    for part in (0, 1, 2, 3):
        model = build("int8", kv="int8")
        cache, before = next(rounds(model, TOKENS[:60], seed=1))
        cache.pool.layers[1][part][cache.pages[0], 17, -1].view(-1).view(torch.uint8)[0] ^= 1
        assert not equal([t[: len(b)] for t, b in zip(kept_bytes(cache), before, strict=True)], before)


def test_a_rejected_outlier_changes_no_scale():
    """One scale per token and head: a token of 10,000 times the others' size leaves their codes and scales alone."""
    layer = Pool(CONFIG, "int8", "cpu", keep=3, most=3).layers[0]
    k = torch.randn(2 * PAGE + 1, CONFIG.kv_heads, CONFIG.head_dim)
    k[-1] *= 1e4
    half = torch.ones(len(k), CONFIG.head_dim // 2), torch.zeros(len(k), CONFIG.head_dim // 2)
    sk.rope_write_kv_int8(k[:-1], k[:-1], half[0][:-1], half[1][:-1], *layer, torch.arange(2 * PAGE))
    before = [t.clone() for t in layer]
    sk.rope_write_kv_int8(k[-1:], k[-1:], half[0][-1:], half[1][-1:], *layer, torch.tensor([2 * PAGE]))
    for was, now in zip(before, layer, strict=True):
        assert torch.equal(was[:2], now[:2]) and not torch.equal(was[2, 0], now[2, 0])


def test_sizes():
    """Bytes per token and head: D codes and one f32 scale for keys and for values, or 2 D values; pages in units."""
    heads = CONFIG.layers * CONFIG.kv_heads * 2 * PAGE
    for kv, width in (("int8", CONFIG.head_dim + 4), ("f16", 2 * CONFIG.head_dim), ("f32", 4 * CONFIG.head_dim)):
        page = page_nbytes(CONFIG, kv)
        assert page % 4096 == 0 and heads * width <= page < heads * width + 4096
        assert build("f32", kv=kv).new_cache(PAGE + 1).nbytes == 2 * page
