"""The random numbers and times of the kernels against the reference's."""

import torch
import triton
import triton.language as tl

from specdec_kernels.reference.philox import philox4x32
from specdec_kernels.reference.philox import uniform as reference_uniform
from specdec_kernels.triton_kernels.philox import exponential, uniform, word


@triton.jit
def words(seeds, positions, purpose, groups, out, N: tl.constexpr):
    b = tl.program_id(0)
    i = tl.arange(0, N)
    purpose = b * 0 + purpose
    w = word(tl.load(seeds + b), tl.load(positions + b), purpose, tl.load(groups + i))
    tl.store(out + b * N + i, w.to(tl.int64))


def test_philox_words():
    seeds = torch.tensor([0, 1, -1, 2**62 + 5, -(2**63)])
    positions = torch.tensor([0, 2**40 + 3, 2**33, 7, 2**62])
    groups = torch.tensor([0, 1, 63, 64, 2**31, 2**31 + 5, 2**32 - 1, 12345])
    out = torch.empty(5, 8, dtype=torch.int64)
    words[(5,)](seeds, positions, 2 << 24 | 5, groups, out, N=8)
    for seed, position, got in zip(seeds.tolist(), positions.tolist(), out.tolist(), strict=True):
        key = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
        counters = [(position & 0xFFFFFFFF, position >> 32, 2 << 24 | 5, g) for g in groups.tolist()]
        assert got == [philox4x32(key, counter)[0] for counter in counters]


@triton.jit
def one_uniform(seeds, out):
    seed = tl.load(seeds)
    tl.store(out, uniform(seed, seed, (seed * 0 + 3).to(tl.int32), tl.full([], 9, tl.int32)))


def test_uniform_is_exact():
    out = torch.empty(1, dtype=torch.float64)
    one_uniform[(1,)](torch.tensor([77]), out)
    assert out.item() == reference_uniform(77, 77, 0, 3, 9)


@triton.jit
def times(bits, out, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + i, exponential(tl.load(bits + i).to(tl.uint32)))


EDGES = [0, 1, 2, 3, 1000, 2**24 - 1, 2**24 + 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1]


def test_exponential_is_accurate_everywhere():
    third = 2**32 // 3  # where the series changes
    near = [third + d for d in range(-500, 500)]
    small = (2 ** torch.linspace(0, 32, 3000, dtype=torch.float64)).long().clamp(max=2**32 - 1).tolist()
    generator = torch.Generator().manual_seed(0)
    anywhere = torch.randint(0, 2**32, (4180,), generator=generator).tolist()
    bits = torch.tensor([*EDGES, *near, *small, *anywhere])
    bits = bits[: len(bits) // 1024 * 1024]
    out = torch.empty(len(bits))
    times[(len(bits) // 1024,)](bits, out, N=1024)
    exact = -torch.log1p(-bits.double() * 2.0**-32)
    assert out[0] == 0.0 and bool((out >= 0).all()) and bool(out.isfinite().all())
    error = (out.double() - exact).abs() / exact.clamp(min=1e-300)
    assert error[1:].max() < 5e-7, float(error[1:].max())
