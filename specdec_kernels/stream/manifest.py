"""The description of blocks that a pack carries in its metadata, read as strictly as the header.

``__metadata__`` holds "format": "specdec-pack", "version": "1" and "pack", a JSON text:

    {"config": anything,
     "blocks": [{"name", "offset", "nbytes", "crc32", "parts": [
         {"name", "kind": "tensor", "shape", "tensors": [name]}
         {"name", "kind": "int8", "shape": [n, k], "group_size", "rotated", "layout", "tensors": [codes, scale]}]}],
     "order": [block, ...], "matrices": {name: [[block, part], ...]}}

A block is a range of the file; its parts are tensors in that range. What no part names is padding.
"""

import json

import torch

from ..int8_weight import LAYOUT, VERSION, _shapes, check_group, check_rotation
from ..validate import FLOATS
from .blocks import ALIGNMENT, PART_ALIGNMENT, Block, Part, Piece, Range
from .errors import PackError
from .files import show
from .safetensors import is_count, unique

FORMAT, PACK_VERSION = "specdec-pack", "1"
INT8_LAYOUT = f"{LAYOUT}/{VERSION}"


def parse_manifest(entries, metadata, path, size):
    """``(config, blocks, order, matrices)`` of a pack of ``size`` bytes; PackError says what is wrong."""
    found = metadata.get("format")
    if found != FORMAT:
        raise PackError(f"{path}: no pack, but a plain safetensors file (format {show(found)}); convert it first")
    if metadata.get("version") != PACK_VERSION:
        raise PackError(f"{path}: pack version {PACK_VERSION} is read, got version {show(metadata.get('version'))}")
    try:
        pack = json.loads(metadata.get("pack", ""), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise PackError(f"{path}: the description of the blocks is no JSON: {str(error)[:200]}") from None
    try:
        return _Manifest(entries, size).pack(pack)
    except _Wrong as error:
        raise PackError(f"{path}: {error}") from None


class _Wrong(ValueError):
    pass


class _Manifest:
    def __init__(self, entries, size):
        self.entries, self.used, self.size = entries, set(), size
        self.begin = min((entry.offset for entry in entries.values()), default=size)

    def pack(self, value):
        keys = ("config", "blocks", "order", "matrices")
        config, listed, order, matrices = _fields("description", value, keys)
        blocks = []
        for index, fields in enumerate(_list("blocks", listed)):
            blocks.append(self.block(index, fields, blocks[-1] if blocks else None))
        if len({block.name for block in blocks}) != len(blocks):
            raise _Wrong("blocks: two have the same name")
        for index in _list("order", order):
            if not is_count(index) or index >= len(blocks):
                raise _Wrong(f"order: expected indexes of {len(blocks)} blocks, got {show(index)}")
        if not isinstance(matrices, dict):
            raise _Wrong(f"matrices: expected an object, got {show(matrices)}")
        matrices = {name: check_matrix(blocks, name, parts) for name, parts in matrices.items()}
        return config, tuple(blocks), tuple(order), matrices

    def block(self, index, value, before):
        keys = ("name", "offset", "nbytes", "crc32", "parts")
        name, offset, nbytes, crc32, parts = _fields(f"block {index}", value, keys)
        if not isinstance(name, str):
            raise _Wrong(f"block {index}: name: expected a string, got {show(name)}")
        what = f"block {show(name)}"
        if not all(is_count(n) and n > 0 and n % ALIGNMENT == 0 for n in (offset, nbytes)):
            got = f"{show(offset)} and {show(nbytes)}"
            raise _Wrong(f"{what}: expected multiples of {ALIGNMENT} above 0 as offset and nbytes, got {got}")
        if offset < self.begin or offset + nbytes > self.size:
            raise _Wrong(f"{what}: expected bytes {self.begin} to {self.size}, got {offset} to {offset + nbytes}")
        if before is not None and offset < before.ranges[0].offset + before.nbytes:
            raise _Wrong(f"{what}: overlaps the block before it")
        if not is_count(crc32) or crc32 >= 2**32:
            raise _Wrong(f"{what}: crc32: expected 32 bits, got {show(crc32)}")
        parts = [self.part(what, fields, offset, nbytes) for fields in _list(f"{what}: parts", parts)]
        if not parts or len({part.name for part in parts}) != len(parts):
            raise _Wrong(f"{what}: expected one or more parts with different names")
        return Block(index, name, nbytes, [Range(0, offset, nbytes, 0)], parts, crc32)

    def part(self, what, value, offset, nbytes):
        name, kind, shape, tensors = _fields(f"{what}: part", value, ("name", "kind", "shape", "tensors"))
        if not isinstance(name, str):
            raise _Wrong(f"{what}: part: name: expected a string, got {show(name)}")
        what = f"{what}, part {show(name)}"
        if kind not in ("tensor", "int8"):
            raise _Wrong(f"{what}: kind: expected tensor or int8, got {show(kind)}")
        count = 2 if kind == "int8" else 1
        if len(_list(f"{what}: tensors", tensors)) != count:
            raise _Wrong(f"{what}: expected {count} tensors, got {show(tensors)}")
        found = [self.entry(what, tensor, offset, nbytes) for tensor in tensors]
        pieces = tuple(Piece(entry.offset - offset, entry.dtype, entry.shape) for entry in found)
        shape = tuple(_list(f"{what}: shape", shape))
        if kind == "tensor":
            if shape != pieces[0].shape:
                raise _Wrong(f"{what}: shape: expected {list(pieces[0].shape)} as of its tensor, got {show(shape)}")
            return Part(name, kind, shape, pieces)
        group, rotated = _int8(what, value, shape, pieces)
        return Part(name, kind, shape, pieces, group, rotated)

    def entry(self, what, name, offset, nbytes):
        """The tensor of that name, which must lie in the block and belong to no other part."""
        entry = self.entries.get(name) if isinstance(name, str) else None
        if entry is None:
            raise _Wrong(f"{what}: the file has no tensor {show(name)}")
        if name in self.used:
            raise _Wrong(f"{what}: tensor {show(name)} belongs to another part")
        self.used.add(name)
        if not offset <= entry.offset <= entry.offset + entry.nbytes <= offset + nbytes:
            raise _Wrong(f"{what}: tensor {show(name)} lies outside of the block")
        if (entry.offset - offset) % PART_ALIGNMENT:
            raise _Wrong(f"{what}: tensor {show(name)}: expected a multiple of {PART_ALIGNMENT} from the block's start")
        return entry


def _int8(what, value, shape, pieces):
    """group_size and rotated of an int8 part whose two tensors have the right form."""
    group, rotated, layout = _fields(what, value, ("group_size", "rotated", "layout"))
    if layout != INT8_LAYOUT:
        raise _Wrong(f"{what}: layout: expected {INT8_LAYOUT}, got {show(layout)}")
    if len(shape) != 2 or not all(map(is_count, shape)) or not is_count(group):
        raise _Wrong(f"{what}: expected shape [n, k] and a group_size, got {show(shape)} and {show(group)}")
    try:
        check_group(shape[1], group)
        check_rotation(rotated, group)
    except (TypeError, ValueError) as error:
        raise _Wrong(f"{what}: {error}") from None
    forms = tuple(zip((torch.uint8, torch.float32), _shapes(*shape, group), strict=True))
    if forms != tuple((piece.dtype, piece.shape) for piece in pieces):
        raise _Wrong(f"{what}: codes and scale: expected {show(forms)}, got {show([piece[1:] for piece in pieces])}")
    return group, rotated


def check_matrix(blocks, name, parts):
    """The parts that, one below the other, make a logical matrix: ((block, part), ...), all with the same columns."""
    columns, result = set(), []
    for pair in _list(f"matrix {show(name)}", parts):
        block, part = pair if isinstance(pair, (list, tuple)) and len(pair) == 2 else (None, None)
        if not is_count(block) or block >= len(blocks) or not isinstance(part, str) or part not in blocks[block].parts:
            raise _Wrong(f"matrix {show(name)}: expected [block, part] of this pack, got {show(pair)}")
        shape, dtype = blocks[block].parts[part].shape, blocks[block].parts[part].dtype
        if len(shape) != 2 or dtype not in (torch.int8, *FLOATS) or not shape[1]:
            form = f"{list(shape)} of {dtype}"
            raise _Wrong(f"matrix {show(name)}: part {show(part)}: expected a matrix of int8 or floats, got {form}")
        columns.add(shape[1])
        result.append((block, part))
    if len(columns) != 1:
        raise _Wrong(f"matrix {show(name)}: expected parts with equally many columns, got {show(sorted(columns))}")
    return tuple(result)


def _fields(what, value, keys):
    if not isinstance(value, dict):
        raise _Wrong(f"{what}: expected an object, got {show(value)}")
    missing = [key for key in keys if key not in value]
    if missing:
        raise _Wrong(f"{what}: lacks {', '.join(missing)}")
    return [value[key] for key in keys]


def _list(what, value):
    if not isinstance(value, list):
        raise _Wrong(f"{what}: expected a list, got {show(value)}")
    return value
