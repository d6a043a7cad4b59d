"""pack_int8 and Int8Weight: the packed layout, writing it in pieces, reading rows back, storing it."""

import copy
import io
import pickle

import pytest
import torch

import specdec_kernels as sk
from instruction_sets import ISAS
from specdec_kernels import native

SHAPES = [(1, 1, None), (17, 6, 3), (33, 130, None), (64, 576, 192), (5, 35, 7), (48, 5000, None)]


@pytest.fixture(params=[*ISAS, "reference"])
def backend(request):
    if request.param == "reference":
        with sk.use_backend("reference"):
            yield request.param
    else:
        native.cpu.set_isa(request.param)
        yield request.param
        native.cpu.set_isa(native.cpu.machine_isa())


def floats(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packs_what_quantize_int8_gives(backend, n, k, group, dtype):
    w = floats(n, k).to(dtype)
    q, scale = sk.quantize_int8(w, group_size=group)
    weight = sk.pack_int8(w, group_size=group)
    got = weight.unpack()
    assert torch.equal(got[0], q) and torch.equal(got[1], scale)
    assert torch.equal(weight.dequantize(), sk.dequantize_int8(q, scale))
    assert weight.shape == (n, k) and weight.nbytes == weight.codes.nbytes + weight.scale.nbytes
    with sk.use_backend("reference"):
        expected = sk.pack_int8(w, group_size=group)
    assert torch.equal(weight.codes, expected.codes) and torch.equal(weight.scale, expected.scale)


def test_the_layout(backend):
    """Version 2, byte for byte: row r, value k of group g lies at [r // 16, g * steps + k // 4, r % 16, k % 4]."""
    n, k, group = 18, 10, 5
    q = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    scale = floats(n, 2)
    weight = sk.pack_int8((q, scale))
    assert weight.codes.shape == (2, 4, 16, 4) and weight.scale.shape == (2, 2, 16)
    expected = torch.full((2, 4, 16, 4), 128, dtype=torch.uint8)
    scales = torch.zeros(2, 2, 16)
    for r in range(n):
        for i in range(k):
            g, j = divmod(i, group)
            expected[r // 16, g * 2 + j // 4, r % 16, j % 4] = int(q[r, i]) + 128
            scales[r // 16, g, r % 16] = scale[r, g]
    assert torch.equal(weight.codes, expected) and torch.equal(weight.scale, scales)
    got = weight.unpack()
    assert torch.equal(got[0], q) and torch.equal(got[1], scale)


def test_strided_rows(backend):
    wide = floats(40, 100)
    assert torch.equal(sk.pack_int8(wide[:, 7:71]).codes, sk.pack_int8(wide[:, 7:71].contiguous()).codes)
    with pytest.raises(ValueError, match="contiguous last dimension"):
        sk.pack_int8(wide.t())


def test_special_rows(backend):
    w = floats(20, 64)
    w[3] = 0
    w[4, 5] = float("nan")
    w[5, 6] = float("inf")
    w[6] = 1e-40
    q, scale = sk.pack_int8(w).unpack()
    assert (q[3:7] == 0).all()
    assert scale[3] == 0 and scale[4].isnan() and scale[5].isinf() and scale[6] == 0


def test_writing_in_pieces_gives_the_same(backend):
    w = floats(100, 96)
    whole = sk.pack_int8(w, group_size=32)
    pieces = sk.Int8Weight.empty(100, 96, 32)
    pieces.codes.fill_(7)
    pieces.scale.fill_(7)
    for start in (64, 0, 96, 32):
        pieces.write_rows(start, w[start : start + 32])
    assert torch.equal(pieces.codes, whole.codes) and torch.equal(pieces.scale, whole.scale)
    q, scale = sk.quantize_int8(w[16:48], group_size=32)
    pieces.write_rows(16, (q, scale))
    assert torch.equal(pieces.codes, whole.codes) and torch.equal(pieces.scale, whole.scale)
    assert pieces.write_rows(0, w[:0]) is pieces


def test_packing_in_pieces_needs_little_memory():
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak starts again from here
    except OSError as error:
        pytest.skip(f"can't reset the peak: {error}")

    def status(name):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))

    before = status("VmRSS")
    weight = sk.Int8Weight.empty(1 << 16, 512)
    chunk = torch.ones(1 << 10, 512)
    for start in range(0, 1 << 16, 1 << 10):
        weight.write_rows(start, chunk)
    assert status("VmHWM") - before < 1.2 * weight.nbytes + 4 * chunk.nbytes


@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_rows_are_the_dequantised_rows(backend, n, k, group):
    weight = sk.pack_int8(floats(n, k), group_size=group)
    all_rows = weight.dequantize()
    for count in (0, 1, 9, 40):
        ids = torch.randint(0, n, (count,), generator=torch.Generator().manual_seed(count))
        assert torch.equal(weight.rows(ids), all_rows[ids])
        room = torch.full((count, k + 3), 7.0)
        out = room[:, 1 : k + 1]
        assert weight.rows(ids, out=out) is out
        assert torch.equal(out, all_rows[ids]) and (room[:, 0] == 7).all() and (room[:, k + 1 :] == 7).all()
    spread = torch.zeros(6, dtype=torch.int64)[::2]
    assert torch.equal(weight.rows(spread), all_rows[spread])


@pytest.mark.parametrize("bad", [-1, 17, 2**40])
def test_rows_checks_the_ids(backend, bad):
    weight = sk.pack_int8(floats(17, 8))
    with pytest.raises(ValueError, match=r"ids: expected row numbers in 0\.\.16"):
        weight.rows(torch.tensor([0, bad]))


def test_state_dict_survives_a_file(backend):
    weight = sk.pack_int8(floats(33, 96), group_size=32)
    file = io.BytesIO()
    torch.save(weight.state_dict(), file)
    file.seek(0)
    again = sk.Int8Weight.from_state_dict(torch.load(file, weights_only=True))
    assert again.shape == weight.shape and again.group_size == 32
    x = floats(3, 96, seed=1)
    assert torch.equal(sk.linear_int8(x, again), sk.linear_int8(x, weight))


def test_copies_have_memory_of_their_own(backend):
    weight = sk.pack_int8(floats(33, 96), group_size=32)
    x = floats(3, 96, seed=1)
    expected = sk.linear_int8(x, weight)
    copies = [copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))]
    weight.codes.zero_()
    for other in copies:
        assert torch.equal(sk.linear_int8(x, other), expected)


