"""One interface to repeat work: recordings on the CPU, graphs on a GPU (here a stand-in that notes what happens)."""

import contextlib

import pytest
import torch

import specdec_kernels as sk
from specdec_kernels import registry


def product():
    weight, x, out = sk.pack_int8(torch.randn(32, 64)), torch.randn(2, 64), torch.empty(2, 32)
    return x, out, lambda: sk.linear_int8(x, weight, out=out), lambda: sk.linear_int8(x, weight)


def test_on_the_cpu_it_is_a_recording():
    x, out, run, want = product()
    again = sk.capture(run, "cpu")
    assert torch.equal(out, want())
    x.mul_(-3)
    again()
    assert torch.equal(out, want())


def test_what_the_reference_served_is_not_captured():
    _, out, run, want = product()
    with sk.use_backend("reference"):
        assert sk.capture(run, "cpu") is None
        assert torch.equal(out, want())


def test_composed_operations_count_as_their_parts(monkeypatch):
    weight, x, norm, out = sk.pack_int8(torch.randn(32, 64)), torch.randn(2, 64), torch.ones(64), torch.empty(2, 32)
    monkeypatch.setenv("SPECDEC_BACKEND_RMS_NORM_LINEAR", "reference")
    again = sk.capture(lambda: sk.rms_norm_linear(x, norm, 1e-5, weight, out=out), "cpu")
    x.mul_(-3).add_(1)
    again()
    assert torch.equal(out, sk.linear_int8(sk.rms_norm(x, norm, 1e-5), weight))


@pytest.fixture
def fake_gpu(monkeypatch):
    """torch.cuda as a list of what happens; inside a graph nothing runs until it is replayed."""
    events = []

    class Stream:
        def __init__(self, device=None):
            pass

        def wait_stream(self, other):
            events.append("wait")

    class Graph:
        def replay(self):
            events.append("replay")

    @contextlib.contextmanager
    def noted(name):
        events.append(name)
        yield
        events.append(f"end of {name}")

    fakes = {
        "Stream": Stream,
        "current_stream": Stream,
        "CUDAGraph": Graph,
        "stream": lambda stream: noted("side stream"),
        "device": lambda device: contextlib.nullcontext(),
        "graph": lambda graph, capture_error_mode: noted(f"graph, {capture_error_mode}"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return events


def test_on_a_gpu_it_is_a_graph_after_one_run_aside(fake_gpu, monkeypatch):
    _, _, run, _ = product()
    served = registry.candidates("linear_int8", "cpu")[0][1]
    monkeypatch.setitem(registry._chosen, registry._key("linear_int8", "cpu"), (("cuda", served),))
    again = sk.capture(lambda: (fake_gpu.append("run"), run()), "cuda")
    aside = ["wait", "side stream", "run", "end of side stream", "wait"]
    assert fake_gpu == [*aside, "graph, thread_local", "run", "end of graph, thread_local"]
    again()
    assert fake_gpu[-1] == "replay"


def test_a_gpu_without_a_kernel_for_everything_runs_each_time(fake_gpu):
    _, _, run, _ = product()
    assert sk.capture(run, "cuda") is None  # the cpu backend served it, as the reference might
    assert not any("graph" in event for event in fake_gpu)
