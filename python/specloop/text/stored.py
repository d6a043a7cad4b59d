"""A tokenizer and a chat template as they lie in a pack: plain JSON in a block of its own."""

import json
import mmap

import torch

from ..errors import FormatError
from .tokenizer import Tokenizer

BLOCK, PART = "text", "data"


def stored(checkpoint):
    """What :func:`restored` reads, as a uint8 tensor."""
    told = checkpoint.text_data() | {"chat_template": checkpoint.chat_template}
    return torch.frombuffer(bytearray(json.dumps(told, ensure_ascii=False).encode()), dtype=torch.uint8)


def restored(pack, path):
    """(tokenizer, chat template or None) of an open pack."""
    block = next((block for block in pack.blocks if block.name == BLOCK), None)
    if block is None or PART not in block.parts:
        raise FormatError(f"{path}: no tokenizer in it")
    memory = mmap.mmap(-1, block.nbytes)  # on a page, as a block wants it
    pack.read_block(block.index, memory)
    (piece,) = block.parts[PART].pieces
    try:
        told = json.loads(memory[piece.at : piece.at + piece.nbytes])
    except ValueError as error:
        raise FormatError(f"{path}: the tokenizer is not JSON: {error}") from None
    if not isinstance(told, dict) or not isinstance(told.get("chat_template"), str | None):
        raise FormatError(f"{path}: the tokenizer's data are not a pack's")
    if told.get("kind") == "gguf" and isinstance(told.get("metadata"), dict):
        return Tokenizer.from_gguf(told["metadata"]), told["chat_template"]
    raise FormatError(f"{path}: a tokenizer of the unknown kind {told.get('kind')!r}")
