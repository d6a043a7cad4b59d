"""The pool of cache pages: who has which, what they take of memory, and how many more requests there is room for."""

import ctypes
import gc
import mmap
import random
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec_kernels.stream.limits import Memory
from specloop.drafts.lookup import BYTES_PER_ID
from specloop.models import pool as pools
from specloop.models.base import Part
from specloop.models.llama import Llama
from specloop.models.pool import PAGE, Pool, page_nbytes
from tiny_llama import CONFIG, build
from versions import PROMPT, alone, pair_of, parts

PLAIN = sys.platform != "linux" or pools._reserved(1 << 30) is None
WHY = "memory by the page: only on Linux, and not where address space is limited"
mapped = pytest.mark.skipif(PLAIN, reason=WHY)
WIDE = replace(CONFIG, layers=4, hidden=64, intermediate=64, heads=8, kv_heads=8, head_dim=64, vocab=50, context=4096)


def owned():
    """Bytes of anonymous memory in this process."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


def held(pool):
    """Bytes of memory behind a pool's address space, as the system counts its pages: whatever else the process does."""
    memory = pool._bytes
    start = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    pages = -(-(memory.data_ptr() + memory.nbytes - start) // mmap.PAGESIZE)
    there = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * mmap.PAGESIZE), there):
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in there) * mmap.PAGESIZE


def filled(model, cache):
    """Every key and value written, as a full request does."""
    for layer in model._pool.layers:
        for tensor in layer:
            if tensor is not None:
                tensor[cache.pages] = 1
    cache.advance(cache.capacity - cache.length)
    return cache


@pytest.fixture(params=["mapped", "plain"])
def kind(request, monkeypatch):
    if request.param == "plain":  # as on a GPU, or where no address space can be reserved
        monkeypatch.setattr(pools, "_reserved", lambda nbytes: None)
    elif PLAIN:
        pytest.skip(WHY)
    return request.param


def test_the_lowest_free_pages_first(kind):
    pool = Pool(CONFIG, "int8", "cpu", keep=8, most=100)
    first, second, third = pool.take(3), pool.take(2), pool.take(1)
    assert (first, second, third) == ([0, 1, 2], [3, 4], [5])
    pool.give(second, 0)
    pool.give(first, 3)
    assert pool.spare == 5 and pool.used == 1
    assert pool.take(2) == [0, 1] and pool.take(4) == [2, 3, 4, 6]
    assert pool.spare == 0 and pool.used == 7


def test_no_page_has_two_owners(kind):
    """Caches of any size come and go, some of them on other threads, and write to their pages."""
    rng = random.Random(1)
    pool, held = Pool(CONFIG, "f16", "cpu", keep=5, most=60), []
    for turn in range(400):
        if held and (rng.random() < 0.45 or pool.used > 50):
            pages, mark = held.pop(rng.randrange(len(held)))
            assert all((pool.layers[i % 3][2][page] == mark).all() for i, page in enumerate(pages))
            thread = threading.Thread(target=pool.give, args=(pages, len(pages)))
            thread.start()
            thread.join()
        elif rng.random() < 0.1:
            pool.drop_spare()
        else:
            pages = pool.take(rng.randrange(1, 6))
            for i, page in enumerate(pages):
                pool.layers[i % 3][2][page] = turn
            held.append((pages, turn))
        everyone = [page for pages, _ in held for page in pages]
        assert len(set(everyone)) == len(everyone) == pool.used
    assert pool._unreached == pool.used


def test_what_can_not_be_had(monkeypatch):
    monkeypatch.setattr(pools, "_reserved", lambda nbytes: None)
    pool = Pool(CONFIG, "int8", "cpu", keep=8)
    empty = torch.empty

    def full(*size, **options):
        raise RuntimeError("can't allocate memory: you tried to allocate too much")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(MemoryError, match="cache pages: can't allocate memory"):
        pool.take(3)
    monkeypatch.setattr(torch, "empty", empty)
    assert pool.take(3) == [0, 1, 2]


@mapped
def test_a_pool_that_is_full():
    pool = Pool(CONFIG, "int8", "cpu", keep=8, most=5)
    pages = pool.take(4)
    with pytest.raises(MemoryError, match="a pool of 5 cache pages has no 1 more"):
        pool.take(2)
    assert pool.take(1) == [4]
    pool.give(pages, 0)
    assert pool.take(4) == pages


