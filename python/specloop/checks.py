"""Checks of single values that came from outside. A message names the option, what was expected and what came."""

from __future__ import annotations

import math
from numbers import Integral, Real

from .errors import OptionError, show

LARGEST_FLOAT = 3.4028234663852886e38  # in float32, to which the kernels round


def integer(name, value, least, most=None, *, instead=None) -> int:
    """``instead``: what the caller takes in the place of an integer, for the message."""
    wanted = f"an integer >= {least}" if most is None else f"an integer from {least} to {most}"
    wanted = f"{instead} or {wanted}" if instead else wanted
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise OptionError(f"{name}: expected {wanted}, got {show(value)}")
    if value < least or (most is not None and value > most):
        raise OptionError(f"{name}: expected {wanted}, got {show(value)}")
    return int(value)


def real(name, value, least=-math.inf, most=math.inf, *, above=False) -> float:
    """``above``: ``least`` itself is too small. Infinities and NaN are never taken."""
    if most < math.inf:
        wanted = f"a number above {least:g} and up to {most:g}" if above else f"a number from {least:g} to {most:g}"
    else:
        wanted = "a finite number" + ("" if least == -math.inf else f" {'>' if above else '>='} {least:g}")
    if isinstance(value, bool) or not isinstance(value, Real):
        raise OptionError(f"{name}: expected {wanted}, got {show(value)}")
    good = max(least, -LARGEST_FLOAT) <= value <= min(most, LARGEST_FLOAT)  # NaN is not
    if not good or (above and value == least):
        raise OptionError(f"{name}: expected {wanted}, got {show(value)}")
    return float(value)


def one_of(name, value, choices):
    if not isinstance(value, str) or value not in choices:
        raise OptionError(f"{name}: expected one of {', '.join(choices)}, got {show(value)}")
    return value


def function(name, value):
    if value is not None and not callable(value):
        raise OptionError(f"{name}: expected a function, got {show(value)}")
    return value


def flag(name, value) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name}: expected True or False, got {show(value)}")
    return value
