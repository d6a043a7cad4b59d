"""The arguments that ``verify``, ``verify_tree`` and ``sample`` share: sampling parameters and keys of random numbers.

The backends' form of a parameter is one Python number for all requests, exact in float32, or a contiguous tensor with
one value per request. Values are checked where that needs no wait for a device, that is, on the CPU.
"""

import ctypes
import functools
import math
import numbers
import operator

import torch

from . import validate

_INTS = (torch.int32, torch.int64)
_INT64 = (torch.int64,)
_NUMBERS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, *_INTS)
_INT32_MAX = 2**31 - 1
# name: (least, greatest, what is expected); an infinite greatest is outside itself
_LIMITS = {
    "temperature": (0.0, math.inf, "a finite number >= 0"),
    "top_p": (0.0, None, "a number >= 0 (1 and more = off)"),
    "min_p": (None, 1.0, "a number <= 1 (0 and less = off)"),
    "theta": (None, None, "a number"),
    "eps": (0.0, None, "a number"),
    "delta": (0.0, None, "a number"),
}
DEFAULT_TYPICAL = tuple(ctypes.c_float(x).value for x in (0.09, 0.3))  # eps, delta


def sampling(temperature, top_k, top_p, min_p, seed, position, requests, device):
    """The first six arguments, checked and in the backends' form; seed and position are None if all is greedy."""
    greedy = not isinstance(temperature, torch.Tensor) and temperature == 0
    temperature = _float("temperature", temperature, requests, device)
    top_k = _top_k(top_k, requests, device)
    top_p, min_p = _float("top_p", top_p, requests, device), _float("min_p", min_p, requests, device)
    seed, position = _keys(seed, position, requests, device, greedy)
    return temperature, top_k, top_p, min_p, seed, position


def rule(value, rules, theta, typical, requests, device):
    """``theta`` and ``typical`` = (eps, delta) as the backends take them, for a rule that is one of ``rules``.

    theta is None, and typical its default, unless the rule has to do with it.
    """
    if value not in rules:
        raise ValueError(f"rule: expected one of {', '.join(map(repr, rules))}, got {value!r}")
    if value == "typical":
        return None, _typical(typical)
    if value != "threshold":
        return None, DEFAULT_TYPICAL
    if theta is None:
        raise ValueError("theta: expected a number or a tensor [B] for rule 'threshold', got None")
    return _float("theta", theta, requests, device), DEFAULT_TYPICAL


def _typical(value):
    try:
        eps, delta = value
        if isinstance(eps, torch.Tensor) or isinstance(delta, torch.Tensor):
            raise TypeError
        # A negative bound would accept tokens of probability 0.
        return _float("eps", eps, 1, None), _float("delta", delta, 1, None)
    except (TypeError, ValueError):
        raise ValueError(f"typical: expected two numbers >= 0 (eps, delta), got {value!r}") from None


def _float(name, value, requests, device):
    if type(value) is float:
        return _number(name, value)
    if isinstance(value, torch.Tensor):
        validate.vector(name, value, _NUMBERS, requests, device)
        value = value.float().contiguous()
        if value.is_cpu and not all(_inside(name, x) for x in value.tolist()):
            raise ValueError(f"{name}: expected {_LIMITS[name][2]} for every request, got {value.tolist()}")
        return value
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a number or a tensor [B], got {type(value).__name__}")
    try:
        value = float(value)
    except OverflowError:  # an int beyond every float
        value = math.inf if value > 0 else -math.inf
    return _number(name, value)


@functools.lru_cache(maxsize=256)
def _number(name, value):
    """The float rounded to float32; a decode loop asks for the same few again and again."""
    rounded = ctypes.c_float(value).value
    if not _inside(name, rounded):
        raise ValueError(f"{name}: expected {_LIMITS[name][2]}, got {value}")
    return rounded


def _inside(name, x):
    """NaN is inside of nothing."""
    low, high, _ = _LIMITS[name]
    return x == x and (low is None or x >= low) and (high is None or x < high or x == high != math.inf)


def _top_k(value, requests, device):
    if type(value) is not int:
        if isinstance(value, torch.Tensor):
            validate.vector("top_k", value, _INTS, requests, device)
            if value.dtype is torch.int64:
                value = value.clamp(0, _INT32_MAX).int()
            return value.contiguous()
        if isinstance(value, bool):
            raise TypeError("top_k: expected an integer or a tensor [B], got bool")
        try:
            value = operator.index(value)
        except TypeError:
            raise TypeError(f"top_k: expected an integer or a tensor [B], got {type(value).__name__}") from None
    return min(max(value, 0), _INT32_MAX)


def _keys(seed, position, requests, device, greedy):
    """Seed and position as contiguous int64 tensors [B]; both None, but checked, if every request is greedy."""
    if not greedy and (seed is None or position is None):
        name = "seed" if seed is None else "position"
        raise ValueError(f"{name}: expected an int64 tensor [{requests}] unless temperature is 0, got None")
    if seed is not None:
        validate.vector("seed", seed, _INT64, requests, device)
    if position is not None:
        validate.vector("position", position, _INT64, requests, device)
        if position.is_cpu and requests and min(position.tolist()) < 0:
            raise ValueError(f"position: expected values >= 0, got {position.tolist()}")
    return (None, None) if greedy else (seed.contiguous(), position.contiguous())
