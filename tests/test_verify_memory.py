"""What a call of verify allocates and touches: next to nothing, and no row behind the first refusal."""

import pytest
import torch

import specdec_kernels as sk
from guard import PAGE, _libc, guarded
from instruction_sets import ISAS
from verify_cases import BACKENDS, bounds, emitted, keys, running


def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def peak_above(run):
    """How far the resident memory rises above what it was before."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak starts again from here
    except OSError as error:
        pytest.skip(f"can't reset the peak: {error}")
    before = status("VmRSS")
    run()
    return status("VmHWM") - before


REQUESTS, DRAFTS, VOCABULARY = 256, 4, 16_003


@pytest.mark.skipif(not ISAS, reason="no compiled module")
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.9}], ids=str
)
def test_a_large_call_needs_little_memory(rule, options):
    """41 MB of logits: a copy in float32 would be 82 MB, one row of it 64 kB."""
    n = REQUESTS * (DRAFTS + 1)
    rows = torch.randn(64, VOCABULARY, generator=torch.Generator().manual_seed(0)).bfloat16().repeat(n // 64, 1)
    drafts = torch.randint(0, VOCABULARY, (REQUESTS * DRAFTS,))
    q = rows[: REQUESTS * DRAFTS]
    call = lambda **more: sk.verify(
        rows, drafts, bounds([DRAFTS] * REQUESTS), rule=rule, **keys(REQUESTS), **options, **more
    )
    for backend in (BACKENDS[1], BACKENDS[-1]):
        with running(backend):
            for more in ({}, {"draft_logits": q}):
                call(**more)  # what is kept from call to call
                assert peak_above(lambda more=more: call(**more)) < 2 * 2**20, backend


def forbidden(rows, readable):
    """The rows, of a page each, in memory in which all behind the first ``readable`` ones must not be touched."""
    fenced = guarded(tuple(rows.shape), rows.dtype).copy_(rows)
    assert rows[0].nbytes == PAGE and fenced.data_ptr() % PAGE == 0
    assert _libc.mprotect(fenced.data_ptr() + readable * PAGE, (len(rows) - readable) * PAGE, 0) == 0
    return fenced


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_behind_the_refusal_are_not_read(backend, dtype):
    """A read of one ends the test run with SIGSEGV."""
    vocabulary = PAGE // dtype.itemsize
    rows = torch.zeros(5, vocabulary, dtype=dtype)
    rows[0, 7] = rows[1, 9] = 300.0
    drafts, q = torch.tensor([7, 8, 9, 9]), torch.zeros(4, vocabulary, dtype=dtype)
    target, draft_rows = forbidden(rows, 2), forbidden(q, 2)
    calls = [
        {"temperature": 0},
        {"temperature": 0, "rule": "block"},
        {"temperature": 0.7},
        {"temperature": 0.7, "draft_logits": draft_rows},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "draft_logits": draft_rows},
        {"rule": "typical", "draft_logits": draft_rows},
        {"rule": "threshold", "theta": 0.5},
    ]
    with running(backend):
        for options in calls:
            assert emitted(sk.verify(target, drafts, bounds([4]), **keys(1), **options)) == [7, 9]
        # Nothing proposed behind the first draft: the rest is not read under any rule, nor is q of a greedy request.
        for rule in ("token", "block", "typical"):
            verdict = sk.verify(target, torch.tensor([7, -1, 9, 9]), bounds([4]), rule=rule, **keys(1))
            assert emitted(verdict) == [7, 9]
        none = forbidden(q, 0)
        assert emitted(sk.verify(target, drafts, bounds([4]), temperature=0, draft_logits=none)) == [7, 9]
        kinds = torch.ones(4, dtype=torch.bool)
        verdict = sk.verify(target, drafts, bounds([4]), draft_logits=none, draft_kind=kinds, **keys(1))
        assert emitted(verdict) == [7, 9]