@mapped
@pytest.mark.parametrize("limit", ["none", "address space", "strict overcommit", "refused"])
def test_address_space_is_reserved_where_it_costs_nothing(limit, monkeypatch, tmp_path):
    """Elsewhere it would be missing for everything else, so the pool has what was asked for and no more."""
    import resource

    if limit == "address space":
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (1 << 40, 1 << 40))
    elif limit == "strict overcommit":
        monkeypatch.setattr(pools, "OVERCOMMIT", tmp_path / "overcommit")
        (tmp_path / "overcommit").write_text("2\n")
    elif limit == "refused":

        def refused(*args, **options):
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr(pools.mmap, "mmap", refused)
    pool = Pool(CONFIG, "int8", "cpu", keep=8, most=500)
    assert pool._pages == (500 if limit == "none" else 0)
    assert pool.take(50) == list(range(50)) and pool._pages == (500 if limit == "none" else 50)


def test_a_moved_pool_keeps_its_bytes_and_forgets_captured_passes(monkeypatch):
    monkeypatch.setattr(pools, "_reserved", lambda nbytes: None)
    model, other = build("int8"), build("int8")
    cache, rows = model.new_cache(70), []
    for i in range(6):
        rows.append(model.forward([i, 7], cache, last=2).clone())
        more = model.new_cache(100 * i + 1)  # makes it move
    assert torch.equal(
        torch.cat(rows), other.forward([n for i in range(6) for n in (i, 7)], other.new_cache(), last=12)
    )
    del cache, more
    assert model.spare_nbytes and model.drop_spare() and model.spare_nbytes == 0
    assert model._pool.layers[0][0].numel() == 0 and not model._shapes
    assert torch.equal(model.forward([0, 7], model.new_cache(), last=2), rows[0])


# ---- memory ----------------------------------------------------------------------------------------------------------


@mapped
@pytest.mark.parametrize("kv", ["int8", "f32"])
def test_pages_take_memory_when_they_are_written_and_give_it_back(kv):
    page = page_nbytes(WIDE, kv)
    pool = Pool(WIDE, kv, "cpu", keep=10)
    pages = pool.take(60)
    assert held(pool) < page
    pool._bytes[pages] = 1
    assert abs(held(pool) - 60 * page) < 0.02 * 60 * page
    pool.give(pages[20:], 0)
    assert pool.spare == 10 and abs(held(pool) - 30 * page) < 0.04 * 30 * page  # ten stay for the next request
    assert pool.take(12) == [*range(20, 30), 30, 31]  # warm ones first
    pool.give(pages[:20], 0)
    assert pool.drop_spare() == 10 * page and abs(held(pool) - 10 * page) < page  # ten are in use again
    assert (pool._bytes[5] == 0).all() and (pool._bytes[25] == 1).all()


def wide(**options):
    """A model whose caches are most of its memory."""
    return Llama(WIDE, build("f32", config=WIDE).weights, context=4096, kv="int8", **options)


