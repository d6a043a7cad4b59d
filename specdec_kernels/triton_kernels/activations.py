"""silu and gelu in Triton (reference/gates.py is the specification), and their product with the up projection."""

import triton
import triton.language as tl

from .codes import rounded


@triton.jit
def activated(gate, up, like: tl.constexpr, KIND: tl.constexpr):
    """silu, gelu or gelu_tanh (gate) * up, computed in float32 and each rounded to ``like``."""
    if KIND == "gelu":  # 1 + erf(z) = erfc(-z), which cancels nothing
        y = 0.5 * gate * erfc(gate * -0.7071067811865476)
    else:
        z = gate
        if KIND == "gelu_tanh":  # (1 + tanh(z)) / 2 = sigmoid(2 z)
            z = 1.5957691216057308 * (gate + 0.044715 * (gate * gate * gate))
        y = tl.div_rn(gate, 1.0 + tl.exp(-z))
    return rounded(rounded(y, like) * up, like)


@triton.jit
def erfc(x):
    """1 - erf(x) in float32 to a relative 5e-7 where it is a normal number.

    exp(z^2) erfc(z) (1 + 2 z) of z = |x| is a smooth function of t = (z - 2.5)/(z + 2.5) (Shepherd and Laframboise,
    "Chebyshev approximation of (1 + 2x) exp(x^2) erfc x", 1981); the polynomial is a Chebyshev fit of degree 11. z^2 is
    taken apart so that its rounding does not grow in exp.
    """
    z = tl.abs(x)
    t = tl.div_rn(z - 2.5, z + 2.5)
    y = t * -6.1907529e-05 + -6.39178688e-05
    y = t * y + 0.000575734652
    y = t * y + 0.000463337521
    y = t * y + -0.00435049227
    y = t * y + 0.000946759654
    y = t * y + 0.0327520519
    y = t * y + -0.102970541
    y = t * y + 0.157630995
    y = t * y + -0.0990242437
    y = t * y + -0.122356802
    y = t * y + 1.26483822
    head = (z.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)
    y = tl.exp(-head * head) * tl.exp((head - z) * (z + head)) * tl.div_rn(y, 1.0 + 2.0 * z)
    y = tl.where(z < 11.0, y, 0.0)  # where it is no float32 number any more; z may be infinite
    y = tl.where(x < 0.0, 2.0 - y, y)
    return tl.where(x == x, y, x)
