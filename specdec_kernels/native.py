"""Loads the compiled modules and keeps the reason where one can't be used.

``import specdec_kernels`` must never fail because of a compiled part: whatever goes wrong in here becomes a sentence
that ``python -m specdec_kernels`` and :func:`specdec_kernels.backends` show.
"""

import contextvars
import importlib
import importlib.util
import os
import platform
import struct

import torch

# What the CPU kernels know on this architecture (csrc/cpu/isa.h), each containing those before it.
ON_ARM = platform.machine() in ("aarch64", "arm64")
ISA_NAMES = ("scalar", "neon", "dotprod") if ON_ARM else ("scalar", "avx2", "avx512")

# The dtype codes of csrc/include/sk/numerics.h.
DTYPE_CODE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def load_compiled(name):
    """Returns (module, None) or (None, reason)."""
    try:
        spec = importlib.util.find_spec(f"{__package__}.{name}")
        if spec is None:
            return None, _why_not_built(name)
        if _cut_short(spec.origin):
            raise ImportError(f"{spec.origin}: the file is cut short")
        return importlib.import_module(spec.name), None
    except Exception as error:  # a corrupted file raises ImportError, a wrong one may raise anything
        return None, f"{name} did not load: {type(error).__name__}: {error}"


def _cut_short(path):
    """Whether an ELF file ends before its last table. The loader maps files unread: such a one kills the process."""
    with open(path, "rb") as file:
        head = file.read(64)
    if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":  # not 64-bit little-endian ELF: the loader can tell by itself
        return False
    (offset,), (size, count) = struct.unpack_from("<Q", head, 40), struct.unpack_from("<HH", head, 58)
    return offset + size * count > os.path.getsize(path)


def _why_not_built(name):
    try:
        from ._build_info import REASONS
    except Exception:
        parent = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        if os.path.exists(os.path.join(parent, "setup.py")):  # Python looks in the working folder first
            return (
                f"{name} was not built in the source folder {parent}; an installed package is used from other folders"
            )
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


def not_recordable(reason):
    """Tells the recording that listens, if any, that running its calls again would not do the same work."""
    recording = recorder.get()
    if recording is not None:
        recording.reason = reason


def launch(function, *args):
    """Calls a compiled function; every call of the cpu backend goes through here, so that it can be recorded."""
    recording = recorder.get()
    if recording is not None:
        function(recording.program, *args)
    return function(*args)
