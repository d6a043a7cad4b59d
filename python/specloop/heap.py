"""The C library's heap."""

import ctypes


def give_back():
    """Returns what is free to the system: tens of MB of what loading freed are kept unless one asks for them."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
