"""Trees of drafts in one pass: a node's row is that of its path decoded alone, bit for bit, and so is what follows."""

import random

import pytest
import torch

import specdec_kernels as sk
from scripted import Scripted
from specdec_kernels import native
from specloop.models.base import Part, accept, forward_parts, paths_to
from specloop.models.pool import PAGE
from test_ragged_pass import TOKENS, started
from tiny_llama import CONFIG, build

BUSHY, DEEP = [-1, -1, 0, 0, 1, 2, 2, 6], [-1, 0, 0, -1, 3, 1, 1, 4, 7, 7, 7, 10]
TREES = ([], [-1], [-1, -1, -1], [-1, 0, 0], [-1, 0, 1, 2], BUSHY, DEEP)


def alone(model, text, ids):
    """The row of the last of ``ids`` behind ``text``, decoded one id at a time."""
    cache = started(model, text)
    for token in ids[:-1]:
        model.forward([token], cache, last=0)
    return model.forward(ids[-1:], cache, last=1).clone()


def wanted(model, text, chain, nodes, parents):
    rows = [alone(model, text, chain)]
    return torch.cat(rows + [alone(model, text, chain + [nodes[i] for i in path]) for path in paths_to(parents)])


def drawn(rng, count):
    return [rng.randrange(CONFIG.vocab) for _ in range(count)]


def check(model, starts=(0, 5, 62, 63, 64, 127), trees=TREES, chains=(1, 1, 3), accepts=True, seed=0):
    """Trees behind texts that end around the border of a page; a path is accepted, and decoding goes on."""
    rng = random.Random(seed)
    for start, parents in ((s, p) for s in starts for p in trees):
        text, chain, nodes = TOKENS[:start], drawn(rng, rng.choice(chains)), drawn(rng, len(parents))
        cache = started(model, text)
        pages = model._pool.used
        got = model.forward_parts([Part(cache, chain + nodes, len(nodes) + 1, parents)]).clone()
        assert torch.equal(got, wanted(model, text, chain, nodes, parents)), f"{start} {len(chain)} {parents}"
        assert cache.length == start + len(chain)
        path = rng.choice([[], *paths_to(parents)])
        if accepts:
            cache.accept(path)
            assert cache.length == start + len(chain) + len(path)
        else:
            path = []
        text = text + chain + [nodes[i] for i in path]
        more = drawn(rng, 2)
        assert torch.equal(model.forward(more, cache, last=2)[1:], alone(model, text, more))
        assert model._pool.used == pages  # the paths' own pages are back
        assert sorted(set(cache.pages)) == sorted(cache.pages)


@pytest.mark.parametrize("kv", ["int8", "f16", "f32"])
@pytest.mark.parametrize("dtype", ["int8", "f32"])
def test_nodes_have_the_bits_of_their_paths(dtype, kv):
    check(build(dtype, kv=kv), starts=(5, 62, 64))


def test_every_place_in_a_page():
    check(build("int8"), starts=(0, 1, 60, 61, 63, 65, 126, 127, 128), trees=[BUSHY, DEEP])


def test_a_path_that_is_not_accepted_leaves_no_trace():
    check(build("int8"), starts=(5, 62), accepts=False)


def test_long_chains_before_a_tree():
    check(build("int8"), starts=(0, 60), chains=(60, 70, 126, 140), trees=[BUSHY, DEEP])


@pytest.mark.parametrize("name", native.ISA_NAMES)
def test_every_instruction_set(name):
    if not native.cpu.set_isa(name):
        pytest.skip(f"this machine can't run {name}")
    try:
        check(build("int8"), starts=(62,), trees=[BUSHY, DEEP])
    finally:
        native.cpu.set_isa(native.cpu.machine_isa())


def test_without_compiled_kernels():
    with sk.use_backend("reference"):
        check(build("f32"), starts=(2,), trees=[[-1, -1, 0]], chains=(1,))


