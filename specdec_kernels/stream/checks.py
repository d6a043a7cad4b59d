"""Refusals of arguments of the wrong kind. Every message names the argument, what was expected, what came."""

import contextlib
import math
import os

import torch

from ..validate import integer
from .files import show


def source(name, value):
    """A path, or an open file's descriptor."""
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value < 1 << 31:
            raise ValueError(f"{name}: expected a path or a file descriptor, got {show(value)}")
        return value
    return path(name, value, "a path or a file descriptor")


def path(name, value, expected="a path"):
    try:
        return os.fsdecode(value)
    except TypeError:
        raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}") from None


def kind(name, value, wanted):
    """An object of the class ``wanted``."""
    if not isinstance(value, wanted):
        raise TypeError(f"{name}: expected a {wanted.__name__}, got {type(value).__name__}")
    return value


def text(name, value):
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a str, got {type(value).__name__}")
    return value


def function(name, value):
    """Something to call, or None."""
    if value is not None and not callable(value):
        raise TypeError(f"{name}: expected a function or None, got {type(value).__name__}")
    return value


def device(name, value):
    """A torch.device, or what torch makes one of."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        if isinstance(value, (str, torch.device)):
            return torch.device(value)
    problem = f"{name}: expected a device such as 'cpu' or 'cuda:0', got "
    if isinstance(value, str):
        raise ValueError(problem + show(value))
    raise TypeError(problem + type(value).__name__)


def count(name, value, least=0):
    """An integer, ``least`` or more."""
    if integer(name, value) < least:
        raise ValueError(f"{name}: expected an integer >= {least}, got {show(value)}")
    return int(value)


def index(name, value, size, of="blocks"):
    """The number of one of ``size`` things."""
    if not 0 <= integer(name, value) < size:
        raise ValueError(f"{name}: expected the number of one of {size} {of}, from 0, got {show(value)}")
    return int(value)


def seconds(name, value):
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected seconds, got {type(value).__name__}")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name}: expected seconds >= 0, got {show(value)}")
    return value


def items(name, value, expected):
    """What can be gone through (no text), as a tuple."""
    if not isinstance(value, (str, bytes)):
        with contextlib.suppress(TypeError):
            return tuple(value)
    raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}")


def pairs(name, value, expected):
    """Pairs, or a dict."""
    if isinstance(value, dict):
        value = value.items()
    found = items(name, value, expected)
    for pair in found:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"{name}: expected {expected}, got {show(pair)} in it")
    return found


def memory(value, nbytes, writable=True):
    """A uint8 CPU tensor or a buffer of ``nbytes`` or more, as a view of its bytes."""
    from .buffers import view_of

    try:
        view = view_of(value)
    except TypeError:
        raise TypeError(f"memory: expected a CPU tensor or a buffer, got {type(value).__name__}") from None
    if writable and view.readonly:
        raise ValueError(f"memory: expected what can be written to, got {type(value).__name__}")
    if len(view) < nbytes:
        raise ValueError(f"memory: expected {nbytes} bytes or more, got {len(view)}")
    return view
