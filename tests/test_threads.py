"""Threads: torch's workers and torch's setting, callers in several Python threads are independent, forks work."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import specdec_kernels as sk
from specdec_kernels import native

if native.cpu is None:
    pytest.skip(f"no compiled CPU module: {native.cpu_reason}", allow_module_level=True)


@pytest.fixture(params=["torch's pool", "own pool"])
def pool(request):
    native.cpu.use_own_pool(request.param == "own pool")
    if request.param == "torch's pool" and not native.cpu.torch_pool():
        pytest.skip("this torch has brought no OpenMP runtime into the process")
    yield request.param
    native.cpu.use_own_pool(False)


def work(seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(300, 512, generator=g)
    weight = sk.pack_int8(torch.randn(1024, 512, generator=g), group_size=64)
    logits = torch.randn(5, 50_000, generator=g)
    drafts = logits.argmax(1)[:4]
    return lambda: (
        sk.quantize_int8(x)[0],
        sk.linear_int8(x[:9], weight),
        sk.verify(logits, drafts, torch.tensor([0, 4], dtype=torch.int32), temperature=0).tokens,
    )


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_several_python_threads_at_once(pool):
    tasks = [work(seed) for seed in range(4)]
    expected = [task() for task in tasks]
    failures, barrier = [], threading.Barrier(len(tasks))

    def loop(i):
        barrier.wait()
        for _ in range(40):
            if not same(tasks[i](), expected[i]):
                failures.append(i)

    threads = [threading.Thread(target=loop, args=(i,)) for i in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "a caller hangs"
    assert not failures


def test_thread_count_follows_torch_and_changes_nothing(pool):
    task, before = work(0), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = task()
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            assert same(task(), one)
        if pool == "own pool":
            assert 1 <= native.cpu.pool_workers() <= 6
    finally:
        torch.set_num_threads(before)


def test_an_exception_in_a_team_reaches_the_caller(pool):
    for bad in (0, 7, 99):
        with pytest.raises(MemoryError):
            native.cpu.count_pieces(4, 100, bad)
        assert native.cpu.count_pieces(4, 100, -1) == 100


def test_every_piece_is_done_once(pool):
    """However many there are for however many threads; there are stretches for 16."""
    for threads in (1, 2, 3, 7, 16, 17, 40):
        for pieces in (1, 2, 3, 15, 16, 17, 41, 300):
            assert native.cpu.count_pieces(threads, pieces, -1) == pieces


def test_a_team_that_stays_together(pool):
    counts = []

    def jobs(threads):
        for _ in range(30):
            counts.append(native.cpu.count_jobs(threads, 40, 7, True))

    callers = [threading.Thread(target=jobs, args=(threads,)) for threads in (1, 2, 3, 5)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(120)
    assert counts == [280] * 120, "a caller hangs, or pieces were lost"


def test_an_exception_ends_the_staying_team(pool):
    x, cache, table, slots = torch.zeros(1, 1, 2), torch.zeros(1, 1, 1, 2), torch.zeros(1, 1), torch.tensor([0])
    other, task = cache.clone(), work(2)
    expected = task()
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with sk.record() as recording:
            sk.rope_write_kv_int8(x, x, table, table, cache, None, other, None, slots)
        slots.fill_(1)
        for _ in range(3):
            with pytest.raises(ValueError, match="slots"):
                recording.run()
        slots.fill_(0)
        recording.run()
        assert same(task(), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_pool_of_its_own(pool):
    # Only results that are small enough for torch to compare them without its own pool, which does not survive a fork.
    whole = work(1)
    task = lambda: whole()[1:]
    expected = task()  # the parent's workers exist now, the child will not have them
    child = os.fork()
    if child == 0:
        os._exit(0 if same(task(), expected) else 1)
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        threading.Event().wait(0.1)
    else:
        os.kill(child, 9)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0
    assert same(task(), expected)


CROWDED = """
import os, time, torch, specdec_kernels as sk
x, out = torch.randn(64, 4096), (torch.empty(64, 4096, dtype=torch.int8), torch.empty(64, 1))
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
torch.set_num_threads(2)
start = time.process_time()
for _ in range(200):
    sk.quantize_int8(x, out=out)
print(time.process_time() - start)
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this platform can't tie a process to a core")
def test_fewer_cores_than_threads_cost_no_time_slice_per_call(tmp_path):
    # The threads take turns on one core, as they do where other processes are busy. Waiting for a worker by spinning
    # costs the rest of a time slice, milliseconds in every call; the work itself is some 50 us.
    env = os.environ | {"PYTHONPATH": str(Path(sk.__file__).parents[1])}  # what is tested here, not what lies in "."
    line = [sys.executable, "-W", "ignore", "-c", CROWDED]
    done = subprocess.run(line, env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.5
