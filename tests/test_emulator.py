"""The GPU kernels on the CPU emulator: real kernels, launchers and binding, waves of 32 and 64, three run orders.

A green emulator is not a green GPU: it has no memory model and shows no race inside a wave (tests/emu/simt_emu.h).
"""

import ctypes
import itertools
import math
import mmap
import re
from pathlib import Path

import pytest
import torch

import emulator
from specdec_kernels import dequantize_int8, gpu, quantize_int8, registry, use_backend

ROOT = Path(__file__).resolve().parent.parent
CONFIGURATIONS = list(itertools.product((32, 64), emulator.ORDERS))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


# ---- the emulator itself -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wave", "order"), CONFIGURATIONS)
@pytest.mark.parametrize("name", ["block_reduction", "wave_reduction", "matrix_unit", "early_return", "stale_shared"])
def test_correct_kernels_pass(name, wave, order):
    assert _selftest(name, wave, order) == "right"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing_barrier", "wrong"),
        ("read_before_write", "wrong"),
        ("overrun", "a write beyond a shared array"),
        ("split_barrier", "hang: no thread of block 0 can run"),
        ("returned_lane", "a lane of the wave has returned"),
        ("other_matrix_unit", "a matrix instruction of the other wave size"),
        ("thrown", "thread 7"),
    ],
)
@pytest.mark.parametrize("wave", [32, 64])
def test_faults_are_found(name, said, wave):
    reports = [_selftest(name, wave, order) for order in emulator.ORDERS]
    assert any(said in report for report in reports), reports
    assert "right" not in reports or name == "missing_barrier"


def test_a_hang_names_the_lines():
    report = _selftest("split_barrier", 32, "forward")
    assert re.search(r"32 threads, thread 16 first, wait at the barrier in .*selftest\.cpp:\d+", report), report
    assert re.search(r"32 threads, thread 0 first, wait for the wave in .*selftest\.cpp:\d+", report), report


def test_code_for_32_lanes_fails_on_64():
    assert _selftest("thirty_two_lanes", 32, "forward") == "right"
    assert _selftest("thirty_two_lanes", 64, "forward") == "wrong"


def _selftest(name, wave, order):
    library = emulator.selftest()
    emulator.configure(library, wave, order)
    return library.simt_selftest(name.encode()).decode()


# ---- the kernels -------------------------------------------------------------------------------------------------


@pytest.fixture(params=CONFIGURATIONS, ids=lambda c: f"wave{c[0]}-{c[1]}")
def emulated(request, monkeypatch):
    """Makes the emulated GPU module serve CPU tensors in the public functions."""
    compiled = emulator.compiled()
    emulator.configure(ctypes.CDLL(compiled.__file__), *request.param)
    for name, function in gpu.operations(compiled, lambda tensor: (0, 0)).items():
        monkeypatch.setitem(registry._chosen, registry._key(name, "cpu"), (("emulator", function),))


def _values(rows, cols, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, cols, generator=generator) * 3).to(dtype)


def _same_as_reference(x, **options):
    got = quantize_int8(x, **options)
    with use_backend("reference"):
        want = quantize_int8(x, **options)
    for name, a, b in zip(("q", "scale", "zero_point"), got, want, strict=False):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=lambda text, n=name: f"{n}: {text}")
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_rows_of_any_length(emulated, dtype, symmetric):
    for cols in (1, 3, 8, 31, 65, 257, 576):  # a wave per row
        _same_as_reference(_values(3, cols, dtype, cols), symmetric=symmetric)
    for cols in (2100, 5003):  # a block per row; 5003 f32 values are more than its registers hold
        _same_as_reference(_values(2, cols, dtype, cols), symmetric=symmetric)


