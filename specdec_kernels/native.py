"""Loads the compiled modules and keeps the reason where one can't be used.

``import specdec_kernels`` must never fail because of a compiled part: whatever goes wrong in here becomes a sentence
that ``python -m specdec_kernels`` and :func:`specdec_kernels.backends` show.
"""

import contextvars
import importlib
import os

import torch

ISA_NAMES = ("scalar", "avx2", "avx512")

# The dtype codes of csrc/include/sk/numerics.h.
DTYPE_CODE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def load_compiled(name):
    """Returns (module, None) or (None, reason)."""
    try:
        return importlib.import_module("." + name, __package__), None
    except ModuleNotFoundError as error:
        if error.name == f"{__package__}.{name}":
            return None, _why_not_built(name)
        return None, f"{name} did not load: {error}"
    except Exception as error:  # a corrupted file raises ImportError, a wrong one may raise anything
        return None, f"{name} did not load: {type(error).__name__}: {error}"


def _why_not_built(name):
    try:
        from ._build_info import REASONS
    except Exception:
        return f"{name} was not built"
    return REASONS.get(name, f"{name} was not built")


def _load_cpu():
    module, reason = load_compiled("_C_cpu")
    if module is None:
        return None, reason
    wish = os.environ.get("SPECDEC_CPU_ISA")
    if wish and not module.set_isa(wish):
        best = module.machine_isa()
        return (
            None,
            f"SPECDEC_CPU_ISA={wish}: expected one of {', '.join(ISA_NAMES)} that this machine runs (best: {best})",
        )
    return module, None


cpu, cpu_reason = _load_cpu()


def threads():
    """How many threads a CPU kernel may use: torch's own setting."""
    return torch.get_num_threads()


# The recording (recording.py) that listens in this thread or task, or None.
recorder = contextvars.ContextVar("specdec_recorder", default=None)


def launch(function, *args):
    """Calls a compiled function; every call of the cpu backend goes through here, so that it can be recorded."""
    recording = recorder.get()
    if recording is not None:
        recording.calls.append((function, args))
    return function(*args)
