"""Philox4x32-10 (reference/philox.py) and the exponential times of a draw."""

import triton
import triton.language as tl

COIN = tl.constexpr(1 << 24)  # streams, at their place in the counter
LAST = tl.constexpr(2 << 24)
PLAIN = tl.constexpr(3 << 24)
ROUND = tl.constexpr(4 << 24)
PICK = tl.constexpr(1 << 31)


@triton.jit
def words(seed, position, purpose, group):
    """The four words at counter (position, purpose = stream << 24 | index, group); key and position are int64."""
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    c0 = position.to(tl.uint32)
    c1 = (position >> 32).to(tl.uint32)
    c2 = purpose.to(tl.uint32)
    c3 = group.to(tl.uint32)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, 0xD2511F53)
        high2 = tl.umulhi(c2, 0xCD9E8D57)
        low0 = c0 * 0xD2511F53
        low2 = c2 * 0xCD9E8D57
        c0 = high2 ^ c1 ^ k0
        c1 = low2
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def word(seed, position, purpose, group):
    """Word 0 of them."""
    w, _, _, _ = words(seed, position, purpose, group)
    return w


@triton.jit
def uniform(seed, position, purpose, group):
    """u in [0, 1) in float64, exact."""
    return word(seed, position, purpose, group).to(tl.float64) * 2.3283064365386963e-10


@triton.jit
def exponential(w):
    """-log1p(-u) of u = w * 2^-32 in float32, to a relative 5e-7 everywhere.

    1 - u = m * 2^k with m in [2/3, 4/3), and log(m) = 2 atanh(f / (2 + f)) of f = m - 1 as a series. For u < 1/3 k is 0
    and f = -u, which keeps what 1 - u loses.
    """
    u = w.to(tl.float32) * 2.3283064365386963e-10
    rest = ((w ^ 0xFFFFFFFF) + 1).to(tl.float32) * 2.3283064365386963e-10
    bits = rest.to(tl.int32, bitcast=True)
    k = (bits - 0x3F2AAAAB) >> 23
    m = (bits - (k << 23)).to(tl.float32, bitcast=True)
    f = tl.where(k == 0, -u, m - 1.0)
    s = f / (2.0 + f)
    z = s * s
    series = 0.33333333 + z * (0.2 + z * (0.14285714 + z * (0.11111111 + z * 0.09090909)))
    log = k.to(tl.float32) * 0.69314718 + 2.0 * (s + s * z * series)
    return tl.where(w == 0, 0.0, -log)