def test_state_from_a_misaligned_mapping():
    weight = sk.pack_int8(floats(33, 96), group_size=32)
    state = weight.state_dict()
    room = torch.zeros(weight.codes.numel() + 1, dtype=torch.uint8)
    state["codes"] = room[1:].view_as(weight.codes).copy_(weight.codes)
    again = sk.Int8Weight.from_state_dict(state)
    assert again.codes.data_ptr() % 64 == 0 and torch.equal(again.codes, weight.codes)


def test_a_known_foreign_layout_is_repacked_and_an_unknown_one_refused():
    weight = sk.pack_int8(floats(33, 96), group_size=32)
    state = weight.state_dict()
    q, scale = weight.unpack()
    tag = lambda text: torch.tensor(list(text.encode()), dtype=torch.uint8)
    former = {**state, "layout": tag("i8-panel16x4/1"), "shape": torch.tensor([33, 96, 32])}
    rows = {**former, "codes": q, "scale": scale, "layout": tag("row-major/1")}
    for known in (former, rows):
        again = sk.Int8Weight.from_state_dict(known)
        assert torch.equal(again.codes, weight.codes) and torch.equal(again.scale, weight.scale)
        assert again.group_size == 32 and not again.rotated
    refused = [
        ("layout: expected i8-panel16x4/2", {**state, "layout": tag("i8-panel16x4/3")}),
        ("layout: expected i8-panel16x4/2", {**state, "layout": tag("marlin/1")}),
        ("codes: expected shape", {**state, "codes": weight.codes[:1]}),
        ("codes: expected shape", {**state, "shape": torch.tensor([65, 96, 32, 0])}),
        ("scale: expected shape", {**state, "scale": weight.scale[:, :1]}),
        ("group_size: expected a divisor", {**state, "shape": torch.tensor([33, 96, 0, 0])}),
        ("rotate: expected a group_size that is a power", {**state, "shape": torch.tensor([33, 96, 96, 1])}),
        (r"shape: expected \[n, k, group_size, rotated", {**state, "shape": torch.tensor([33, 96, 32])}),
        (r"shape: expected \[n, k, group_size, rotated", {**state, "shape": torch.tensor([33, 96, 32, 2])}),
        (r"shape: expected \[n, k, group_size\]", {**former, "shape": torch.tensor([33, 96, 32, 0])}),
        ("state: .* got no scale", {key: value for key, value in state.items() if key != "scale"}),
    ]
    for message, bad in refused:
        with pytest.raises(ValueError, match=message):
            sk.Int8Weight.from_state_dict(bad)


def hadamard_matrix(n):
    """Sylvester's: H[i, j] = (-1)^(number of ones in i & j)."""
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)])


ROTATED = [
    (1, 1, None),
    (5, 2, None),
    (17, 12, 4),
    (33, 64, 8),
    (20, 96, 16),
    (40, 576, 64),
    (18, 256, 128),
    (3, 512, None),
]


