"""Loading in the background: in parallel, with one fraction of progress, and an end to it at any time."""

import subprocess
import sys
import threading
import time
import weakref

import pytest

import specloop
from specloop.errors import BudgetError, LoadCancelled, ModelError, OptionError
from specloop.loading import Progress
from specloop.pair import Pair
from versions import PROMPT, alone, pair_of, parts

TIMEOUT = 30


def named(**loads):
    """``opened`` of a Pair: the names of ``loads`` mean what their functions do with a progress callback."""
    return lambda name, progress, **_: loads[name](progress)


def stepping(seed=0, steps=200, seconds=0.01, made=None):
    """A load that reports its progress as it goes."""

    def load(progress):
        found = parts(seed)()
        if made is not None:
            made.append(weakref.ref(found[0]))
        for i in range(steps):
            time.sleep(seconds)
            progress((i + 1) / steps)
        return found

    return load


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("specloop-load")]


def test_target_and_draft_load_at_the_same_time():
    both = threading.Barrier(2, timeout=TIMEOUT)

    def meeting(seed):
        def load():
            both.wait()
            return parts(seed)()

        return load

    with Pair(meeting(1), draft=meeting(2)) as pair:
        assert pair.ready() and pair.generate(PROMPT, max_new_tokens=12, k=2).tokens == alone(1, PROMPT, 12)


def test_ready_waits_no_longer_than_it_is_told():
    go = threading.Event()
    pair = Pair(lambda: go.wait(TIMEOUT) and parts()())
    start = time.perf_counter()
    assert not pair.ready(timeout=0.05) and not pair.ready(0) and time.perf_counter() - start < 2
    go.set()
    assert pair.ready(TIMEOUT) and pair.ready(0) and pair.load_seconds > 0
    pair.close()


def test_progress_is_one_fraction_that_never_falls(tmp_path):
    (tmp_path / "large").write_bytes(bytes(3000))
    (tmp_path / "small").write_bytes(bytes(1000))
    large, small, seen = str(tmp_path / "large"), str(tmp_path / "small"), []
    small_is_done = threading.Event()

    def first(progress):
        assert small_is_done.wait(TIMEOUT)
        for fraction in (0.5, 0.2, 1.0, 1.0):  # a second stage begins anew
            progress(fraction)
        return parts(1)()

    def second(progress):
        progress(1.0)
        small_is_done.set()
        return parts(2)()

    opened = named(**{large: first, small: second})
    with Pair(large, draft=small, progress=seen.append, opened=opened) as pair:
        pair.ready()
    assert seen == pytest.approx([0.25, 0.625, 1.0])


def test_progress_from_many_threads():
    seen = []
    progress = Progress(seen.append, [1, 2, 3])

    def report(tell):
        for n in range(51):
            tell(n / 50)

    each = [threading.Thread(target=report, args=(progress.of(i),)) for i in range(3)]
    for thread in each:
        thread.start()
    for thread in each:
        thread.join()
    assert seen == sorted(set(seen)) and seen[-1] == pytest.approx(1.0)


@pytest.mark.parametrize("draft", ["none", "b"])
def test_cancel_ends_loading_within_moments(draft):
    made = []
    opened = named(a=stepping(1, made=made), b=stepping(2, made=made))
    pair = Pair("a", draft=draft, opened=opened)
    assert not pair.ready(0.05)
    waiting = threading.Timer(0.05, pair.cancel_load)
    waiting.start()
    start = time.perf_counter()
    with pytest.raises(LoadCancelled, match="cancelled"):
        pair.ready()
    assert time.perf_counter() - start < 0.25
    waiting.join()
    for thread in threads():
        thread.join(1)
    assert not threads() and made and all(ref() is None for ref in made)
    assert pair.cancel_load() is False
    for use in (pair.ready, lambda: pair.generate(PROMPT), lambda: pair.swap(target=parts())):
        with pytest.raises(LoadCancelled):
            use()


def test_cancel_while_the_costs_are_measured():
    passes = []

    def slow():
        model, *rest = parts(1)()
        forward = model.forward

        def slowly(*args, **options):
            passes.append(args)
            time.sleep(0.05)
            return forward(*args, **options)

        model.forward = slowly
        return (model, *rest)

    pair = Pair(slow, k="auto", warm_up=True)
    while not passes:
        time.sleep(0.005)
    pair.cancel_load()
    pair.close()  # waits for the thread
    assert not threads() and len(passes) < 4


def test_cancel_after_loading_changes_nothing():
    with pair_of(1) as pair:
        pair.ready()
        assert pair.cancel_load() is False
        assert pair.generate(PROMPT, max_new_tokens=12).tokens == alone(1, PROMPT, 12)


def test_close_ends_loading():
    pair = Pair("a", draft="none", opened=named(a=stepping()))
    start = time.perf_counter()
    pair.close()
    assert time.perf_counter() - start < 0.5 and not threads()
    with pytest.raises(LoadCancelled):
        pair.ready()


def test_a_swap_can_be_cancelled():
    made = []
    with Pair(parts(1), opened=named(b=stepping(2, made=made))) as pair:
        pair.ready()
        stream = pair.stream(PROMPT, max_new_tokens=20)
        next(stream)
        threading.Timer(0.1, pair.cancel_load).start()
        start = time.perf_counter()
        with pytest.raises(LoadCancelled):
            pair.swap(target="b")
        assert time.perf_counter() - start < 0.4 and not threads() and made[0]() is None
        assert pair.generation == 0 and len(list(stream)) == 19 and stream.result.tokens == alone(1, PROMPT, 20)
        pair.swap(target=parts(2))
        assert pair.generate(PROMPT, max_new_tokens=12).tokens == alone(2, PROMPT, 12)


