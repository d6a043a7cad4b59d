"""A plain safetensors model seen as blocks: each block gathers ranges of the files."""

from . import checks
from .blocks import ALIGNMENT, PART_ALIGNMENT, Block, Part, Piece, Range, up
from .errors import PackError
from .files import show
from .manifest import check_matrix
from .shards import Shards


def blocks_of_files(source, layout, order, matrices):
    """``(files, blocks, order, matrices)``; see ``Pack.from_safetensors``."""
    layout = checks.pairs("layout", layout, "pairs of a block's name and its parts")
    order = None if order is None else checks.items("order", order, "indexes of blocks")
    matrices = checks.pairs("matrices", matrices, "a dict of names and parts")
    with Shards(source) as shards:
        blocks = [_block(shards, index, *block) for index, block in enumerate(layout)]
        if len({block.name for block in blocks}) != len(blocks):
            raise ValueError("layout: expected blocks with different names")
        order = range(len(blocks)) if order is None else order
        for index in order:
            if not isinstance(index, int) or not 0 <= index < len(blocks):
                raise ValueError(f"order: expected indexes of {len(blocks)} blocks, got {index!r}")
        numbers = {block.name: block.index for block in blocks}
        given = {name: [(numbers.get(block, block), part) for block, part in parts] for name, parts in matrices}
        found = {name: check_matrix(blocks, name, parts) for name, parts in given.items()}
        return shards.keep(), blocks, order, found


def _block(shards, index, name, listed):
    parts, ranges, at = [], [], 0
    expected = f"block {show(name)} with pairs of a part's name and its tensors"
    for part, tensors in checks.pairs("layout", listed, expected):
        found = [_find(shards, tensor) for tensor in checks.items("layout", tensors, f"{expected}, a list of names")]
        shape, dtype = _stacked(part, [entry for _, entry in found])
        parts.append(Part(part, "tensor", shape, (Piece(at, dtype, shape),)))
        for file, entry in found:
            ranges.append(Range(file, entry.offset, entry.nbytes, at))
            at += entry.nbytes
        at = up(at, PART_ALIGNMENT)
    if not parts or len({part.name for part in parts}) != len(parts):
        names = show([part.name for part in parts])
        raise ValueError(f"layout: block {name!r}: expected one or more parts with different names, got {names}")
    return Block(index, name, up(at, ALIGNMENT), _merged(ranges), parts)


def _find(shards, name):
    if name not in shards.tensors:
        raise PackError(f"{shards.files[0].path}: the model has no tensor {show(name)}")
    return shards.tensors[name]


def _stacked(part, entries):
    """Shape and dtype of tensors one below the other."""
    if not entries:
        raise ValueError(f"layout: part {part!r}: expected one or more tensors, got none")
    first = entries[0]
    if len(entries) == 1:
        return first.shape, first.dtype
    for entry in entries:
        if entry.dtype != first.dtype or not entry.shape or entry.shape[1:] != first.shape[1:]:
            raise PackError(
                f"part {show(part)}: expected tensors that can be stacked, got {show(first.name)} "
                f"{list(first.shape)} {first.dtype} and {show(entry.name)} {list(entry.shape)} {entry.dtype}"
            )
    return (sum(entry.shape[0] for entry in entries), *first.shape[1:]), first.dtype


def _merged(ranges):
    """Ranges that go on where the one before them ends, in the file and in memory, are one read."""
    result = []
    for part in ranges:
        last = result[-1] if result else None
        if last and last.file == part.file:
            joined = last.offset + last.nbytes == part.offset and last.at + last.nbytes == part.at
            if joined:
                result[-1] = last._replace(nbytes=last.nbytes + part.nbytes)
                continue
        if part.nbytes:
            result.append(part)
    return result
