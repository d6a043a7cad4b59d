"""RMS norm and layer norm, spelled out. The arguments' form: specdec_kernels/norms.py."""

import torch

from .quantize import quantize_int8


def rms_norm(x, weight, eps, residual, residual_out, out):
    h = _added(x, residual, residual_out)
    inverse = torch.rsqrt(h.double().square().mean(-1, keepdim=True) + eps).float()
    normed = (h.float() * inverse).to(h.dtype)
    out.copy_(_times(normed, weight))


def layer_norm(x, weight, bias, eps, residual, residual_out, out):
    h = _added(x, residual, residual_out)
    mean = h.double().mean(-1, keepdim=True)
    variance = (h.double() - mean).square().mean(-1, keepdim=True)
    inverse = torch.rsqrt(variance + eps).float()
    normed = ((h.float() - mean.float()) * inverse).to(h.dtype)
    y = _times(normed, weight)
    out.copy_(y if bias is None else (y.float() + bias.float()).to(h.dtype))


def rms_norm_quantize_int8(x, weight, eps, residual, residual_out, group, q, scale, sums):
    y = torch.empty_like(x)
    rms_norm(x, weight, eps, residual, residual_out, y)
    quantize_int8(y, group, True, False, None, 0, q, scale, None, sums)


def layer_norm_quantize_int8(x, weight, bias, eps, residual, residual_out, group, q, scale, sums):
    y = torch.empty_like(x)
    layer_norm(x, weight, bias, eps, residual, residual_out, y)
    quantize_int8(y, group, True, False, None, 0, q, scale, None, sums)


def _added(x, residual, residual_out):
    if residual is None:
        return x
    residual_out.copy_((x.float() + residual.float()).to(x.dtype))
    return residual_out


def _times(values, weight):
    return (values.float() * weight.float()).to(values.dtype)
