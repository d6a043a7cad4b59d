"""Memory that runs short: what is given back, in which order, and that no token changes."""

import weakref

import pytest
import torch

import specloop
from specdec_kernels import stream
from specloop.convert import cached_pack
from specloop.errors import BudgetError, OutOfMemory
from specloop.formats.gguf_checkpoint import GGUFCheckpoint
from specloop.models.buffers import needs
from specloop.models.pool import PAGE
from specloop.pressure import is_out_of_memory
from tiny_llama import CONFIG
from versions import PROMPT, alone, pair_of, parts

pytest.importorskip("gguf", reason="the gguf package writes the test files: pip install '.[test]'")
from test_loader import write

ORDER = ["kv pages", "lookup index", "prefetch", "resident blocks", "draft"]
FAILURES = [
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("HIP out of memory"),
    RuntimeError("std::bad_alloc"),
    OSError(12, "Cannot allocate memory"),
]


@pytest.fixture
def pack(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    with GGUFCheckpoint(str(write(tmp_path / "tiny.gguf"))) as checkpoint:
        return str(cached_pack(checkpoint, dtype="int8"))


def smallest(pack, context=128, draft=0):
    with stream.Pack.open(pack) as opened:
        return stream.plan(opened, reserved=needs(CONFIG, kv="int8", context=context) | {"draft": draft}).minimum


def with_slots_and_residents(pack, context=128, draft=0):
    """A budget of which a plan with several slots and a resident block leaves nothing."""
    reserved = needs(CONFIG, kv="int8", context=context) | {"draft": draft}
    with stream.Pack.open(pack) as opened:
        least = stream.plan(opened, reserved=reserved).minimum
        plans = (stream.plan(opened, budget=least + more, reserved=reserved) for more in range(0, 300_000, 4096))
        return next(plan.total_bytes for plan in plans if plan.slots > 1 and plan.resident)


def failing(pair, times, error, after=0):
    """The target's passes run out of memory so many times, from the ``after``-th on."""
    model, left = pair.model, [after, times]
    forward = model.forward

    def fails(tokens, cache, *, last):
        if left[0]:
            left[0] -= 1
        elif left[1]:
            left[1] -= 1
            raise error
        return forward(tokens, cache, last=last)

    model.forward = fails
    return left


def steps(result):
    return [step["step"] for step in result.stats.memory.released]


# ---- an allocation fails ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: str(error)[:20])
def test_a_failed_allocation_is_tried_again_with_more_room(error):
    with pair_of(1) as pair:
        pair.generate(PROMPT, max_new_tokens=8)
        other = pair.stream(PROMPT, max_new_tokens=8)  # takes the spare pages; the next request's become spare
        next(other)
        pair.generate(PROMPT, max_new_tokens=8)
        left = failing(pair, 1, error, after=2)
        result = pair.generate(PROMPT, max_new_tokens=30)
        assert result.tokens == alone(1, PROMPT, 30) and left == [0, 0]
        assert steps(result) in (["kv pages"], ["lookup index"])
        assert all(step["bytes"] > 0 for step in result.stats.memory.released)
        assert result.as_dict()["memory"]["released"] == result.stats.memory.released


@pytest.mark.parametrize("error", [RuntimeError("boom"), ValueError("out of memory"), OSError(5, "I/O")])
def test_other_errors_free_nothing(error):
    assert not is_out_of_memory(error)
    with pair_of(1) as pair:
        pair.generate(PROMPT, max_new_tokens=8)
        failing(pair, 1, error)
        stream = pair.stream(PROMPT, max_new_tokens=8)
        with pytest.raises(type(error)):
            next(stream)
        assert stream.result.stats.memory.released == []


def test_every_step_in_order(pack):
    """A streamed target with resident blocks, lookups, a draft model, spare pages: all go before the request does."""
    from specloop.loader import size_in_memory

    draft_size = size_in_memory(pack, dtype="int8", kv="int8", context=128)
    budget = with_slots_and_residents(pack, draft=draft_size)
    with specloop.load(pack, pack, context=128, memory_budget=budget, k=3) as pair:
        plain = pair.generate(PROMPT, max_new_tokens=50, draft="none").tokens
        busy = pair.stream(PROMPT, max_new_tokens=50, draft="lookup")
        busy_tokens = [next(busy).token]
        pair.generate(PROMPT, max_new_tokens=4)  # its pages become spare
        weights = pair.model.weights.stream
        before = weights.stats
        assert before.active and before.slots > 1 and before.resident_bytes and pair._draft.version is not None
        request = pair.stream(PROMPT, max_new_tokens=50)
        tokens = [next(request).token]
        pair.model.new_cache(64)  # the request took the spare ones
        fails, forward = [True], pair.model.forward

        def until_all_is_gone(new, cache, *, last):
            if fails[0]:
                raise MemoryError
            return forward(new, cache, last=last)

        pair.model.forward = until_all_is_gone
        order = ORDER if pair.model._pool._mapping is not None else ORDER[1:]  # a pool in use goes page by page or not
        with pytest.raises(OutOfMemory, match=f"given back before: {', '.join(order)}"):
            list(request)
        assert steps(request.result) == order and request.result.tokens == plain[: len(request.result.tokens)]
        assert request.result.tokens[: len(tokens)] == tokens and request.result.finish_reason is None
        after = weights.stats
        freed = {step["step"]: step["bytes"] for step in request.result.stats.memory.released}
        assert after.slots == 1 and freed["prefetch"] == (before.slots - 1) * before.slot_bytes
        assert freed["resident blocks"] == before.resident_bytes - after.resident_bytes > 0
        assert pair._draft.version is None and pair.draft == "none" and freed["draft"] >= draft_size // 2
        fails[0] = False  # the rest of the others goes on
        busy_tokens += [event.token for event in busy]
        assert busy_tokens == plain and busy.result.stats.speculation.off_reason == "its memory was needed"
        again = pair.generate(PROMPT, max_new_tokens=50)
        assert again.tokens == plain and again.stats.memory.released == []
        assert pair.generate(PROMPT, max_new_tokens=50, draft="lookup").stats.speculation.proposed


def test_the_draft_goes_while_requests_use_it():
    with pair_of(1, draft=parts(1), k=3) as pair:
        stream = pair.stream(PROMPT, max_new_tokens=40)
        first = [next(stream).token for _ in range(6)]
        other = pair.stream(PROMPT, max_new_tokens=40)
        next(other)
        gone = weakref.ref(pair._draft.version.model)
        failing(pair, 2, MemoryError())
        assert first + [event.token for event in stream] == alone(1, PROMPT, 40)
        assert steps(stream.result) == ["lookup index", "draft"] and gone() is None
        assert [event.token for event in other] == alone(1, PROMPT, 40)[1:]
        for result in (stream.result, other.result):
            assert result.stats.speculation.faults == [] and not any(result.stats.speculation.k_history[-10:])
            assert result.stats.speculation.off_reason == "its memory was needed"
        assert pair.generate(PROMPT, max_new_tokens=8).stats.speculation.off_reason == "no draft"


def test_a_model_goes_on_when_the_lookup_before_it_goes():
    with pair_of(1, draft=parts(1), k=3) as pair:
        stream = pair.stream(PROMPT, max_new_tokens=40)
        first = [next(stream).token for _ in range(6)]
        failing(pair, 1, MemoryError())
        assert first + [event.token for event in stream] == alone(1, PROMPT, 40)
        counts = stream.result.stats.speculation
        assert steps(stream.result) == ["lookup index"] and counts.off_reason is None and counts.k_history[-2] == 3


def test_nothing_left_is_a_clear_error_and_the_text_stays():
    with pair_of(1, draft="none") as pair:
        wanted = alone(1, PROMPT, 20)
        failing(pair, 1000, MemoryError("no room for 4096 bytes"), after=6)
        stream = pair.stream(PROMPT, max_new_tokens=20)
        tokens = []
        with pytest.raises(OutOfMemory, match="no room for 4096 bytes; given back before: nothing"):
            for event in stream:
                tokens.append(event.token)
        assert len(tokens) == 5 and tokens == wanted[:5] == stream.result.tokens and stream.result.text
        with pytest.raises(MemoryError):
            pair.generate(PROMPT)


def test_a_failure_between_the_chunks_of_a_prompt():
    """Half of a pass was done already: nothing is computed twice, nothing is left out."""
    prompt = [(5 * i) % CONFIG.vocab for i in range(180)]
    with pair_of(1) as pair:
        other = pair.stream(PROMPT, max_new_tokens=8)
        next(other)
        one_pass, done = pair.model._pass, []

        def failing_once(*args):
            done.append(args)
            if len(done) == 2:
                raise MemoryError
            return one_pass(*args)

        pair.model._pass = failing_once
        result = pair.generate(prompt, max_new_tokens=12)
        assert result.tokens == alone(1, prompt, 12) and steps(result) == ["lookup index"]


def test_pages_that_can_not_be_had(monkeypatch):
    """The pool has none left."""
    with pair_of(1, draft="none") as pair:
        pair.generate(PROMPT, max_new_tokens=4)
        streams = [pair.stream(PROMPT, max_new_tokens=12) for _ in range(2)]
        next(streams[0])  # has the spare pages now
        pool = pair.model._pool

        def none_left(count):
            raise MemoryError(f"no {count} more pages")

        monkeypatch.setattr(pool, "take", none_left)
        with pytest.raises(OutOfMemory, match="no 1 more pages; given back before: nothing"):
            next(streams[1])
        monkeypatch.undo()
        assert [event.token for event in streams[0]] == alone(1, PROMPT, 12)[1:]
        assert pair.generate(PROMPT, max_new_tokens=12).tokens == alone(1, PROMPT, 12)


# ---- a budget is about to be exceeded --------------------------------------------------------------------------------


def test_a_second_request_makes_its_own_room(pack):
    """The budget has one cache of the whole context. Another one takes its place from what can be given back."""
    budget = with_slots_and_residents(pack)
    with specloop.load(pack, "lookup", context=128, memory_budget=budget, k=2) as pair:
        plain = pair.generate(PROMPT, max_new_tokens=100, draft="none").tokens
        first, second = (pair.stream(PROMPT, max_new_tokens=100) for _ in range(2))
        tokens = [[next(first).token], [next(second).token]]
        model = pair.model
        assert model.memory_nbytes + first._session.seat.nbytes + second._session.seat.nbytes <= budget
        released = second.result.stats.memory.released
        assert released and first.result.stats.memory.released == []
        assert [step["step"] for step in released] == [s for s in ORDER if s in {r["step"] for r in released}]
        tokens[0] += [event.token for event in first]
        tokens[1] += [event.token for event in second]
        assert tokens == [plain, plain]


def test_a_request_too_many_is_refused(pack):
    with specloop.load(pack, "none", context=128, memory_budget=smallest(pack)) as pair:
        first = pair.stream(PROMPT, max_new_tokens=120)
        tokens = [next(first).token]
        second = pair.stream(PROMPT, max_new_tokens=120)
        with pytest.raises(BudgetError, match=r"memory_budget: a cache for 124 tokens takes .* are left"):
            next(second)
        assert len(second.result.tokens) == 0
        tokens += [event.token for event in first]
        second = pair.stream(PROMPT, max_new_tokens=120)  # now there is room
        assert [event.token for event in second] == tokens


def test_short_requests_share_the_budget_of_a_long_one(pack):
    with specloop.load(pack, "none", context=128, memory_budget=smallest(pack)) as pair:
        streams = [pair.stream(PROMPT, max_new_tokens=PAGE - len(PROMPT)) for _ in range(2)]
        tokens = [[next(stream).token] for stream in streams]
        for found, stream in zip(tokens, streams, strict=True):
            found += [event.token for event in stream]
        assert tokens[0] == tokens[1]


def test_spare_pages_are_taken_over_not_counted_twice(pack):
    with specloop.load(pack, "none", context=128, memory_budget=smallest(pack)) as pair:
        for _ in range(3):
            stream = pair.stream(PROMPT, max_new_tokens=120)
            next(stream)
            stream.close()
            assert stream.result.stats.memory.released == [] and pair.model.spare_nbytes


# ---- the statistics --------------------------------------------------------------------------------------------------


def test_memory_of_a_streamed_model(pack):
    """Report 52: a request that streams says so, and how much: each block once per pass, whatever K."""
    budget = smallest(pack)
    with specloop.load(pack, "lookup", context=128, memory_budget=budget) as pair:
        for k in (0, 1, 4):
            weights = pair.model.weights.stream
            passes = weights.stats.passes
            result = pair.generate(PROMPT, max_new_tokens=30, k=k)
            memory, rounds = result.stats.memory, result.stats.speculation.rounds
            prefill = sum(block.nbytes for block in weights.pack.blocks if block.name.startswith("layer"))
            assert weights.stats.passes - passes == rounds + 1
            assert memory.streamed_bytes == rounds * weights.plan.bytes_per_pass + prefill
            assert memory.budget == budget and memory.resident == weights.stats.resident_bytes
            assert memory.peak > 1e7 and memory.released == []


def test_memory_of_two_requests_is_told_apart(pack):
    with specloop.load(pack, "none", context=128, memory_budget=smallest(pack) + 50_000) as pair:
        long, short = pair.stream(PROMPT, max_new_tokens=30), pair.stream(PROMPT, max_new_tokens=3)
        next(long)
        list(short)
        list(long)
        per_pass = pair.model.weights.stream.plan.bytes_per_pass
        difference = long.result.stats.memory.streamed_bytes - short.result.stats.memory.streamed_bytes
        assert difference == 27 * per_pass


def test_memory_of_a_resident_model():
    with pair_of(1) as pair:
        memory = pair.generate(PROMPT, max_new_tokens=4).stats.memory
        assert memory.budget is None and memory.streamed_bytes == 0 and memory.resident == pair.model.nbytes > 0
