"""ggml block formats on the CPU (csrc/cpu/ggml.cpp)."""

from .. import native
from ..ggml import BLOCKS

_CODE = {kind: code for code, kind in enumerate(BLOCKS)}  # the order of sk::GgmlKind


def dequantize_ggml(blocks, kind, out):
    rows, row_bytes = blocks.shape
    native.launch(
        native.cpu.dequantize_ggml,
        native.threads(),
        _CODE[kind],
        blocks.data_ptr(),
        blocks.stride(0),
        out.data_ptr(),
        out.stride(0),
        rows,
        row_bytes // BLOCKS[kind][1],
    )
