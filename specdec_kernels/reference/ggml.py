"""ggml block formats in PyTorch: one function per kind, [n, block bytes] in, [n, block elements] out.

The backends' form: ``dequantize_ggml(blocks uint8 [rows, row bytes], kind, out f32 [rows, elements])``.
"""

import torch

from ..ggml import BLOCKS


def dequantize_ggml(blocks, kind, out):
    size = BLOCKS[kind][1]
    out.copy_(_DECODE[kind](blocks.reshape(-1, size)).reshape(out.shape))


def _half(b):
    """Two bytes per block as one f16 number in f32, shape [n, 1]."""
    return b.contiguous().view(torch.float16).float()


def _nibbles(b):
    """[n, m] bytes to [n, 2, m]: all low halves, then all high halves."""
    return torch.stack((b & 15, b >> 4), dim=1)


def _f32(b):
    return b.contiguous().view(torch.float32)


def _bf16(b):
    return b.contiguous().view(torch.bfloat16).float()


def _q4_0(b):
    return _half(b[:, :2]) * (_nibbles(b[:, 2:]).flatten(1).float() - 8)


def _q4_1(b):
    return _half(b[:, :2]) * _nibbles(b[:, 4:]).flatten(1).float() + _half(b[:, 2:4])


def _q8_0(b):
    return _half(b[:, :2]) * b[:, 2:].contiguous().view(torch.int8).float()


def _q4_k(b):
    # 8 sub-blocks of 32. Their 6-bit scales and minima: four of each in the low 6 bits of bytes 0-3 and 4-7,
    # the other four with 4 low bits in bytes 8-11 and 2 high bits at the top of the first eight bytes.
    packed = b[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), dim=1).float()
    minimum = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), dim=1).float()
    # Each run of 32 bytes holds two sub-blocks: low halves, then high halves.
    q = _nibbles(b[:, 16:].reshape(-1, 32)).reshape(-1, 8, 32).float()
    d, m = _half(b[:, :2]) * scale, _half(b[:, 2:4]) * minimum
    return (d[:, :, None] * q - m[:, :, None]).flatten(1)


def _q6_k(b):
    # Two halves of 128 elements, each 4 runs of 32: 4 low bits from 64 bytes (low halves, then high halves),
    # 2 high bits from 32 bytes, bit pair r for run r. One 8-bit scale per 16 elements.
    low = _nibbles(b[:, :128].reshape(-1, 64)).reshape(-1, 2, 4, 32)
    pairs = b[:, 128:192].reshape(-1, 2, 1, 32)
    high = torch.cat([(pairs >> shift) & 3 for shift in (0, 2, 4, 6)], dim=2)
    q = ((low | (high << 4)).float() - 32).reshape(-1, 16, 16)
    scale = b[:, 192:208].contiguous().view(torch.int8).float()
    return ((_half(b[:, 208:]) * scale)[:, :, None] * q).flatten(1)


_DECODE = {
    "F32": _f32,
    "F16": _half,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
