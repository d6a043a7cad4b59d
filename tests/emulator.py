"""Builds the GPU module for the CPU emulator (tests/emu) with g++, and configures it."""

import contextlib
import ctypes
import functools
import importlib.util
import sys
import sysconfig
from pathlib import Path

import pytest

from specdec_kernels import gpu, registry

ROOT = Path(__file__).resolve().parent.parent
EMU = ROOT / "tests" / "emu"
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-w", "-DSK_EMULATOR", f"-I{EMU}"]
FLAGS += ["-U_FORTIFY_SOURCE"]  # which takes a jump between fibers for an error
ORDERS = {"forward": 0, "reverse": 1, "random": 2}


@functools.cache
def setup_native():
    """The build's own tools: compilers, and steps that run only when something changed."""
    spec = importlib.util.spec_from_file_location("setup_native", ROOT / "setup_native.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(name, sources, flags=()):
    """Compiles ``sources`` into one shared library in build/emu; skips the test where there is no C++ compiler."""
    tools = setup_native()
    try:
        cxx = tools.find_cxx()
    except tools.CantBuild as reason:
        pytest.skip(f"the emulator needs a C++ compiler: {reason}")
    folder = ROOT / "build" / "emu"
    steps = []
    for source in sources:
        result = folder / f"{name}_{source.stem}.o"
        line = [*cxx, *FLAGS, *flags, *tools.INCLUDE, "-MMD", "-MF", f"{result}.d"]
        steps.append((result, [source], [*line, "-c", "-x", "c++", str(source), "-o", str(result)]))
    library = folder / (name + sysconfig.get_config_var("EXT_SUFFIX"))
    objects = [result for result, _, _ in steps]
    steps.append((library, objects, [*cxx, "-shared", *map(str, objects), "-o", str(library)]))
    tools.make(steps, folder)
    return library


@functools.cache
def selftest():
    library = ctypes.CDLL(str(build("_selftest", [EMU / "selftest.cpp", EMU / "configure.cpp"])))
    library.simt_selftest.restype = ctypes.c_char_p
    return library


@functools.cache
def compiled():
    """The GPU module itself, binding and launchers included, with the emulator in place of the GPU."""
    import pybind11

    csrc = ROOT / "csrc"
    sources = [*sorted(csrc.glob("bind/gpu*.cpp")), *sorted(csrc.glob("gpu/*.cu")), EMU / "configure.cpp"]
    python = ["-isystem", pybind11.get_include(), "-isystem", sysconfig.get_paths()["include"]]
    path = build("_C_emu", sources, [*python, "-DSK_MODULE=_C_emu", '-DSK_ARCHS="emulator"'])
    spec = importlib.util.spec_from_file_location("_C_emu", path)
    module = sys.modules["_C_emu"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def configure(library, wave, order, seed=1):
    """``library``: what ctypes.CDLL made of a library that build() made."""
    library.simt_configure(wave, ORDERS[order], seed)


def operations():
    """The operations of the emulated module, for tensors of the CPU in the backends' own form."""
    return gpu.operations(compiled(), lambda tensor: (0, 0))


@contextlib.contextmanager
def serving(wave, order, chunks=-1, seed=1):
    """The public functions run CPU tensors on the emulated GPU module; ``chunks``: specdec_kernels/gpu/verify.py."""
    configure(ctypes.CDLL(compiled().__file__), wave, order, seed)
    with serve(operations(), chunks):
        yield


@contextlib.contextmanager
def serve(served, chunks=-1):
    """The public functions run CPU tensors on these operations of a GPU module."""
    keys = [registry._key(name, "cpu") for name in served]
    before, plan = [registry._chosen.get(key) for key in keys], gpu.verify.CHUNKS
    try:
        gpu.verify.CHUNKS = chunks
        registry._chosen.update((key, (("emulator", f),)) for key, f in zip(keys, served.values(), strict=True))
        yield
    finally:
        gpu.verify.CHUNKS = plan
        for key, chosen in zip(keys, before, strict=True):
            if chosen is None:
                registry._chosen.pop(key, None)
            else:
                registry._chosen[key] = chosen
