"""Versions that stream: files, threads and memory go with the old one, and every version is read from its own file."""

import gc
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

import specloop
from specdec_kernels import stream
from specloop.convert import cached_pack
from specloop.errors import BudgetError, FormatError, PairClosed, WeightsError
from specloop.formats.gguf_checkpoint import GGUFCheckpoint
from specloop.models.buffers import needs
from tiny_llama import CONFIG as TINY

pytest.importorskip("gguf", reason="the gguf package writes the test files: pip install '.[test]'")
from test_loader import write

CONFIG = replace(TINY, layers=10)  # so that the weights are most of what a model takes
PROMPT = [5, 100, 7, 7, 42]
CONTEXT = 128


@pytest.fixture
def packs(tmp_path, monkeypatch):
    """Two versions, A and B."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    return [pack_of(tmp_path, seed) for seed in (0, 1)]


def pack_of(folder, seed):
    with GGUFCheckpoint(str(write(folder / f"{seed}.gguf", config=CONFIG, seed=seed))) as checkpoint:
        return str(cached_pack(checkpoint, dtype="int8"))


def smallest(pack):
    with stream.Pack.open(pack) as opened:
        return stream.plan(opened, reserved=needs(CONFIG, kv="int8", context=CONTEXT)).minimum


def room_for_two(pack):
    """The smallest budget under which a version can be swapped for one of its size."""
    few = needs(CONFIG, kv="int8", context=64)
    with stream.Pack.open(pack) as opened:
        return smallest(pack) + stream.plan(opened, reserved=few).minimum + 100_000  # for lookup indexes


def loaded(pack, budget, draft="lookup", **options):
    return specloop.load(pack, draft, context=CONTEXT, memory_budget=budget, **options)


def alone(pack, ids, tokens):
    with loaded(pack, None, "none") as pair:
        return pair.generate(list(ids), max_new_tokens=tokens).tokens


def files():
    return sorted(os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if alive(n))


def alive(n):
    return os.path.lexists(f"/proc/self/fd/{n}")


def mapped(pack):
    with open("/proc/self/maps") as maps:
        return any(pack in line for line in maps)


@pytest.mark.parametrize("streams", [True, False])
def test_streams_go_on_with_the_new_version(packs, streams):
    a, b = packs
    with loaded(a, room_for_two(a) if streams else None) as pair:
        request = pair.stream(PROMPT, max_new_tokens=24)
        tokens = [next(request).token for _ in range(5)]
        first = request.result.stats.memory.streamed_bytes
        pair.swap(target=b)
        tokens += [event.token for event in request]
        memory = request.result.stats.memory
        assert bool(first) == streams and bool(memory.streamed_bytes - first) == streams
        assert pair.generate(PROMPT, max_new_tokens=24).tokens == alone(b, PROMPT, 24)
        assert pair.settings["model"] == b
    old = alone(a, PROMPT, 24)
    assert old != alone(b, PROMPT, 24)
    assert any(
        tokens[:n] == old[:n] and tokens[n:] == alone(b, PROMPT + tokens[:n], 24 - n)
        for n in range(5, 14)
        if tokens[:n] == old[:n]
    )


@pytest.mark.parametrize("streams", [True, False])
def test_many_swaps_leave_nothing_behind(packs, streams):
    """Reports 60 and 64."""
    wanted = [alone(pack, PROMPT, 12) for pack in packs]
    gc.collect()  # what earlier tests left would go in between
    before, threads = files(), set(threading.enumerate())
    with loaded(packs[0], room_for_two(packs[0]) if streams else None, k=3) as pair:
        pair.ready()
        idle = pair.stream(PROMPT, max_new_tokens=100)  # began with the first version
        next(idle)
        counts = []
        for n in range(8):
            pair.swap(target=packs[(n + 1) % 2])
            assert pair.generate(PROMPT, max_new_tokens=12).tokens == wanted[(n + 1) % 2]
            counts.append((len(files()), len(set(threading.enumerate()) - threads)))
            assert not mapped(packs[n % 2]) and mapped(packs[(n + 1) % 2]) == (not streams)
        assert len(set(counts)) == 1
    with pytest.raises(PairClosed):
        list(idle)
    assert files() == before and set(threading.enumerate()) <= threads
    assert not mapped(packs[0]) and not mapped(packs[1])


def test_a_pair_that_is_dropped_leaves_nothing_behind(packs):
    """Without close, and without waiting for the garbage collector."""
    gc.collect()
    before, threads = files(), set(threading.enumerate())
    gc.disable()
    try:
        for _ in range(3):
            pair = loaded(packs[0], room_for_two(packs[0]), k=3)
            pair.generate(PROMPT, max_new_tokens=8)
            request = pair.stream(PROMPT, max_new_tokens=8)
            next(request)
            assert len(files()) > len(before)
            del pair, request
            assert files() == before and set(threading.enumerate()) <= threads
    finally:
        gc.enable()


def test_a_reload_reads_the_file_again(packs):
    """Report 61: a new version under the old name."""
    a, b = packs
    with loaded(a, room_for_two(a)) as pair:
        pair.ready()
        os.replace(b, a)
        assert pair.generate(PROMPT, max_new_tokens=12).tokens != alone(a, PROMPT, 12)  # still the file it has open
        pair.swap(target=a)
        assert pair.generate(PROMPT, max_new_tokens=12).tokens == alone(a, PROMPT, 12)


@pytest.mark.parametrize("streams", [True, False])
def test_a_damaged_version_is_refused_before_the_exchange(packs, streams):
    """Every block is read and checked, streamed ones by the passes that measure what they cost."""
    a, b = packs
    wanted, before = alone(a, PROMPT, 30), None
    with stream.Pack.open(b) as opened:
        at = opened.blocks[opened.order[2]].ranges[0].offset + 100
    with open(b, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    with loaded(a, room_for_two(a) if streams else None) as pair:
        request = pair.stream(PROMPT, max_new_tokens=30)
        tokens = [next(request).token]
        gc.collect()  # what earlier tests left would go in between
        before, threads = files(), set(threading.enumerate())
        for _ in range(3):
            with pytest.raises(WeightsError, match="damaged"):
                pair.swap(target=b)
        assert files() == before and set(threading.enumerate()) <= threads and not mapped(b)
        assert tokens + [event.token for event in request] == wanted


def test_other_things_than_packs_are_refused(packs, tmp_path):
    wanted = alone(packs[0], PROMPT, 12)
    (tmp_path / "short.pack").write_bytes(Path(packs[1]).read_bytes()[:-4096])
    with loaded(packs[0], room_for_two(packs[0])) as pair:
        with pytest.raises(FormatError):
            pair.swap(target=str(tmp_path / "short.pack"))
        with pytest.raises(specloop.ModelError, match="no such file"):
            pair.swap(target=str(tmp_path / "none"))
        with GGUFCheckpoint(str(tmp_path / "1.gguf")) as checkpoint:
            other = str(cached_pack(checkpoint, dtype="f32"))
        with pytest.raises(specloop.ModelError, match="dtype"):
            pair.swap(target=other)
        assert pair.generate(PROMPT, max_new_tokens=12).tokens == wanted


def test_a_file_that_changed_can_be_swapped_away(packs):
    """A running stream whose file is rewritten ends with an error; the pair is not lost."""
    a, b = packs
    wanted = alone(a, PROMPT, 100), alone(b, PROMPT, 12)
    with loaded(a, room_for_two(a)) as pair:
        request = pair.stream(PROMPT, max_new_tokens=100)
        tokens = [next(request).token]
        with open(a, "r+b") as file:
            file.seek(os.path.getsize(a) - 1)
            file.write(b"\1")
        os.utime(a, ns=(1, 1))
        with pytest.raises(WeightsError, match="changed"):
            for event in request:
                tokens.append(event.token)
        assert request.result.tokens == tokens == wanted[0][: len(tokens)]
        pair.swap(target=b)
        assert pair.generate(PROMPT, max_new_tokens=12).tokens == wanted[1]


# ---- within the budget -----------------------------------------------------------------------------------------------


@pytest.fixture
def together(monkeypatch):
    """What all models and caches of a pair take while the newest one is tried out: a list of bytes."""
    import specloop.calibration as calibration

    seen, measure = [], calibration.measure

    def measured(model, *args):
        costs = measure(model, *args)
        if pairs:
            pair = pairs[-1]
            running = pair.pressure.used(pair.model) - pair.pressure.promised
            seen.append(running + model.memory_nbytes)
        return costs

    pairs = []
    monkeypatch.setattr(calibration, "measure", measured)
    monkeypatch.setattr(calibration, "WORTH_KEEPING", float("inf"))  # they are measured in every load
    return pairs, seen


@pytest.mark.parametrize("more", [0.75, 3.0])
def test_both_versions_fit_the_budget_together(packs, together, more):
    """The old one shrinks while the new one is read and tried, then the new one takes all of it."""
    (a, b), (pairs, seen) = packs, together
    with stream.Pack.open(a) as opened:
        layer = max(opened.blocks[index].nbytes for index in opened.order)
    budget = room_for_two(a) + int(more * layer)
    with loaded(a, budget) as pair:
        plan = pair.model.weights.stream.plan
        request = pair.stream(PROMPT, max_new_tokens=30)
        tokens = [next(request).token for _ in range(4)]
        pairs.append(pair)
        for n, target in enumerate((b, a, b)):
            pair.swap(target=target)
            weights = pair.model.weights
            assert len(seen) == n + 1 and seen[-1] <= budget
            assert weights.budget == budget and weights.stream.plan.resident == plan.resident
            assert weights.memory_nbytes == (0 if plan.mapped else plan.resident_bytes + plan.slots_bytes)
            result = pair.generate(PROMPT, max_new_tokens=30)
            assert result.tokens == alone(target, PROMPT, 30) and result.stats.memory.budget == budget
            pairs[:] = [pair]
        tokens += [event.token for event in request]
        assert len(tokens) == 30


def test_a_failed_swap_gives_the_memory_back(packs, tmp_path):
    a, b = packs
    with open(b, "r+b") as file:
        file.seek(os.path.getsize(b) // 2)
        file.write(bytes(64))
    with loaded(a, room_for_two(a)) as pair:
        weights = pair.model.weights
        before = weights.memory_nbytes, weights.nbytes
        wanted = pair.generate(PROMPT, max_new_tokens=12).tokens
        with pytest.raises((WeightsError, FormatError)):
            pair.swap(target=b)
        assert (weights.memory_nbytes, weights.nbytes) == before and pair.model.weights is weights
        result = pair.generate(PROMPT, max_new_tokens=12)
        assert result.tokens == wanted and result.stats.memory.streamed_bytes > 0


def test_a_budget_for_one_version_only(packs):
    a, b = packs
    with loaded(a, smallest(a)) as pair:
        wanted = pair.generate(PROMPT, max_new_tokens=12).tokens
        with pytest.raises(BudgetError, match=r"another model needs [0-9]+ bytes at least beside"):
            pair.swap(target=b)
        assert pair.generate(PROMPT, max_new_tokens=12).tokens == wanted


def test_a_draft_makes_its_room(packs, together, tmp_path):
    """Resident blocks of the target go for it, and stay away for as long as it is there."""
    from specloop.loader import size_in_memory

    (a, _), (pairs, seen) = packs, together
    small = str(write(tmp_path / "small.gguf"))
    size = size_in_memory(small, dtype="int8", kv="int8", context=CONTEXT)
    with loaded(a, smallest(a) + size) as pair:
        wanted = pair.generate(PROMPT, max_new_tokens=20).tokens
        resident = pair.model.nbytes
        pairs.append(pair)
        pair.swap(draft=small)
        assert seen[-1] <= pair.budget and pair.model.nbytes < resident
        result = pair.generate(PROMPT, max_new_tokens=20, k=3)
        assert result.tokens == wanted and result.stats.speculation.proposed
        assert pair.pressure.used(pair.model) <= pair.budget
        pairs.clear()
    with loaded(a, smallest(a) + size // 2) as pair:
        with pytest.raises(BudgetError):
            pair.swap(draft=small)
        assert pair.draft == "lookup" and pair.generate(PROMPT, max_new_tokens=20).tokens == wanted


def test_requests_that_begin_while_a_version_loads_have_room(packs):
    """What is free goes half to the version that loads, half to them: nothing is given back for their caches."""
    a, _ = packs
    with loaded(a, room_for_two(a) + 2_000_000) as pair:
        pair.generate(PROMPT, max_new_tokens=4)
        with pair._target.lock:
            promised = pair.pressure.share(100_000)
        assert 100_000 <= promised < pair.budget // 2
        streams = [pair.stream(PROMPT, max_new_tokens=12) for _ in range(4)]
        for request in streams:
            for _ in request:
                pass
            assert request.result.stats.memory.released == [] and request.result.stats.speculation.off_reason is None
        with pair._target.lock:
            pair.pressure.settle()
        assert pair.pressure.promised == 0 and pair.pressure.used(pair.model) <= pair.budget