def test_a_row_beyond_the_registers_of_a_block(emulated):
    x = _values(1, 9001, torch.bfloat16)
    x[0, 9000] = 100.0  # the range comes from the part that is read again
    _, scale = _same_as_reference(x)
    assert scale.item() == torch.tensor(100.0).div(127).item()


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups(emulated, dtype):
    x = _values(3, 640, dtype)
    for group in (1, 5, 64, 128, 320):
        _same_as_reference(x, group_size=group, symmetric=group != 64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_and_unaligned_rows(emulated, dtype):
    wide = _values(4, 301, dtype)
    for start in (0, 1, 3):
        x = wide[::2, start : start + 257]
        frame = torch.full((2, 263), 55, dtype=torch.int8)
        out = frame[:, 2 : 2 + 257], torch.empty(2, 1)
        q, scale = quantize_int8(x, out=out)
        with use_backend("reference"):
            want_q, want_scale = quantize_int8(x.contiguous())
        assert torch.equal(q, want_q) and torch.equal(scale, want_scale)
        assert (frame[:, :2] == 55).all() and (frame[:, 259:] == 55).all()


def test_hard_values(emulated):
    tiny = 2.0**-126
    x = torch.zeros(12, 70)
    x[1, 5] = math.nan
    x[2, 69] = -math.inf
    x[3, 0], x[3, 1] = math.inf, math.nan
    x[4, 7] = 126.9 * tiny  # below the smallest scale: a zero row
    x[5, 7] = 127.0 * tiny  # exactly the smallest scale
    x[6] = torch.arange(70) - 34.5  # with amax 127 below, every value is a tie
    x[6, 0] = 127.0
    x[7] = 3.0  # a constant row keeps its value when asymmetric
    x[8] = torch.finfo(torch.float32).max
    x[9, ::2] = -torch.finfo(torch.float32).max
    x[10] = 1e-40  # subnormal
    x[11] = -x[6]
    for symmetric in (True, False):
        _same_as_reference(x, symmetric=symmetric)
        _same_as_reference(x, symmetric=symmetric, group_size=7)


def test_given_scale(emulated):
    x = _values(3, 96, torch.float32)
    x[0, 0], x[0, 1], x[0, 2], x[1, 0] = math.nan, math.inf, -math.inf, 1e30
    per_row, per_group = torch.tensor([[0.01], [0.1], [3.0]]), torch.rand(3, 4) + 0.01
    for scale in (0.05, per_row, per_group):
        _same_as_reference(x, scale=scale)
        for zero_point in (7, -(2**31), torch.tensor([[1], [-128], [2**31 - 1]], dtype=torch.int32)):
            _same_as_reference(x, scale=scale, zero_point=zero_point, symmetric=False)


@pytest.mark.parametrize("symmetric", [True, False])
def test_stochastic(emulated, symmetric):
    x = _values(3, 77, torch.float32)
    options = {"stochastic_seed": 2**63 + 5, "symmetric": symmetric}
    for offset in (0, 3, 2**34 - 1, 2**63 + 1):
        whole = _same_as_reference(x, stochastic_offset=offset, **options)[0]
    part = quantize_int8(x[1:], stochastic_offset=2**63 + 1 + 77, **options)[0]
    assert torch.equal(part, whole[1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize(emulated, dtype):
    q = torch.randint(-128, 128, (3, 130), dtype=torch.int8)
    scale = torch.tensor([[0.5], [math.nan], [1e-30]])
    zero_point = torch.tensor([[3], [0], [-(2**31)]], dtype=torch.int32)
    for codes in (q, q[:, 1:129]):
        for arguments in ((scale,), (scale, zero_point), (torch.rand(3, 2) + 0.1, 9)):
            got = dequantize_int8(codes, *arguments, dtype=dtype)
            with use_backend("reference"):
                want = dequantize_int8(codes, *arguments, dtype=dtype)
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_no_rows(emulated):
    q, scale = quantize_int8(torch.zeros(0, 16))
    assert q.shape == (0, 16) and scale.shape == (0, 1)
    assert dequantize_int8(q, scale).shape == (0, 16)


def test_offsets_beyond_32_bits(emulated):
    stride, cols = 2**31 + 8, 64
    memory = mmap.mmap(-1, (stride + cols) * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # no reserve
    x = torch.frombuffer(memory, dtype=torch.bfloat16).as_strided((2, cols), (stride, 1))
    x.copy_(_values(2, cols, torch.bfloat16))
    q, scale = quantize_int8(x)
    with use_backend("reference"):
        want = quantize_int8(x.contiguous())
    assert torch.equal(q, want[0]) and torch.equal(scale, want[1])


# ---- the source --------------------------------------------------------------------------------------------------


def test_only_compat_knows_the_wave():
    """No raw wave operation, full mask or count of lanes outside compat.h."""
    vendor = re.compile(r"__shfl|__ballot|__any|__all|__activemask|__syncwarp|warpSize|<<<|\b(cuda|hip)[A-Z_]")
    lanes = re.compile(r"0x[fF]{8}|(?<!>> )(?<!<< )\b(31|32|63|64)\b")
    folders = ROOT / "csrc" / "gpu", ROOT / "csrc" / "include" / "sk" / "gpu"
    files = [path for folder in folders for path in sorted(folder.iterdir()) if path.name != "compat.h"]
    assert len(files) >= 4
    for path in files:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = line.split("//")[0]
            assert not vendor.search(code) and not lanes.search(code), f"{path.name}:{number}: {line.strip()}"