@mapped
def test_b12_room_is_the_budget_over_what_a_request_takes_with_its_draft():
    """floor(B / (t + d)) requests fit, and take within 2 % of what was said."""
    model, draft = wide(), wide()
    capacity = 700
    each = model.cache_nbytes(capacity) + draft.cache_nbytes(capacity)
    for requests, more in ((0, each - 1), (3, 0), (3, each - 1), (5, each // 2)):
        model.weights.budget = model.memory_nbytes + requests * each + more
        assert model.room(capacity, draft.cache_nbytes(capacity)) == requests
    caches = []
    while model.room(capacity, draft.cache_nbytes(capacity)):
        caches += [filled(m, m.new_cache(capacity)) for m in (model, draft)]
        model.weights.budget -= draft.cache_nbytes(capacity)  # which the model does not know of
    told = sum(cache.nbytes for cache in caches)
    assert len(caches) == 10 and told == 5 * each and abs(held(model._pool) + held(draft._pool) - told) < 0.02 * told
    bytes_of = WIDE.layers * 2 * WIDE.kv_heads * (WIDE.head_dim + 4)  # of a token
    assert abs(each / 2 - capacity * bytes_of) <= PAGE * bytes_of + 12 * pools.UNIT


@mapped
def test_room_in_free_memory(monkeypatch):
    """Seven eighths of what is free, less what running requests have yet to fill."""
    model = wide()
    page = model._pool.page_nbytes
    monkeypatch.setattr(pools, "available_memory", lambda: Memory(80 * page, "a test"))
    assert model.room(10 * PAGE) == 7 and model.room(10 * PAGE, also=4 * page) == 5
    half = model.new_cache(20 * PAGE)
    assert model.room(10 * PAGE) == 5
    half.advance(15 * PAGE)  # what it has written is no longer free, the system says
    assert model.room(10 * PAGE) == 6
    del half
    assert model.room(10 * PAGE) == 9  # its pages would be taken first
    assert model.drop_spare() == 20 * page and model.room(10 * PAGE) == 7


@mapped
def test_b13_two_hundred_short_requests_leave_nothing_behind():
    rng, sizes = random.Random(0), {}
    with pair_of(1) as pair:
        for i in range(1, 201):
            prompts = [[rng.randrange(3, 200) for _ in range(rng.randrange(1, 40))] for _ in range(1 + (i % 20 == 0))]
            pair.generate_batch(prompts, max_new_tokens=3)
            if i in (20, 200):
                sizes[i] = owned()
        assert pair.model._pool.used == 0
    assert abs(sizes[200] - sizes[20]) < 0.01 * sizes[20]


def test_a_draft_models_cache_counts_for_room():
    with pair_of(1, draft=parts(1), k=3) as pair:
        target, draft = pair.model, pair._draft.version.model
        each = target.cache_nbytes(100) + draft.cache_nbytes(100) + 9 * 4 * CONFIG.vocab + 101 * BYTES_PER_ID
        used = pair.pressure.used(target) - target.spare_nbytes - draft.spare_nbytes
        target.weights.budget = used + 3 * each - 2000
        assert target.room(100) > 3 > pair.place.room(100) == 2
        stream = pair.stream(PROMPT, max_new_tokens=94)
        tokens = [next(stream).token]
        assert pair.place.room(100) == 1
        tokens += [event.token for event in stream]
        assert tokens == alone(1, PROMPT, 94) and pair.place.room(100) == 2
    assert pair.place.room(100) > 1000  # nothing is in place


@mapped
def test_a_tree_that_the_budget_has_no_room_for_is_judged_node_by_node():
    with pair_of(1) as pair:
        ids, parents = [4, 5, 6, 7], [-1, -1, 0]
        model, place = pair.model, pair.place
        seat = pair.seat(60)
        place.forward_parts([Part(seat, PROMPT, 0)])
        model.weights.budget = pair.pressure.used(model) + model._pool.page_nbytes
        tree = Part(seat, ids, 4, parents)
        rows = place.forward_parts([tree]).clone()
        seat.accept([0])
        assert seat.length == len(PROMPT) + 2
        seat.truncate(len(PROMPT))
        model.drop_spare()
        model.weights.budget = pair.pressure.used(model) + model._pool.page_nbytes - 1
        assert torch.equal(place.forward_parts([tree]), rows)
        seat.accept([0])
        assert seat.length == len(PROMPT) + 1  # what is not kept is fed again
        assert model._pool.used == 1


def test_a_drafts_cache_has_to_fit_the_budget():
    """A request whose draft finds no room goes on without it until others have ended, and takes nothing from them."""
    with pair_of(1, draft=parts(1), k=3) as pair:
        target, draft = pair.model, pair._draft.version.model
        used = pair.pressure.used(target) - target.spare_nbytes - draft.spare_nbytes
        target.weights.budget = used + 2 * target.cache_nbytes(64) + draft.cache_nbytes(64) + 10_000
        first, second = (pair.stream(PROMPT, max_new_tokens=40) for _ in range(2))
        tokens = [[next(stream).token] for stream in (first, second)]
        assert pair.pressure.used(target) <= target.budget
        for found, stream in zip(tokens, (first, second), strict=True):
            found += [event.token for event in stream]
            assert stream.result.stats.memory.released == []
        assert tokens == [alone(1, PROMPT, 40)] * 2
        one, other = (stream.result.stats.speculation for stream in (first, second))
        assert one.faults == [] and not one.rounds_without_draft
        assert "memory_budget: a cache for" in str(other.faults) and other.rounds_without_draft and other.proposed


@pytest.mark.parametrize("draft", ["lookup", "model"])
def test_a_batch_is_as_large_as_the_budget_allows(draft):
    prompts = [[3 + i, 9, 9, 3 + i, 9] for i in range(8)]
    with pair_of(1, draft=parts(1) if draft == "model" else "lookup", k=2) as pair:
        wanted = [pair.generate(prompt, max_new_tokens=20).tokens for prompt in prompts]
        target, inner, seen = pair.model, pair.place.forward_parts, []
        target.drop_spare()
        each = target.cache_nbytes(24) + 9 * 4 * CONFIG.vocab + 25 * BYTES_PER_ID
        if draft == "model":
            pair._draft.version.model.drop_spare()
            each += pair._draft.version.model.cache_nbytes(24)
        target.weights.budget = pair.pressure.used(target) + 3 * each + 10_000

        def forward_parts(given):
            rows = inner(given)
            seen.append((len(given), pair.pressure.used(target)))
            return rows

        pair.place.forward_parts = forward_parts
        results = pair.generate_batch(prompts, max_new_tokens=20)
        assert [result.tokens for result in results] == wanted
        assert max(parts for parts, _ in seen) == 3 and max(used for _, used in seen) <= target.budget
        assert all(result.stats.memory.released == [] and not result.stats.speculation.faults for result in results)
