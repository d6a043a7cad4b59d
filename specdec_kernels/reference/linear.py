"""linear_int8, linear_f32, expand and the packed weight in plain PyTorch: the specification.

Arguments come from the public modules: x [M, K] with unit last stride, ``scale`` [M, 1 or G] or None (x is float then),
``weight`` an Int8Weight, ``bias`` [N] or None, ``out`` [M, N]; results are written into ``out``.
"""

import torch
from torch.nn.functional import pad

from ..int8_weight import PANEL, STEP
from ..rotation import hadamard


def _quantize(x):
    """f32 [M, G, group] -> codes [M, G, group] and scale [M, G], by the contract's formula."""
    amax = x.abs().amax(-1)
    s = amax / torch.full_like(amax, 127)  # a plain 127 would become a multiplication on CUDA
    no_codes = (amax < 127 * 2.0**-126) | ~amax.isfinite()
    q = (x / s.unsqueeze(-1)).round().clamp(-127, 127)
    q = torch.where(no_codes.unsqueeze(-1), 0.0, q).to(torch.int8)
    return q, torch.where(amax < 127 * 2.0**-126, 0.0, s)


def pack_int8(values, scale, start, weight):
    """Writes rows ``start`` ... of ``weight``: float rows (rotated if the weight is) or codes with scales."""
    for at in range(0, values.shape[0], 4096):  # in chunks: the peak stays near the packed size
        chunk = values[at : at + 4096]
        if scale is None:
            groups = chunk.float().unflatten(-1, (-1, weight.group_size))
            q, s = _quantize(hadamard(groups) if weight.rotated else groups)
        else:
            q, s = chunk.unflatten(-1, (-1, weight.group_size)), scale[at : at + 4096]
        panels = -(-chunk.shape[0] // PANEL)
        rest, first = panels * PANEL - chunk.shape[0], (start + at) // PANEL
        q = pad(q, (0, -weight.group_size % STEP, 0, 0, 0, rest)).reshape(panels, PANEL, -1, STEP)
        weight.codes[first : first + panels] = (q.view(torch.uint8) ^ 128).permute(0, 2, 1, 3)
        weight.scale[first : first + panels] = pad(s, (0, 0, 0, rest)).view(panels, PANEL, -1).permute(0, 2, 1)


def rows_int8(ids, weight, out):
    """out[i] = the dequantised row ids[i]."""
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < weight.n:
        raise ValueError(f"ids: expected row numbers in 0..{weight.n - 1}, got {ids.tolist()}")
    panel, lane = ids // PANEL, ids % PANEL
    padded = -(-weight.group_size // STEP) * STEP
    q = (weight.codes[panel, :, lane] ^ 128).view(torch.int8).reshape(ids.shape[0], weight.groups, padded)
    values = q[:, :, : weight.group_size] * weight.scale[panel, :, lane].unsqueeze(-1)
    out.copy_((hadamard(values) / weight.group_size if weight.rotated else values).flatten(1))


def expand(weight, out):
    """out [N, K] = the matrix, in out's dtype."""
    out.copy_(weight.dequantize())


def linear_int8(x, scale, weight, bias, out):
    if scale is None:
        groups = x.float().unflatten(-1, (-1, weight.group_size))
        q, scale = _quantize(hadamard(groups) / weight.group_size if weight.rotated else groups)
    else:
        q = x.unflatten(-1, (-1, weight.group_size))
    w, w_scale = weight.unpack()
    w = w.unflatten(-1, (-1, weight.group_size))
    y = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for g in range(weight.groups):
        acc = q[:, g].double() @ w[:, g].double().T  # integers below 2^31: exact in f64, in any order
        s = scale[:, g if scale.shape[1] > 1 else 0, None] * w_scale[:, g]
        y = y + acc.float() * s
    if bias is not None:
        y = y + bias.float()
    out.copy_(y)


def linear_f32(x, weight, bias, out):
    y = (x.double() @ weight.double().T).float()
    out.copy_(y if bias is None else y + bias.float())
