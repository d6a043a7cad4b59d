"""TorchDevice where there is no GPU: on a stand-in for torch, which shows what it is asked and in which order."""

import contextlib
import types

import pytest
import torch

from specdec_kernels.stream import Pack, StreamError, WeightStream, device, plan
from specdec_kernels.stream.device import PinError, TorchDevice
from specdec_kernels.stream.pinned import Arena
from streams import settled, threads_of, write_pack

OUT_OF_MEMORY, ALREADY = 2, 712


class Runtime:
    """The calls of CUDA's runtime that torch passes on; ``codes`` are what registering returns, one after the other."""

    def __init__(self, log, codes=()):
        self.log, self.codes, self.stuck = log, list(codes), False

    def cudaHostRegister(self, address, nbytes, flags):
        code = self.codes.pop(0) if self.codes else 0
        self.stuck = self.stuck or code != 0
        self.log.append(("register", address, nbytes, flags))
        return code

    def cudaHostUnregister(self, address):
        self.log.append(("unregister", address))
        return 0

    def cudaError(self, code):
        if code not in (OUT_OF_MEMORY, ALREADY):
            raise ValueError(code)
        return code

    def cudaGetErrorString(self, code):
        return "out of memory"


class Stream:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_event(self, event):
        self.log.append((self.name, "waits for", event.after))

    def synchronize(self):
        self.log.append((self.name, "synchronize"))


class Event:
    def __init__(self, log, blocking):
        self.log, self.blocking = log, blocking

    def record(self, stream):
        self.after = stream.name
        self.log.append((stream.name, "record"))

    def synchronize(self):
        self.log.append(("host waits for", self.after))


@pytest.fixture
def fake(monkeypatch):
    log, current = [], []

    @contextlib.contextmanager
    def on(stream):
        current.append(stream.name)
        yield
        current.pop()

    runtime, work = Runtime(log), Stream(log, "work")

    def fill_(value):
        if runtime.stuck:
            runtime.stuck = False
            raise RuntimeError("CUDA error: out of memory")
        log.append("launched")

    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        current_device=lambda: 3,
        get_device_properties=lambda d: types.SimpleNamespace(is_integrated=False),
        cudart=lambda: runtime,
        device=lambda d: contextlib.nullcontext(),
        stream=on,
        Stream=lambda d: Stream(log, "copies"),
        Event=lambda blocking: Event(log, blocking),
        current_stream=lambda d: work,
        is_current_stream_capturing=lambda: False,
    )
    stand_in = types.SimpleNamespace(
        cuda=cuda,
        device=torch.device,
        uint8=torch.uint8,
        inference_mode=torch.inference_mode,
        version=types.SimpleNamespace(hip=None),
        empty=lambda *size, **options: types.SimpleNamespace(fill_=fill_),
    )
    monkeypatch.setattr(device, "torch", stand_in)
    return types.SimpleNamespace(log=log, runtime=runtime, cuda=cuda, torch=stand_in, current=current)


class Target:
    def __init__(self, fake):
        self.fake = fake

    def copy_(self, source, non_blocking):
        assert non_blocking
        self.fake.log.append(("copy on", *self.fake.current))


def test_events_and_copies_go_to_their_streams(fake):
    gpu, source = TorchDevice("cuda"), types.SimpleNamespace(is_pinned=lambda: False)
    assert str(gpu.device) == "cuda:3" and not gpu.shares_memory
    copies = gpu.stream()
    free = gpu.record(gpu.current())
    gpu.wait(copies, free)
    gpu.copy(Target(fake), source, copies)
    done = gpu.record(copies)
    gpu.wait(gpu.current(), done)
    gpu.finish(done)
    assert done.blocking  # or the thread that waits would spin
    assert fake.log == [
        ("work", "record"),
        ("copies", "waits for", "work"),
        ("copy on", "copies"),
        ("copies", "record"),
        ("work", "waits for", "copies"),
        ("host waits for", "copies"),
    ]
    del fake.log[:]
    fake.torch.version.hip = "7.0"
    gpu.copy(Target(fake), source, copies)
    assert fake.log == [("copy on", "copies"), ("copies", "synchronize")]


def test_a_capture_is_refused(fake):
    fake.cuda.is_current_stream_capturing = lambda: True
    with pytest.raises(StreamError, match="can't be captured as a whole"):
        TorchDevice("cuda").current()


def test_other_devices_are_refused():
    for name in ("cpu", "meta", "mps"):
        with pytest.raises(ValueError, match=f"device: expected a cuda device .* got {name}"):
            TorchDevice(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_stream_to_one_says_so(tmp_path):
    with Pack.open(write_pack(tmp_path / "pack", 3)) as pack:
        planned = plan(pack, device="cuda", budget=pack.nbytes - 1, host_budget=pack.nbytes)
        threads = threads_of()
        with pytest.raises(StreamError, match=r"expected a GPU to stream to, but torch .* sees none"):
            WeightStream(pack, planned)
        assert settled(threads_of, threads)


def test_memory_is_registered_in_segments_and_unregistered(fake):
    arena = Arena(TorchDevice("cuda:0"), 3 * 4096 - 5, segment=8192)
    base = arena.empty(1).data_ptr()
    assert fake.log == [("register", base, 8192, 1), ("register", base + 8192, 4096, 1)] and arena.locked == 3 * 4096
    arena.close()
    assert fake.log[2:] == [("unregister", base), ("unregister", base + 8192)]


def test_report_53_a_refused_segment_is_undone_and_its_error_cleared(fake):
    fake.runtime.codes = [0, 0, OUT_OF_MEMORY]
    with pytest.raises(PinError, match=r"4096 bytes of page-locked host memory can't be had: out of memory \(2\)"):
        Arena(TorchDevice("cuda:0"), 5 * 4096, segment=4096)
    (_, a, *_), (_, b, *_), _, *rest = fake.log
    assert rest == [("unregister", a), ("unregister", b), "launched"] and not fake.runtime.stuck
    fake.runtime.codes = [801]  # a code that torch may have no name for
    with pytest.raises(PinError, match=r"can't be had: error 801"):
        TorchDevice("cuda:0").register(4096, 4096)


def test_memory_that_somebody_else_registered_is_left_registered(fake):
    fake.runtime.codes = [0, ALREADY, 0]
    arena = Arena(TorchDevice("cuda:0"), 3 * 4096, segment=4096)
    assert arena.locked == 3 * 4096 and not fake.runtime.stuck and "launched" in fake.log
    base = arena.empty(1).data_ptr()
    arena.close()
    assert [entry for entry in fake.log if entry[0] == "unregister"] == [
        ("unregister", base),
        ("unregister", base + 8192),
    ]
