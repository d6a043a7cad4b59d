"""A thin speculative decode loop on top of specdec_kernels: ``load`` a model, then ``generate`` or ``stream``.

Importing this package is quick: torch is imported when a model is loaded.
"""

import importlib

_HOME = {
    "load": "pair",
    "generate": "pair",
    "stream": "pair",
    "Pair": "pair",
    "generate_candidates": "candidates",
    "Result": "streaming",
    "Event": "streaming",
    "SpecloopError": "errors",
    "OptionError": "errors",
    "PromptError": "errors",
    "ModelError": "errors",
    "ModelFault": "errors",
    "BudgetError": "errors",
    "WeightsError": "errors",
    "LoadCancelled": "errors",
    "PairClosed": "errors",
    "OutOfMemory": "errors",
}

__all__ = list(_HOME)
__version__ = "0.1.0"


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module("." + _HOME[name], __name__), name)
    return value


def __dir__():
    return sorted([*globals(), *_HOME])
