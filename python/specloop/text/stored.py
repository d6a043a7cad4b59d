"""A tokenizer and a chat template as they lie in a pack: a block of their own, in which long lists stay compact.

The block's part "told" is JSON. A list of strings in it is stored as two parts, the UTF-8 of all and where each ends,
a list of small integers as one: as JSON a vocabulary would take tens of MB for a moment when it is read. A folder's
tokenizer.json is a part as it is.
"""

import json
import mmap
from array import array

import torch

from ..errors import FormatError
from ..formats.strings import Strings
from .folder_tokenizer import FolderTokenizer
from .tokenizer import Tokenizer

BLOCK = "text"


def stored(checkpoint):
    """{part name: uint8 or int tensor}: what :func:`restored` reads."""
    told = checkpoint.text_data() | {"chat_template": checkpoint.chat_template}
    parts = {}
    if told["kind"] == "huggingface":
        parts["tokenizer"] = _bytes(told.pop("tokenizer").encode())
    metadata = told.get("metadata", {})
    for key, value in list(metadata.items()):
        if isinstance(value, Strings):
            metadata[key] = {"strings": key}
            parts[f"{key}/text"], parts[f"{key}/ends"] = (
                _bytes(value.packed),
                torch.tensor(value.ends, dtype=torch.int64),
            )
        elif isinstance(value, list):
            metadata[key] = {"numbers": key}
            parts[f"{key}/numbers"] = torch.tensor(value, dtype=torch.int64)
    return {"told": _bytes(json.dumps(told).encode()), **parts}


def restored(pack, path):
    """(tokenizer, chat template or None) of an open pack."""
    block = next((block for block in pack.blocks if block.name == BLOCK), None)
    if block is None or "told" not in block.parts:
        raise FormatError(f"{path}: no tokenizer in it")
    memory = mmap.mmap(-1, block.nbytes)  # on a page, as a block wants it
    pack.read_block(block.index, memory)

    def read(name):
        (piece,) = block.parts[name].pieces
        return memory[piece.at : piece.at + piece.nbytes]

    def whole(value):
        if not isinstance(value, dict):
            return value
        if "strings" in value:
            return Strings(read(f"{value['strings']}/text"), array("q", read(f"{value['strings']}/ends")))
        return array("q", read(f"{value['numbers']}/numbers")).tolist()

    try:
        told = json.loads(read("told"))
        template, kind = told["chat_template"], told["kind"]
        if kind == "huggingface":
            told["tokenizer"] = read("tokenizer").decode()
            return FolderTokenizer.from_data(told), template
        if kind != "gguf":
            raise FormatError(f"{path}: a tokenizer of the unknown kind {kind!r}")
        metadata = {key: whole(value) for key, value in told["metadata"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path}: the tokenizer's data are malformed: {error!r}") from None
    return Tokenizer.from_gguf(metadata), template


def _bytes(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
