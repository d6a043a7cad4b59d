"""Recording and running again: same bits, fresh values, references kept, refusals."""

import gc

import pytest
import torch

import specdec_kernels as sk


def test_runs_again_on_new_values():
    weight = sk.pack_int8(torch.randn(48, 64))
    x, out = torch.randn(2, 64), torch.empty(2, 48)
    with sk.record() as recording:
        sk.linear_int8(x, weight, out=out)
    assert recording.complete and len(recording.program) == 1
    first = out.clone()
    x.copy_(torch.randn(2, 64))
    recording.run()
    assert torch.equal(out, sk.linear_int8(x, weight)) and not torch.equal(out, first)


def test_keeps_what_it_uses():
    with sk.record() as recording:
        out = torch.empty(1, 32)
        sk.linear_int8(torch.ones(1, 64), sk.pack_int8(torch.ones(32, 64)), out=out)
    gc.collect()
    torch.full((1 << 16,), 7.0)  # would land in freed memory
    out.zero_()
    recording.run()
    assert torch.equal(out, torch.full((1, 32), 64.0))


def test_other_backends_are_not_recorded():
    with sk.use_backend("reference"), sk.record() as recording:
        sk.linear_int8(torch.ones(1, 64), sk.pack_int8(torch.ones(32, 64)))
    assert not recording.complete
    with pytest.raises(RuntimeError, match="ran on the reference backend"):
        recording.run()


def test_an_exception_spoils_the_recording():
    with pytest.raises(ValueError, match="slots"), sk.record() as recording:
        x, cache = torch.zeros(1, 1, 2), torch.zeros(1, 1, 1, 2)
        flat = torch.zeros(1, 1)
        sk.rope_write_kv_int8(x, x, flat, flat, cache, None, cache.clone(), None, torch.tensor([5]))
    with pytest.raises(RuntimeError, match="raised"):
        recording.run()


def test_values_are_checked_in_every_run():
    x, cache, flat, slots = torch.zeros(1, 1, 2), torch.zeros(1, 1, 1, 2), torch.zeros(1, 1), torch.tensor([0])
    other = cache.clone()
    with sk.record() as recording:
        sk.rope_write_kv_int8(x, x, flat, flat, cache, None, other, None, slots)
    slots.fill_(1)
    with pytest.raises(ValueError, match="slots"):
        recording.run()


def test_nothing_recorded():
    with sk.record() as recording:
        pass
    with pytest.raises(RuntimeError, match="holds no calls"):
        recording.run()


def uneven(*sizes):
    """A tensor [2, 3, ...] whose rows are not evenly spaced, so that a kernel can only read a copy of it."""
    return torch.ones(2, 4, *sizes)[:, :3]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("x", lambda w: sk.linear_int8(uneven(64), w)),
        ("x", lambda w: sk.linear_f32(uneven(64), torch.ones(4, 64))),
        ("scale", lambda w: sk.linear_int8((torch.ones(2, 3, 64, dtype=torch.int8), uneven(1)), w)),
        ("x", lambda w: sk.quantize_int8(uneven(64))),
        ("ids", lambda w: w.rows(torch.zeros(4, dtype=torch.int64)[::2])),
        ("verify", lambda w: sk.verify(torch.ones(1, 5), *NO_DRAFTS, temperature=0)),
        ("sample", lambda w: sk.sample(torch.ones(1, 5), temperature=0)),
    ],
)
def test_what_would_read_a_copy_or_not_run_again_is_not_recorded(name, call):
    weight = sk.pack_int8(torch.ones(16, 64))
    with sk.record() as recording:
        sk.linear_int8(torch.ones(1, 64), weight)
        assert recording.complete
        call(weight)
    assert not recording.complete
    with pytest.raises(RuntimeError, match=f"recording: {name} "):
        recording.run()


NO_DRAFTS = torch.zeros(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
