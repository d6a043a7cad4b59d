"""A pack of a tiny model, and the same with another description of it."""

import json

from specloop.convert import convert
from specloop.formats.gguf_checkpoint import GGUFCheckpoint
from test_loader import write


def tiny_pack(folder):
    with GGUFCheckpoint(str(write(folder / "tiny.gguf", tied=False))) as checkpoint:
        convert(checkpoint, folder / "tiny.pack")
    return folder / "tiny.pack"


def edited(pack, path, edit):
    """The same pack with another description, in a header of the same length."""
    data = pack.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    told = json.loads(header["__metadata__"]["pack"])
    edit(told)
    header["__metadata__"]["pack"] = json.dumps(told)
    path.write_bytes(data[:8] + json.dumps(header).encode().ljust(length) + data[8 + length :])
    return path


def model(**fields):
    return lambda told: told["config"]["model"].update(fields)
