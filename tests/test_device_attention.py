"""attend_int8 in Triton on a device: int8 and 16-bit caches against the reference, bits, bad values, graphs, waiting.

Without a GPU test_triton.py runs a few of the calls interpreted, which shows that the tests work.
"""

import os
import random

import pytest
import torch

import places
import specdec_kernels as sk

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CALLS = 1 if INTERPRETED else int(os.environ.get("SPECDEC_DEVICE_CALLS", "60"))
TYPES = [(q, c) for q in (torch.float32, torch.float16, torch.bfloat16) for c in (torch.int8, q)]
if INTERPRETED:
    TYPES = TYPES[:1] + TYPES[-1:]


class Interpreted(places.Emulated):
    """Triton's interpreter in the place of a device."""

    def __init__(self):
        pass

    def running(self):
        return sk.use_backend("triton")


@pytest.fixture(scope="module")
def place():
    if INTERPRETED:
        return Interpreted()
    if "triton" not in places.names():
        pytest.skip(f"triton: {places.why_not()['triton']}; interpreted by test_triton.py")
    return places.place("triton")


def call(number, dtype, cache, lengths=None, width=12, page=16):
    """A random call: [q, k, k_scale, v, v_scale, page_table, lengths], mask."""
    rng, generator = random.Random(number), torch.Generator().manual_seed(number)
    rows, batch = rng.choice([1, 4, 9]), rng.choice([1, 3]) if lengths is None else len(lengths)
    kv_heads, shared, dim, values = rng.choice([(1, 1, 64, 64), (3, 3, 64, 64), (2, 4, 80, 24), (2, 1, 46, 46)])
    q = torch.randn(batch, rows, kv_heads * shared, dim, generator=generator).to(dtype)
    tensors = []
    for d in (dim, values):
        x = torch.randn(batch * width + 2, page, kv_heads, d, generator=generator)
        tensors += sk.quantize_int8(x) if cache is torch.int8 else (x.to(cache), None)
    tensors = [t.squeeze(-1) if t is not None and t.shape[-1] == 1 else t for t in tensors]
    table = torch.randperm(batch * width + 2, generator=generator)[: batch * width].view(batch, width).int()
    if lengths is None:
        lengths = torch.randint(rows, width * page + 1, (batch,), generator=generator).tolist()
    mask = torch.rand(batch, rows, rows, generator=generator) < 0.7 if rng.random() < 0.5 else None
    return [q, *tensors, table, torch.tensor(lengths, dtype=torch.int32)], mask


def on(place, arguments, mask=None):
    with place.running():
        there = places.put(tuple(arguments), place.device)
        return sk.attend_int8(*there, mask=places.put(mask, place.device)).cpu()


@pytest.mark.parametrize(("dtype", "cache"), TYPES)
def test_triton_attention_equals_the_reference(place, dtype, cache):
    """Float32 to 2e-5, 16 bits to a unit in the last place."""
    for number in range(CALLS):
        arguments, mask = call(number, dtype, cache, width=3 if INTERPRETED else 60)
        got = on(place, arguments, mask).double()
        with sk.use_backend("reference"):
            want = sk.attend_int8(*arguments, mask=mask).double()
        step = {torch.float32: 2e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]
        torch.testing.assert_close(got, want, rtol=step, atol=5e-6, equal_nan=True)


@pytest.mark.parametrize(("dtype", "cache"), TYPES)
def test_triton_attention_rows_depend_on_nothing_else(place, dtype, cache):
    """Not on R, B, the width of the table, a mask that says the same, or where q lies."""
    arguments, _ = call(11 if INTERPRETED else 20, dtype, cache, lengths=[300, 40], width=20)
    q, *caches, table, lengths = arguments
    rows = q.shape[1]
    together = on(place, arguments)
    assert torch.equal(on(place, arguments), together)
    causal = torch.ones(2, rows, rows, dtype=torch.bool).tril()
    assert torch.equal(on(place, arguments, causal), together)
    for b, r in ((0, 0), (0, rows - 1), (1, rows - 1)):
        length = int(lengths[b]) - rows + 1 + r
        for width in (-(-length // 16), 20):
            alone = [q[b : b + 1, r : r + 1], *caches, table[b : b + 1, :width].contiguous()]
            got = on(place, [*alone, torch.tensor([length], dtype=torch.int32)])
            assert torch.equal(got[0, 0], together[b, r])
    there = places.put(tuple(arguments), place.device)
    room = torch.empty(q.numel() + 1, dtype=dtype, device=place.device)
    shifted = room[1:].view(q.shape).copy_(there[0])
    with place.running():
        assert torch.equal(sk.attend_int8(shifted, *there[1:]).cpu(), together)


@pytest.mark.parametrize("width", [3, 20])
def test_triton_attention_forms_no_address_from_a_bad_value(place, width):
    arguments, _ = call(46, torch.float16, torch.int8, lengths=[40] * 7, width=width)
    want = on(place, arguments)
    table, lengths = arguments[5:]
    for b, length in ((1, 0), (2, -(2**31)), (3, 2**31 - 1)):
        lengths[b] = length
    for b, page in ((4, -1), (5, 2**31 - 1), (6, arguments[1].shape[0])):
        table[b, 1] = page
    got = on(place, arguments)
    assert want.isfinite().all() and torch.equal(got[0], want[0]) and got[1:].isnan().all()


def test_triton_attention_in_a_graph_sees_changed_inputs_and_waits_for_nothing(place):
    arguments, _ = call(11, torch.bfloat16, torch.int8, lengths=[290], width=20)
    there = places.put(tuple(arguments), place.device)
    with place.running():
        (output,), replay = place.capture(lambda: (sk.attend_int8(*there),))
        for length in (290, 100):
            arguments[0].normal_()
            arguments[6].fill_(length)
            there[0].copy_(arguments[0])
            there[6].copy_(arguments[6])
            replay()
            with place.no_waiting():
                again = sk.attend_int8(*there)
            assert torch.equal(output.cpu(), again.cpu())
            assert torch.equal(output.cpu(), on(place, arguments))
