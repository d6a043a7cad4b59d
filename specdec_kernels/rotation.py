"""The Hadamard rotation of scale groups, as every backend computes it, bit for bit.

One large activation sets the step size of its whole group. Multiplying the group by a Hadamard matrix H spreads it over
all values of the group first; a weight packed with ``rotate=True`` holds the codes of W H, and since H H = group * I,
(x H / group)(W H)^T = x W^T (as in QuaRot, arXiv 2404.00456, but within each scale group, so that no other operation
has to know).
"""

import torch


def hadamard(x):
    """x H over the last dimension, a power of two; f32, H in Sylvester's order.

    log2(n) steps h = 1, 2, 4, ... that replace each pair (a, b) at distance h by (a + b, a - b): the order of the
    additions is part of the definition, or backends would differ in the last bit.
    """
    x = x.float()
    h = 1
    while h < x.shape[-1]:
        a, b = x.unflatten(-1, (-1, 2, h)).unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        h *= 2
    return x
