"""What streaming to a device needs of it, and that of GPUs by torch.

Two orders have to hold, and events are what holds them; the host only queues work. ``copy done``: work on a block comes
behind the copy of the block. ``slot free``: a copy into a slot comes behind the work on the block that was there. A
missing first one reads half a block, a missing second one overwrites weights that are being read; on a fast link either
may never show. So the two are in one place (uploads.py), and the tests run them on a device that shows it.
"""

from typing import Protocol

import torch

from .errors import StreamError

PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device of the process
ALREADY_REGISTERED = 712


class PinError(RuntimeError):
    """Host memory that could not be page-locked, and why."""


class Device(Protocol):
    """Memory and streams of one device. Streams and events are whatever the implementation likes."""

    shares_memory: bool  # with the host: page-locking would take memory from the device

    def empty(self, nbytes):
        """uint8 [nbytes] on the device, at a multiple of 64, for use by ``current``."""

    def fill(self, memory, value):
        """Fills memory, in the order of ``current``."""

    def stream(self):
        """A new stream, for copies."""

    def current(self):
        """The stream on which the calling thread works."""

    def record(self, stream):
        """An event behind all that the stream was given so far."""

    def wait(self, stream, event):
        """What the stream is given from now on comes behind the event. The host does not wait."""

    def finish(self, event):
        """The host waits for the event."""

    def copy(self, target, source, stream):
        """Copies host memory to the device in the order of the stream: page-locked memory as the device comes to it, so
        it must stay as it is; other memory may be used again when the call returns."""

    def register(self, address, nbytes):
        """Page-locks memory, or raises PinError. Returns whether it has to be unregistered: it has not if somebody else
        had it locked already."""

    def unregister(self, address):
        """The opposite. Nothing may be copying from there."""

    def clear_error(self):
        """Makes the device forget an error that was reported already."""


class TorchDevice:
    """A GPU of torch: CUDA, or ROCm, which has the same names there."""

    def __init__(self, device):
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"device: expected a cuda device (ROCm's are called so, too), got {device}")
        if not torch.cuda.is_available():
            raise StreamError(f"device: expected a GPU to stream to, but torch {torch.__version__} sees none")
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.shares_memory = bool(getattr(torch.cuda.get_device_properties(self.device), "is_integrated", False))

    def empty(self, nbytes):
        with torch.inference_mode(False):  # whatever mode the caller is in, another thread copies to it
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def fill(self, memory, value):
        memory.fill_(value)

    def stream(self):
        return torch.cuda.Stream(self.device)

    def current(self):
        if torch.cuda.is_current_stream_capturing():
            raise StreamError(
                "a pass over streamed weights can't be captured as a whole; capture what is done with each block"
            )
        return torch.cuda.current_stream(self.device)

    def record(self, stream):
        event = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps
        event.record(stream)
        return event

    def wait(self, stream, event):
        stream.wait_event(event)

    def finish(self, event):
        event.synchronize()

    def copy(self, target, source, stream):
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        if torch.version.hip and not source.is_pinned():
            stream.synchronize()  # CUDA's runtime has taken pageable memory by then; of HIP's that is not documented

    def register(self, address, nbytes):
        runtime = torch.cuda.cudart()
        with torch.cuda.device(self.device):
            code = int(runtime.cudaHostRegister(address, nbytes, PORTABLE))
        if code not in (0, ALREADY_REGISTERED):
            raise PinError(f"{nbytes} bytes of page-locked host memory can't be had: {_words(runtime, code)}")
        if code:
            self.clear_error()
        return not code

    def unregister(self, address):
        runtime = torch.cuda.cudart()
        with torch.cuda.device(self.device):
            code = int(runtime.cudaHostUnregister(address))
        if code:
            self.clear_error()

    def clear_error(self):
        """The runtime keeps an error until somebody asks for it, which the next launch does, as if it were its own. So
        here is one that nobody needs."""
        for _ in range(2):
            try:
                torch.empty(1, device=self.device).fill_(1)
                return
            except RuntimeError:
                continue


def _words(runtime, code):
    try:
        return f"{runtime.cudaGetErrorString(runtime.cudaError(code))} ({code})"
    except Exception:  # a code that this torch has no name for
        return f"error {code}"