@pytest.mark.parametrize(("n", "k", "group"), ROTATED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotated_weights_hold_the_codes_of_the_product(backend, n, k, group, dtype):
    w = floats(n, k).to(dtype)
    weight = sk.pack_int8(w, group_size=group, rotate=True)
    group = group or k
    assert weight.rotated and weight.group_size == group
    with sk.use_backend("reference"):
        expected = sk.pack_int8(w, group_size=group, rotate=True)
    assert torch.equal(weight.codes, expected.codes) and torch.equal(weight.scale, expected.scale)
    q, scale = weight.unpack()
    product = (w.double().view(n, -1, group) @ hadamard_matrix(group).double()).view(n, -1, group)
    got = q.view(n, -1, group) * scale.double().unsqueeze(-1)
    assert ((got - product).abs() <= 0.5001 * scale.unsqueeze(-1)).all()
    # Rotated back, the errors of a group are spread over it: as vectors they are no longer than before.
    error = (weight.dequantize() - w.float()).view(n, -1, group).norm(dim=-1)
    assert (error <= 0.5001 * scale + 1e-6).all()
    ids = torch.randint(0, n, (9,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(weight.rows(ids), weight.dequantize()[ids])


def test_rotated_matrices_in_pieces_in_files_and_in_copies(backend):
    w, x = floats(100, 96), floats(3, 96, seed=1)
    whole = sk.pack_int8(w, group_size=32, rotate=True)
    pieces = sk.Int8Weight.empty(100, 96, 32, rotated=True)
    for start in (64, 0, 96, 32):
        pieces.write_rows(start, w[start : start + 32])
    file = io.BytesIO()
    torch.save(whole.state_dict(), file)
    file.seek(0)
    stored = sk.Int8Weight.from_state_dict(torch.load(file, weights_only=True))
    for other in (pieces, stored, copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))):
        assert other.rotated and "rotated" in repr(other)
        assert torch.equal(sk.linear_int8(x, other), sk.linear_int8(x, whole))


def test_to_a_device():
    weight = sk.pack_int8(floats(33, 64), group_size=32, rotate=True)
    assert weight.to("cpu") is weight and weight.to(torch.device("cpu")) is weight
    meta = weight.to("meta")
    assert meta.device_type == "meta" and meta.rotated and meta.shape == (33, 64) and meta.group_size == 32


def test_refusals():
    empty = sk.Int8Weight.empty
    q, scale = sk.quantize_int8(floats(32, 64), group_size=32)
    cases = [
        (ValueError, "K = 0", lambda: empty(4, 0)),
        (ValueError, "n: expected", lambda: empty(-1, 4)),
        (TypeError, "n, k: expected ints", lambda: empty(4.0, 4)),
        (ValueError, "group_size: expected a divisor of K = 64, got 33", lambda: empty(4, 64, 33)),
        (TypeError, "group_size: expected an int", lambda: empty(4, 64, 32.0)),
        (ValueError, "start: expected a multiple of 16", lambda: empty(32, 64).write_rows(8, floats(16, 64))),
        (ValueError, "start: expected a multiple of 16", lambda: empty(32, 64).write_rows(32, floats(16, 64))),
        (ValueError, "start: expected a multiple of 16", lambda: empty(32, 64).write_rows(-16, floats(16, 64))),
        (ValueError, "values: expected a multiple of 16", lambda: empty(32, 64).write_rows(0, floats(8, 64))),
        (ValueError, "values: expected rows of 64", lambda: empty(32, 64).write_rows(0, floats(16, 63))),
        (ValueError, "scale: expected shape", lambda: empty(32, 64, 16).write_rows(0, (q, scale))),
        (ValueError, "scale: expected shape", lambda: sk.pack_int8((q, torch.ones(32, 3)))),
        (ValueError, "group_size: expected 32", lambda: sk.pack_int8((q, scale), group_size=16)),
        (ValueError, "rotate: .* power of two, got 48", lambda: sk.pack_int8(floats(4, 48), rotate=True)),
        (ValueError, "rotate: .* power of two, got 96", lambda: empty(4, 96, rotated=True)),
        (ValueError, r"rotate: .* \(q, scale\)", lambda: sk.pack_int8((q, scale), rotate=True)),
        (TypeError, "rotate: expected a bool", lambda: sk.pack_int8(floats(4, 64), rotate=1)),
        (ValueError, "values: .* rotated", lambda: empty(32, 64, 32, rotated=True).write_rows(0, (q, scale))),
        (TypeError, "weight: expected dtype", lambda: sk.pack_int8(q)),
        (ValueError, "weight: .*require grad", lambda: sk.pack_int8(torch.randn(4, 4, requires_grad=True))),
        (ValueError, "weight: .*meta", lambda: sk.pack_int8(torch.empty(4, 4, device="meta"))),
        (TypeError, "ids: expected dtype int64", lambda: empty(4, 4).rows(torch.tensor([1.0]))),
        (ValueError, "out: expected shape", lambda: empty(4, 4).rows(torch.tensor([1]), out=torch.empty(2, 4))),
    ]
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()
