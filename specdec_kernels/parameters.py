"""The arguments that ``verify`` and ``sample`` share: sampling parameters and the keys of the random numbers.

Each function returns the backends' form: one Python number for all requests, exact in float32, or a contiguous tensor
with one value per request. Values are checked where that needs no wait for a device, that is, on the CPU.
"""

import ctypes
import math
import numbers
import operator

import torch

from . import validate

_INTS = (torch.int32, torch.int64)
_NUMBERS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, *_INTS)
_INT32_MAX = 2**31 - 1
DEFAULT_TYPICAL = tuple(ctypes.c_float(x).value for x in (0.09, 0.3))  # eps, delta


def is_greedy(temperature):
    """True for the Python number 0, with which no random number is needed."""
    return not isinstance(temperature, torch.Tensor) and temperature == 0


def temperature(value, requests, device):
    return _float("temperature", value, requests, device, 0.0, math.inf, "a finite number >= 0")


def top_p(value, requests, device):
    return _float("top_p", value, requests, device, 0.0, None, "a number >= 0 (1 and more = off)")


def min_p(value, requests, device):
    return _float("min_p", value, requests, device, None, 1.0, "a number <= 1 (0 and less = off)")


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
    return _float("theta", theta, requests, device, None, None, "a number"), DEFAULT_TYPICAL


def _typical(value):
    try:
        eps, delta = value
        if isinstance(eps, torch.Tensor) or isinstance(delta, torch.Tensor):
            raise TypeError
        # A negative bound would accept tokens of probability 0.
        return tuple(_float(name, x, 1, None, 0.0, None, "a number") for name, x in (("eps", eps), ("delta", delta)))
    except (TypeError, ValueError):
        raise ValueError(f"typical: expected two numbers >= 0 (eps, delta), got {value!r}") from None


def _float(name, value, requests, device, low, high, expected):
    if type(value) is float:
        number = ctypes.c_float(value).value
    elif isinstance(value, torch.Tensor):
        value = validate.tensor(name, value, _NUMBERS, 1, device)
        validate.shape(name, value, (requests,))
        value = value.float().contiguous()
        if device.type == "cpu" and not all(_inside(x, low, high) for x in value.tolist()):
            raise ValueError(f"{name}: expected {expected} for every request, got {value.tolist()}")
        return value
    elif isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            number = ctypes.c_float(float(value)).value
        except OverflowError:  # an int beyond every float
            number = math.inf if value > 0 else -math.inf
    else:
        raise TypeError(f"{name}: expected a number or a tensor [B], got {type(value).__name__}")
    if not _inside(number, low, high):
        raise ValueError(f"{name}: expected {expected}, got {value}")
    return number


def _inside(x, low, high):
    """low <= x <= high; an infinite ``high`` itself is outside; NaN is inside of nothing."""
    return x == x and (low is None or x >= low) and (high is None or x < high or x == high != math.inf)


def top_k(value, requests, device):
    if type(value) is not int:
        if isinstance(value, torch.Tensor):
            value = validate.tensor("top_k", value, _INTS, 1, device)
            validate.shape("top_k", value, (requests,))
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


def keys(seed, position, requests, device, greedy):
    """Seed and position as contiguous int64 tensors [B]; both None, but checked, if every request is greedy."""
    for name, value in (("seed", seed), ("position", position)):
        if value is None:
            if greedy:
                continue
            raise ValueError(f"{name}: expected an int64 tensor [{requests}] unless temperature is 0, got None")
        validate.tensor(name, value, (torch.int64,), 1, device)
        validate.shape(name, value, (requests,))
    if position is not None and device.type == "cpu" and requests and min(position.tolist()) < 0:
        raise ValueError(f"position: expected values >= 0, got {position.tolist()}")
    if greedy:
        return None, None
    return seed.contiguous(), position.contiguous()
