"""Choosing a backend: names, nesting, threads, the environment, reasons."""

import threading
from types import SimpleNamespace

import pytest
import torch

import specdec_kernels as sk
from specdec_kernels import native, reference, registry

X = torch.ones(1, 8)


def serving(operation="quantize_int8"):
    return registry.candidates(operation, "cpu")[0][0]


def test_every_backend_says_whether_it_is_built_usable_and_why_not():
    status = sk.backends()
    assert list(status) == ["reference", "cpu", "triton", "cuda", "hip"]
    for name, facts in status.items():
        assert isinstance(facts["built"], bool) and isinstance(facts["usable"], bool), name
        assert facts["usable"] == (facts["reason"] is None) == bool(facts["operations"]), name
        assert facts["built"] or not facts["usable"], name
    assert status["reference"]["built"]
    assert status["cpu"]["built"] or native.cpu is None


def test_use_backend_nests_and_restores():
    before = serving()
    with sk.use_backend("reference"):
        assert serving() == "reference" == sk.forced_backend()
        if native.cpu is not None:
            with sk.use_backend("cpu"):
                assert serving() == "cpu"
        with pytest.raises(ZeroDivisionError), sk.use_backend("reference"):
            raise ZeroDivisionError
        assert serving() == "reference"
    assert serving() == before and sk.forced_backend() is None


def test_a_backend_without_fused_calls_makes_them_of_its_own(monkeypatch):
    asked = []
    single = SimpleNamespace()
    for name in ("rms_norm", "linear_int8"):
        monkeypatch.setattr(single, name, noting(asked, name), raising=False)
    monkeypatch.setitem(registry._modules, "triton", (single, None))
    monkeypatch.setattr(registry, "_chosen", {})
    weight, norm = sk.pack_int8(torch.randn(16, 8)), torch.ones(8)
    with sk.use_backend("triton"):
        y = sk.rms_norm_linear(X, norm, 1e-5, weight)
        with pytest.raises(sk.BackendUnavailable, match="triton: has no linear_f32"):
            sk.rms_norm_linear(X, norm, 1e-5, torch.ones(16, 8))
    assert asked == ["rms_norm", "linear_int8", "rms_norm"]
    with sk.use_backend("reference"):
        assert torch.equal(y, sk.rms_norm_linear(X, norm, 1e-5, weight))


def noting(asked, name):
    """The reference's operation; its name is added to ``asked``."""
    operation = getattr(reference, name)

    def run(*args):
        asked.append(name)
        operation(*args)

    return run


def test_use_backend_concerns_one_thread():
    seen = []
    with sk.use_backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(sk.forced_backend()))
        thread.start()
        thread.join()
    assert seen == [None]


@pytest.mark.parametrize("name", ["metal", "", None])
def test_unknown_names(name):
    with pytest.raises(sk.BackendUnavailable, match="name: expected one of reference, cpu"), sk.use_backend(name):
        pass


def test_the_environment_is_asked_in_every_call(monkeypatch):
    monkeypatch.delenv("SPECDEC_BACKEND", raising=False)
    monkeypatch.delenv("SPECDEC_BACKEND_QUANTIZE_INT8", raising=False)
    before = serving()
    monkeypatch.setenv("SPECDEC_BACKEND", "reference")
    assert serving() == serving("verify") == "reference"
    monkeypatch.setenv("SPECDEC_BACKEND", "")
    assert serving() == before
    monkeypatch.setenv("SPECDEC_BACKEND_QUANTIZE_INT8", "hopper")
    with pytest.raises(sk.BackendUnavailable, match=r"^SPECDEC_BACKEND_QUANTIZE_INT8: expected one of .*got 'hopper'"):
        sk.quantize_int8(X)
    sk.dequantize_int8(torch.zeros(1, 8, dtype=torch.int8), 1.0)  # the others are not concerned
    with sk.use_backend("reference"):
        sk.quantize_int8(X)  # the nearer wish wins
    monkeypatch.setenv("SPECDEC_BACKEND_QUANTIZE_INT8", "cuda")
    with pytest.raises(sk.BackendUnavailable, match="cuda: does not serve cpu tensors"):
        sk.quantize_int8(X)
    monkeypatch.delenv("SPECDEC_BACKEND_QUANTIZE_INT8")
    assert serving() == before
