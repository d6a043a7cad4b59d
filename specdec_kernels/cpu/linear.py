"""Products with packed int8 weights and with float weights on the CPU (arguments as in reference/linear.py)."""

import torch

from .. import native

_kernels = native.cpu
_TYPE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}


def pack_int8(values, scale, start, weight):
    of_scale = (0, 0, 0) if scale is None else (scale.data_ptr(), scale.stride(0), scale.shape[1])
    native.launch(
        _kernels.pack_int8,
        _TYPE[values.dtype],
        values.data_ptr(),
        values.shape[0],
        values.stride(0),
        *of_scale,
        start,
        *weight.native,
        native.threads(),
    )


def rows_int8(ids, weight, out):
    native.launch(
        _kernels.rows_int8,
        *weight.native,
        ids.data_ptr(),
        ids.shape[0],
        out.data_ptr(),
        out.stride()[0],
        native.threads(),
    )


def expand(weight, out):
    native.launch(_kernels.expand, *weight.native, out.data_ptr(), _TYPE[out.dtype], out.stride()[0], native.threads())


def linear_int8(x, scale, weight, bias, out):
    of_scale = (0, 0, 0) if scale is None else (scale.data_ptr(), scale.stride()[0], scale.shape[1])
    of_bias = (0, 0) if bias is None else (bias.data_ptr(), _TYPE[bias.dtype])
    native.launch(
        _kernels.linear_int8,
        _TYPE[x.dtype],
        x.data_ptr(),
        x.shape[0],
        x.stride()[0],
        *of_scale,
        *weight.native,
        *of_bias,
        out.data_ptr(),
        _TYPE[out.dtype],
        out.stride()[0],
        native.threads(),
    )


def linear_f32(x, weight, bias, out):
    native.launch(
        _kernels.linear_f32,
        x.data_ptr(),
        x.shape[0],
        x.stride()[0],
        weight.data_ptr(),
        _TYPE[weight.dtype],
        *weight.shape,
        weight.stride(0),
        *((0, 0) if bias is None else (bias.data_ptr(), _TYPE[bias.dtype])),
        out.data_ptr(),
        out.stride()[0],
        native.threads(),
    )
