"""Recording a sequence of calls and running it again: for the CPU what a CUDA graph is for a GPU.

A decode pass makes hundreds of calls on buffers that never move; checking every argument again each time costs more
than some of the kernels. ``record()`` keeps the compiled calls that a block of code makes, ``Recording.run()`` makes
them again with the same addresses: the values in the buffers may change between runs, the buffers themselves may not.

    with record() as recording:
        model_pass(buffers)          # checked and executed as always
    if recording.complete:
        recording.run()              # executed again, on whatever the buffers hold now

The calls lie in C++ as plain numbers (csrc/bind/program.h), and running them is one call from Python. The recording
holds references to every tensor that it uses. Values that the kernels check themselves (slots, lengths,
page numbers, token ids) are checked in every run. Only operations that the cpu backend served can be recorded;
otherwise ``complete`` is False and ``run`` refuses. Operations of torch in between are not recorded.
"""

import contextlib

from . import native
from .registry import COMPOSED


class Recording:
    def __init__(self):
        self.program = native.cpu and native.cpu.Program()  # the compiled calls
        self.kept = []  # the tensors behind the addresses
        self.backends = set()  # that served an operation
        self.reason = None  # why it can't be run again

    @property
    def complete(self):
        return self.reason is None and bool(self.program)

    def keep(self, operation, backend, args):
        """Called by the registry for each operation inside the block."""
        self.kept.append(args)
        if operation in COMPOSED and backend == "reference":
            return  # composition.py: its single operations were kept one by one, each with its own backend
        self.backends.add(backend)
        if backend != "cpu":
            self.reason = f"{operation} ran on the {backend} backend"

    def run(self):
        if not self.complete:
            raise RuntimeError(f"recording: {self.reason or 'holds no calls'}")
        self.program.run(native.threads())


@contextlib.contextmanager
def record():
    """Records the operations that the block runs in this thread; they are executed as usual."""
    recording = Recording()
    token = native.recorder.set(recording)
    try:
        yield recording
    except BaseException:
        recording.reason = "the recorded block raised an exception"
        raise
    finally:
        native.recorder.reset(token)
