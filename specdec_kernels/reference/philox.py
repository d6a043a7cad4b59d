"""Philox4x32-10 in Python integers, and the random numbers of the sampling operations.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). A counter-based generator: a number
is a function of (seed, position, stream, index, group) and of nothing else, so that neither batch slot nor thread nor
launch shape can change it.

    key     = (seed low, seed high)
    counter = (position low, position high, stream << 24 | index, group)
    u       = word 0 * 2^-32, in [0, 1)
"""

import torch

DRAFT, COIN, LAST, PLAIN = 0, 1, 2, 3  # streams: draft noise, acceptance coins, a round's last token, plain sampling

_MASK = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85


def philox4x32(key, counter):
    """Four words of 32 bits from a key of two and a counter of four. Works on ints and on int64 tensors alike.

    With tensors a product of two 32-bit numbers may wrap around in int64; its bits are right all the same, and the mask
    removes the sign that the shift drags in.
    """
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) & _MASK ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) & _MASK ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed, position, stream, index, group=0):
    """u in [0, 1); ``group`` is an int (returns a float) or an int64 tensor (returns a float64 tensor)."""
    key = seed & _MASK, (seed >> 32) & _MASK
    counter = position & _MASK, (position >> 32) & _MASK, stream << 24 | index, group
    if isinstance(group, torch.Tensor):
        counter = tuple(c if c is group else torch.full_like(group, c) for c in counter)
        return philox4x32(key, counter)[0].double() * 2.0**-32
    return philox4x32(key, counter)[0] * 2.0**-32
