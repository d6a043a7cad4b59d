"""Where the device tests run: on each GPU backend that is usable here, and, as a rehearsal, on the CPU emulator."""

import contextlib

import torch

import emulator
import specdec_kernels as sk
from guard import guarded
from specdec_kernels import gpu


class Device:
    """A GPU backend on the current device."""

    device = "cuda"  # ROCm's name for its devices, too

    def __init__(self, backend):
        self.name = backend
        self.operations = set(sk.backends()[backend]["operations"])

    def running(self):
        return sk.use_backend(self.name)

    @contextlib.contextmanager
    def no_waiting(self):
        """Inside, torch raises where it would wait for the device."""
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def capture(self, run):
        """Captures ``run()`` in a CUDA graph: (its outputs, a function that runs it again into the same outputs)."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # loads modules, compiles what is compiled when first called
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = run()
        return outputs, graph.replay

    def matrix(self, shape, dtype, stride):
        """An uninitialised matrix with rows ``stride`` elements apart; None if that is too much."""
        size = (shape[0] - 1) * stride + shape[1]
        if torch.cuda.mem_get_info()[0] < size * dtype.itemsize + 2**30:
            return None
        return torch.empty(size, dtype=dtype, device=self.device).as_strided(shape, (stride, 1))


class Emulated:
    """The same kernels, launchers and bindings on CPU tensors (tests/emu), so that the tests themselves are tested."""

    name, device = "emulator", "cpu"

    def __init__(self):
        self.operations = set(gpu.operations(emulator.compiled(), None))

    def running(self):
        return emulator.serving(32, "forward")

    def no_waiting(self):
        return contextlib.nullcontext()

    def capture(self, run):
        outputs = run()

        def replay():
            for old, new in zip(outputs, run(), strict=True):
                if old is not None:
                    old.copy_(new)

        return outputs, replay

    def matrix(self, shape, dtype, stride):
        return guarded(shape, dtype, row_stride=stride)  # takes the pages that are written


def why_not():
    """Backend -> why it is not tested here, of those for GPUs."""
    if not torch.cuda.is_available():
        return dict.fromkeys(("triton", "cuda", "hip"), "torch sees no GPU")
    status = sk.backends()
    return {name: status[name]["reason"] for name in ("triton", "cuda", "hip") if not status[name]["usable"]}


def names():
    return [*(name for name in ("triton", "cuda", "hip") if name not in why_not()), "emulator"]


def place(name):
    return Emulated() if name == "emulator" else Device(name)


def put(value, device):
    """The tensors and packed weights in nested tuples and dicts, moved; a matrix keeps the distance of its rows."""
    if isinstance(value, torch.Tensor):
        if value.dim() == 2 and value.shape[0] > 1 and value.stride(0) > value.shape[1]:
            frame = torch.empty(value.shape[0], value.stride(0), dtype=value.dtype, device=device)
            return frame[:, : value.shape[1]].copy_(value)
        return value.to(device)
    if isinstance(value, sk.Int8Weight):
        return value.to(device)
    if isinstance(value, dict):
        return {key: put(item, device) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(put(item, device) for item in value)
    return value
