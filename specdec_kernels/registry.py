"""Which implementation serves a call, and why the others do not.

A backend is a module that defines functions with the operations' names; this file only finds them. The order on a
device is fixed (:data:`ORDER`); ``use_backend`` and the variables ``SPECDEC_BACKEND`` and ``SPECDEC_BACKEND_<OP>``
replace it by one name, which then has to serve or to say why it can't.
"""

import contextlib
import contextvars
import importlib
import os

from . import native

# Every operation of the library, in the order in which diagnostics show them.
OPERATIONS = (
    "verify",
    "verify_tree",
    "sample",
    "quantize_int8",
    "dequantize_int8",
    "rms_norm_quantize_int8",
    "layer_norm_quantize_int8",
    "silu_mul_quantize_int8",
    "gelu_mul_quantize_int8",
    "rms_norm",
    "layer_norm",
    "silu_mul",
    "gelu_mul",
    "pack_int8",
    "rows_int8",
    "expand",
    "linear_int8",
    "linear_f32",
    "rope_write_kv_int8",
    "attend_int8",
    "rms_norm_linear",
    "rope_attend",
    "gated_mlp",
    "dequantize_ggml",
)
# Operations that a backend without kernels for them makes of its own single ones (composition.py).
COMPOSED = ("rms_norm_linear", "rope_attend", "gated_mlp")
BACKENDS = ("reference", "cpu", "triton", "cuda", "hip")
COMPILED = {"cpu": "_C_cpu", "cuda": "_C_cuda", "hip": "_C_hip"}  # the modules that setup.py may have built
# Fastest first. ROCm tensors have device type "cuda", too.
ORDER = {"cpu": ("cpu", "reference"), "cuda": ("cuda", "hip", "triton", "reference")}
ON_REQUEST = {"cpu": ("triton",)}  # serve that device, too, but only those who ask for them by name


class BackendUnavailable(RuntimeError):
    """The backend that was asked for can't serve the call; the message holds every reason."""


class Unsupported(Exception):
    """Raised by a backend before it does any work: the call is valid but not one that it serves."""


_forced = contextvars.ContextVar("specdec_backend", default=None)
_modules = {}  # backend -> (module or None, reason or None)
_chosen = {}  # _key(operation, device type) -> tuple of (backend, function)
_declined = {}  # (operation, backend) -> last reason


def module(backend):
    """The backend's module and, if it is unusable here, the reason: ``(module, None)`` or ``(None, reason)``."""
    if backend not in _modules:
        _modules[backend] = _load(backend)
    return _modules[backend]


def _load(backend):
    if backend == "cpu" and native.cpu is None:
        return None, native.cpu_reason
    if backend == "triton":
        from . import triton_kernels

        reason = triton_kernels.unusable()
        return (None, reason) if reason else (triton_kernels, None)
    if backend in ("cuda", "hip"):
        try:
            from . import gpu
        except ImportError:
            return None, f"{backend} is not part of this installation"
        return gpu.load(backend)
    try:
        return importlib.import_module("." + backend, __package__), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def forced_backend():
    """The name that the innermost ``use_backend`` of this thread or task asks for, or None."""
    return _forced.get()


# The environment is looked at in every call, since a program may change it; through os.environ itself that would cost
# as much as a small kernel. Its dictionary is what os.environ reads and writes.
_variables = os.environ._data
_ALL = os.environ.encodekey("SPECDEC_BACKEND")
_ONE = {operation: os.environ.encodekey(f"SPECDEC_BACKEND_{operation.upper()}") for operation in OPERATIONS}


def _key(operation, device_type):
    """All that the choice of a backend depends on."""
    return operation, device_type, _forced.get(), _variables.get(_ONE[operation]), _variables.get(_ALL)


def environment_choice(operation):
    """``(variable, backend)`` that the environment asks for, or ``(None, None)``; an empty one is not set."""
    for variable in (f"SPECDEC_BACKEND_{operation.upper()}", "SPECDEC_BACKEND"):
        if os.environ.get(variable):
            return variable, os.environ[variable]
    return None, None


def candidates(operation, device_type):
    """The functions that may serve the operation on that device, best first: a tuple of (backend, function)."""
    key = _key(operation, device_type)
    found = _chosen.get(key)
    if found is None:
        found = _chosen[key] = _find(operation, device_type)
    return found


def _find(operation, device_type):
    order = ORDER.get(device_type, ("reference",))
    asks, name = ("use_backend", _forced.get()) if _forced.get() else environment_choice(operation)
    if name is not None:
        if name not in BACKENDS:
            raise BackendUnavailable(f"{asks}: expected one of {', '.join(BACKENDS)}, got {name!r}")
        if name not in order + ON_REQUEST.get(device_type, ()):
            raise BackendUnavailable(f"{name}: does not serve {device_type} tensors (only {', '.join(order)} do)")
        order = (name,)
    found, reasons = [], []
    for backend in order:
        loaded, reason = module(backend)
        function = getattr(loaded, operation, None)
        if function is None and loaded is not None and operation in COMPOSED:
            function = getattr(importlib.import_module(".composition", __package__), operation)
        if function is not None:
            found.append((backend, function))
        else:
            reasons.append(f"{backend}: {reason or f'has no {operation}'}")
            _declined[operation, backend] = reasons[-1]
    if not found:
        raise BackendUnavailable(f"{operation}: no backend can serve it: {'; '.join(reasons)}")
    return tuple(found)


def call(operation, device_type, *args):
    """Runs the operation on the first backend that serves it. ``args`` are validated and in the backends' own form."""
    found = _chosen.get(_key(operation, device_type))
    if found is None:
        found = candidates(operation, device_type)
    reasons = []
    for backend, function in found:
        try:
            result = function(*args)
            recording = native.recorder.get()
            if recording is not None:
                recording.keep(operation, backend, args)
            return result
        except Unsupported as error:
            reasons.append(f"{backend}: {error}")
            _declined[operation, backend] = reasons[-1]
    raise BackendUnavailable(f"{operation}: no backend can serve this call: {'; '.join(reasons)}")


@contextlib.contextmanager
def use_backend(name):
    """Makes ``name`` serve every operation inside the ``with`` block (in this thread or task only).

    Raises ``BackendUnavailable`` at once if the backend can't be used here at all, and at the call if it lacks the
    operation or can't serve that call.
    """
    if name not in BACKENDS:
        raise BackendUnavailable(f"name: expected one of {', '.join(BACKENDS)}, got {name!r}")
    loaded, reason = module(name)
    if loaded is None:
        raise BackendUnavailable(f"{name}: {reason}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def build_info():
    """``(built, reasons)`` as setup.py left them: per module its build, or why there is none; empty without a build."""
    try:
        from . import _build_info
    except Exception:  # a copy of the source that was never built
        return {}, {}
    return _build_info.BUILT, _build_info.REASONS


def backends():
    """Per backend: ``{"built": bool, "usable": bool, "reason": str | None, "operations": [...], "declined": {...}}``.

    ``reason`` says why it is not usable; ``declined`` holds, per operation, why the backend last passed a call on to
    the next one. The reference and triton need no build: ``built`` is ``usable``.
    """
    status = {}
    for name in BACKENDS:
        loaded, reason = module(name)
        status[name] = {
            "built": COMPILED[name] in build_info()[0] if name in COMPILED else loaded is not None,
            "usable": loaded is not None,
            "reason": reason,
            "operations": [op for op in OPERATIONS if hasattr(loaded, op)],
            "declined": {op: text for (op, backend), text in _declined.items() if backend == name},
        }
    return status