def test_trees_and_chains_share_a_pass():
    model, rng = build("int8"), random.Random(3)
    for _ in range(4):
        texts = [TOKENS[rng.randrange(99) :][: rng.choice((3, 62, 63, 64, 100))] for _ in range(4)]
        caches = [started(model, text) for text in texts]
        ids = [drawn(rng, n) for n in (1, 4)]
        trees = [(drawn(rng, 1), drawn(rng, len(parents)), parents) for parents in (BUSHY, DEEP)]
        parts = [Part(caches[0], ids[0], 1), Part(caches[2], trees[0][0] + trees[0][1], 9, BUSHY),
                 Part(caches[1], ids[1], 2), Part(caches[3], trees[1][0] + trees[1][1], 13, DEEP)]  # fmt: skip
        got = model.forward_parts(parts).clone()
        want = [
            model.forward(ids[0], started(model, texts[0]), last=1).clone(),
            wanted(model, texts[2], *trees[0]),
            model.forward(ids[1], started(model, texts[1]), last=2).clone(),
            wanted(model, texts[3], *trees[1]),
        ]
        assert torch.equal(got, torch.cat(want))
        caches[2].accept([0, 3])
        caches[3].accept([3, 4, 7, 10, 11])
        for cache, text, (chain, nodes, _), path in zip(
            caches[2:], texts[2:], trees, ([0, 3], [3, 4, 7, 10, 11]), strict=True
        ):
            after = text + chain + [nodes[i] for i in path]
            assert torch.equal(model.forward([7], cache, last=1), alone(model, after, [7]))


def test_the_end_of_the_cache():
    """The longest path may fill the cache, no node may go beyond it; paths need no more room than they have ids."""
    model = build("int8", context=PAGE + 4)
    cache = started(model, TOKENS[:PAGE])
    parents = [-1, 0, 1, 0, -1]
    ids = TOKENS[PAGE : PAGE + 6]
    got = model.forward_parts([Part(cache, ids, 6, parents)]).clone()
    assert torch.equal(got, wanted(model, TOKENS[:PAGE], ids[:1], ids[1:], parents))
    cache.accept([0, 1, 2])
    assert cache.length == cache.capacity
    cache.truncate(PAGE)
    with pytest.raises(ValueError, match=r"paths of at most 4 \(room in the cache\), got 5"):
        model.forward_parts([Part(cache, [*ids, 3], 7, [*parents, 2])])


def test_what_is_no_tree():
    model = build("int8")
    cache = started(model, TOKENS[:5])
    for tokens, last, parents, message in (
        ([1, 2, 3], 3, [0, -1], "numbers of earlier nodes, or -1"),
        ([1, 2, 3], 3, [-1, 1], "numbers of earlier nodes"),
        ([1, 2, 3], 3, [-2, 0], "numbers of earlier nodes"),
        ([1, 2, 3], 2, [-1, 0], "last: expected 3"),
        ([1, 2], 3, [-1, 0], "fewer nodes than tokens, got 2 of 2"),
        ([1] * 129, 129, [-1] * 128, "a tree of at most 127 nodes, got 128"),
    ):
        with pytest.raises(ValueError, match=message):
            model.forward_parts([Part(cache, tokens, last, parents)])
    cache.accept([0])  # there was none to accept of
    assert cache.length == 5
    model.forward_parts([Part(cache, [1, 2, 3, 4], 4, [-1, 0, -1])])
    for path in ([1], [0, 2], [2, 0], [3], [-1]):
        with pytest.raises(ValueError, match="path: expected node numbers from the root down"):
            cache.accept(path)
    cache.accept([0, 1])
    assert cache.length == 8


def test_no_page_for_a_tree(monkeypatch):
    """What can't be had changes nothing."""
    model = build("int8")
    cache, pool = started(model, TOKENS[:9], 64), model._pool
    tree = Part(cache, [1, 2, 3, 4], 4, [-1, -1, -1])

    def none_left(count):
        raise MemoryError(f"no {count} more pages")

    with monkeypatch.context() as m:
        m.setattr(pool, "take", none_left)
        with pytest.raises(MemoryError, match="no 2 more pages"):
            model.forward_parts([tree])
    assert cache.length == 9 and pool.used == 1
    got = model.forward_parts([tree]).clone()
    del cache, tree
    assert torch.equal(got, wanted(model, TOKENS[:9], [1], [2, 3, 4], [-1] * 3))


def test_models_without_trees():
    """Node by node; their caches keep nothing of a tree, so what is accepted is fed again."""

    def logits(prefix):
        return [float(len(prefix)), float(sum(prefix)), *map(float, prefix[-2:])]

    model = Scripted(logits, 4)
    cache = model.new_cache(9)
    model.forward([1, 2], cache, last=0)
    got = forward_parts(model, [Part(cache, [3, 0, 1, 2], 4, [-1, 0, -1])])
    assert got.tolist() == [logits(ids) for ids in ([1, 2, 3], [1, 2, 3, 0], [1, 2, 3, 0, 1], [1, 2, 3, 2])]
    accept(cache, [0, 1])
    assert cache.ids == [1, 2, 3]
