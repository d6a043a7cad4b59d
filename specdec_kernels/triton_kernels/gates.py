"""silu_mul and gelu_mul, plain and quantising (the kernel of quantize.py, fed with their values)."""

import triton
import triton.language as tl

from .codes import store_rounded
from .launch import launch, on_device
from .quantize import quantize, values_of
from .tiles import rows_of, tile, units_of


@triton.jit(do_not_specialize=["rows"])
def gate_kernel(gate_up, stride, out, out_stride, rows, cols, SOURCE: tl.constexpr, B: tl.constexpr, L: tl.constexpr):
    """Programs (B rows, L of their columns)."""
    _, row, _ = units_of(rows, 1, B)
    place = tl.program_id(1) * L + tl.arange(0, L)[None, :]
    inside = (row < rows)[:, None] & (place < cols)
    row = row.to(tl.int64)[:, None]
    y = values_of(gate_up + row * stride, place, inside, cols, SOURCE)
    store_rounded(out + row * out_stride + place, y, inside)


def _gate(source, gate_up, out):
    if out.numel() == 0:
        return
    rows, stride = rows_of(out)
    cols = out.shape[-1]
    together, long, threads = tile(cols, 1024)
    with on_device(out):
        launch(
            gate_kernel, (triton.cdiv(rows, together), triton.cdiv(cols, long)), threads,
            gate_up, rows_of(gate_up)[1], out, stride, rows, cols, SOURCE=source, B=together, L=long,
        )  # fmt: skip


def silu_mul(gate_up, out):
    _gate("silu", gate_up, out)


def silu_mul_quantize_int8(gate_up, group, q, scale, sums):
    quantize("silu", gate_up, group, True, False, None, 0, q, scale, None, sums)


def gelu_mul(gate_up, tanh, out):
    _gate("gelu_tanh" if tanh else "gelu", gate_up, out)


def gelu_mul_quantize_int8(gate_up, tanh, group, q, scale, sums):
    quantize("gelu_tanh" if tanh else "gelu", gate_up, group, True, False, None, 0, q, scale, None, sums)