@pytest.mark.parametrize("failing", ["target", "draft"])
def test_when_one_fails_the_other_ends_too(failing):
    made, begun = [], threading.Event()

    def other(progress):
        begun.set()
        return stepping(made=made)(progress)

    def broken(progress):
        assert begun.wait(TIMEOUT)
        time.sleep(0.05)
        weights = parts()()
        made.append(weakref.ref(weights[0]))
        raise ModelError("what is wrong with it")

    loads = {"target": other, "draft": other} | {failing: broken}
    pair = Pair("target", draft="draft", opened=named(**loads), require_draft=True)
    start = time.perf_counter()
    for _ in range(2):
        with pytest.raises(ModelError, match="what is wrong with it"):
            pair.ready()
    assert time.perf_counter() - start < 1.5
    pair.close()
    assert len(made) == 2 and [ref() for ref in made] == [None, None]


def test_an_error_in_the_progress_callback_ends_loading():
    def progress(fraction):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Pair("a", draft="none", progress=progress, opened=named(a=stepping())).ready()


# ---- load ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    pytest.importorskip("gguf", reason="the gguf package writes the test files: pip install '.[test]'")
    from test_loader import write

    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    return str(write(tmp_path / "tiny.gguf"))


def test_a_draft_by_its_path(tiny):
    with specloop.load(tiny, tiny, context=64, k=3) as pair, specloop.load(tiny, "none", context=64) as plain:
        result = pair.generate([5, 100, 7], max_new_tokens=20)
        assert result.tokens == plain.generate([5, 100, 7], max_new_tokens=20).tokens
        assert result.stats.speculation.acceptance_rate == 1.0 and result.stats.settings["draft"] == tiny
        assert pair.generate([5, 100, 7], draft=tiny, max_new_tokens=4).stats.speculation.proposed
        with pytest.raises(OptionError, match=r"^draft: expected one of auto, lookup, none or .*tiny\.gguf, which is"):
            pair.generate([5], draft="other.gguf")


def test_cancel_of_a_real_load(tiny, monkeypatch):
    from specloop.models.blueprint import Filler

    fill, begun = Filler.fill, threading.Event()

    def slowly(self, part, weight):
        begun.set()
        time.sleep(0.05)
        fill(self, part, weight)

    monkeypatch.setattr(Filler, "fill", slowly)
    pair = specloop.load(tiny, tiny, context=64)
    assert begun.wait(TIMEOUT)
    start = time.perf_counter()
    pair.cancel_load()
    with pytest.raises(LoadCancelled):
        pair.ready()
    assert time.perf_counter() - start < 0.2
    pair.close()
    assert not threads()


def test_the_draft_counts_in_the_budget(tiny):
    """It is in memory as a whole, before more of the target is (report 68)."""
    from specloop.loader import size_in_memory

    size = size_in_memory(tiny, dtype="int8", kv="int8", context=64)
    with pytest.raises(BudgetError, match="draft"), specloop.load(tiny, tiny, context=64, memory_budget=size) as pair:
        pair.ready()
    alone_needs = specloop.load(tiny, "none", context=64, memory_budget=100_000_000)
    with specloop.load(tiny, tiny, context=64, memory_budget=size + 600_000) as pair, alone_needs:
        plan = pair.model.weights.stream.plan
        assert plan.reserved["draft"] == size and plan.total_bytes <= plan.budget
        draft = pair._draft.version.model
        assert not draft.streams and draft.memory_nbytes <= size
        tokens = pair.generate([5, 100, 7], max_new_tokens=20, k=3).tokens
        assert tokens == alone_needs.generate([5, 100, 7], max_new_tokens=20).tokens


@pytest.mark.parametrize("memory_budget", [None, "30MB"])
def test_a_draft_that_cannot_be_read_leaves_the_target_alone(tiny, tmp_path, caplog, memory_budget):
    """The statistics and the log say so; the text is that of the target, and another draft can be put in its place."""
    corrupt = tmp_path / "corrupt.gguf"
    corrupt.write_bytes(b"GGUF" + bytes(range(200)))
    options = {"context": 64, "k": 3, "memory_budget": memory_budget}
    with specloop.load(tiny, "none", context=64) as plain, specloop.load(tiny, corrupt, **options) as pair:
        assert pair.ready()
        for result in (pair.generate("ab"), *pair.generate_batch(["ab"]), pair.generate("ab", draft=str(corrupt))):
            counts = result.stats.speculation
            assert result.tokens == plain.generate("ab").tokens and counts.proposed == 0
            assert counts.off_reason.startswith(f"the draft {corrupt} could not be read: ")
        assert [record.message for record in caplog.records] == [f"speculation off: {counts.off_reason}"]
        assert pair.generate("abababab", draft="lookup").stats.speculation.proposed
        pair.swap(draft=tiny)
        assert pair.generate("ab").stats.speculation.off_reason is None


def test_a_draft_that_is_required_is_an_error_when_it_cannot_be_read(tiny, tmp_path):
    corrupt = tmp_path / "corrupt.gguf"
    corrupt.write_bytes(b"GGUF" + bytes(range(200)))
    with specloop.load(tiny, corrupt, context=64, require_draft=True) as pair, pytest.raises(ModelError):
        pair.ready()
    with pytest.raises(OptionError, match=r"^require_draft: expected True or False, got 'yes'"):
        specloop.load(tiny, corrupt, require_draft="yes")


def test_the_end_of_the_process_ends_a_loading_first():
    """A thread that is in C++ when the interpreter goes away takes the process with it: abort."""
    code = """
import time
from specloop.loading import Loading, Progress

def job():
    try:
        while True:
            progress.check()
            time.sleep(0.01)
    finally:
        print("ended", flush=True)

progress = Progress()
loading = Loading([job], list, list, list, progress)
time.sleep(0.05)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")
