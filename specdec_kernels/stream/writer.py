"""Writes a pack block by block: memory for one weight at a time, nothing left behind unless it is complete.

The header comes first in the file but is known last. So room is left for it, and where that turns out too small, the
data is moved back in place. The file appears under its name when it is complete and on the disk, not before.
"""

import json
import zlib
from collections.abc import Mapping

from ..int8_weight import Int8Weight
from ..validate import tensor
from . import checks
from .blocks import ALIGNMENT, PART_ALIGNMENT, up
from .buffers import view_of
from .files import show
from .manifest import FORMAT, INT8_LAYOUT, PACK_VERSION
from .newfile import NewFile
from .safetensors import MAX_HEADER, TAGS

ROOM = 1 << 20  # for the header: enough for some 300 blocks of a dozen parts
PIECE = 16 << 20  # bytes per write, so that Ctrl-C is heard
_ZEROS = bytes(ALIGNMENT)
_SPACES = memoryview(b" " * (16 * ALIGNMENT))


def _is_text(name):
    """A string that a file can hold: without half of a surrogate pair."""
    try:
        return isinstance(name, str) and name.encode() is not None
    except UnicodeEncodeError:
        return False


class PackWriter:
    """A context manager: ``with PackWriter(path, config) as writer: writer.add_block(...)``.

    An existing file at ``path`` is replaced when all is written; after an exception it is as it was. Who has the old
    file open keeps reading the old one.

    config : anything that JSON can hold; ``Pack.config`` gives it back
    header_room : bytes that are kept for the header at first (it grows by itself)
    """

    def __init__(self, path, config=None, *, header_room=ROOM):
        try:
            self._config = json.dumps(config, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise type(error)(f"config: expected what JSON can hold: {error}") from None
        self._data = up(8 + checks.count("header_room", header_room) + 2 * len(json.dumps(self._config)), ALIGNMENT)
        self._tensors, self._blocks, self._order, self._matrices = {}, [], [], {}
        self._pads, self._size, self._crc, self._ok = 0, 0, 0, True
        self._file = NewFile(path)
        self.path = self._file.path

    def add_block(self, name, parts, *, in_order=True):
        """Writes a block and returns its index.

        parts : {name: Int8Weight or Tensor of any shape and dtype, on any device}
        in_order : whether every pass needs the block, after those that were added before; False for one that is only
            read by rows (an embedding that is not the head's matrix)
        """
        self._check_new(name, parts)
        self._ok = False  # until the block is complete
        start, described = self._size, []
        self._crc = 0
        for part, value in parts.items():
            described.append(self._part(f"{name}.{part}", part, value))
        self._pad(ALIGNMENT, self._size == start)
        nbytes = self._size - start
        block = {"name": name, "offset": start, "nbytes": nbytes, "crc32": self._crc, "parts": described}
        self._blocks.append(block)
        index = len(self._blocks) - 1
        if in_order:
            self._order.append(index)
        self._ok = True
        return index

    def matrix(self, name, parts):
        """Names a logical matrix: [(block name or index, part name), ...] from its first rows to its last."""
        if not _is_text(name):
            raise TypeError(f"name: expected a string, got {name!r}")
        numbers = {block["name"]: index for index, block in enumerate(self._blocks)}
        listed, columns = [], set()
        for block, part in checks.pairs("parts", parts, "pairs of a block and a part's name"):
            index = numbers.get(block) if isinstance(block, str) else block
            if not isinstance(index, int) or not 0 <= index < len(self._blocks):
                raise ValueError(f"parts: expected names or indexes of blocks that were added, got {block!r}")
            shape = {p["name"]: p["shape"] for p in self._blocks[index]["parts"]}.get(part)
            if shape is None or len(shape) != 2:
                raise ValueError(f"parts: expected a matrix of block {block!r}, got {part!r} of shape {shape}")
            columns.add(shape[1])
            listed.append([index, part])
        if len(columns) != 1:
            raise ValueError(f"parts: expected matrices with equally many columns, got {sorted(columns)}")
        self._matrices[name] = listed

    def _check_new(self, name, parts):
        if not self._ok:
            raise ValueError(f"{self.path}: an earlier block is incomplete; begin the file anew")
        if not _is_text(name) or any(block["name"] == name for block in self._blocks):
            raise ValueError(f"name: expected a string that no block before had, got {name!r}")
        if not isinstance(parts, Mapping):
            raise TypeError(f"parts: expected a dict of names and weights, got {type(parts).__name__}")
        if not parts:
            raise ValueError("parts: expected one or more, got none")
        for part, value in parts.items():
            if not _is_text(part):
                raise TypeError(f"parts: expected strings as names, got {part!r}")
            stored = self._names(f"{name}.{part}", value)
            taken = [tensor for tensor in stored if tensor in self._tensors]
            if taken or name.startswith("_pad"):
                raise ValueError(f"parts: the name {show(taken[0] if taken else name)} is taken")
            if not isinstance(value, Int8Weight):
                tensor(f"parts[{part!r}]", value, tuple(TAGS))

    @staticmethod
    def _names(name, value):
        return (f"{name}.codes", f"{name}.scale") if isinstance(value, Int8Weight) else (name,)

    def _part(self, name, part, value):
        stored = self._names(name, value)
        if not isinstance(value, Int8Weight):
            self._write(name, value)
            return {"name": part, "kind": "tensor", "shape": list(value.shape), "tensors": list(stored)}
        for tensor_name, piece in zip(stored, (value.codes, value.scale), strict=True):
            self._write(tensor_name, piece)
        return {
            "name": part,
            "kind": "int8",
            "shape": list(value.shape),
            "group_size": value.group_size,
            "rotated": value.rotated,
            "layout": INT8_LAYOUT,
            "tensors": list(stored),
        }

    def _write(self, name, value):
        self._pad(PART_ALIGNMENT)
        self._describe(name, TAGS[value.dtype], list(value.shape), value.nbytes)
        self._append(view_of(value.detach().cpu().contiguous()))

    def _pad(self, multiple, empty=False):
        """Zeros up to the next multiple, or a whole ``multiple`` of them for an ``empty`` block."""
        rest = multiple if empty else -self._size % multiple
        if rest:
            self._describe(f"_pad.{self._pads}", "U8", [rest], rest)
            self._pads += 1
            self._append(memoryview(_ZEROS)[:rest])

    def _describe(self, name, tag, shape, nbytes):
        self._tensors[name] = {"dtype": tag, "shape": shape, "data_offsets": [self._size, self._size + nbytes]}

    def _append(self, view):
        for at in range(0, len(view), PIECE):
            piece = view[at : at + PIECE]
            self._file.write(piece, self._data + self._size)
            self._crc = zlib.crc32(piece, self._crc)
            self._size += len(piece)

    def _header(self):
        blocks = [{**block, "offset": self._data + block["offset"]} for block in self._blocks]
        rest = json.dumps({"blocks": blocks, "order": self._order, "matrices": self._matrices})
        metadata = {"format": FORMAT, "version": PACK_VERSION, "pack": f'{{"config": {self._config}, {rest[1:]}'}
        return json.dumps({"__metadata__": metadata, **self._tensors}).encode()

    def close(self):
        """Completes the file and gives it its name."""
        if not self._ok:
            raise ValueError(f"{self.path}: a block is incomplete")
        header = self._header()
        while len(header) > self._data - 8:
            self._move(up(len(header) + 8 - self._data, ALIGNMENT))
            header = self._header()  # the blocks' offsets may have grown by a digit
        length = self._data - 8
        if length > MAX_HEADER:
            raise ValueError(f"{self.path}: the header needs {length} bytes, but at most {MAX_HEADER} are read")
        self._file.write(length.to_bytes(8, "little") + header, 0)
        for at in range(8 + len(header), self._data, len(_SPACES)):
            self._file.write(_SPACES[: self._data - at], at)
        self._file.commit()

    def _move(self, distance):
        """Makes more room for the header: the data moves back, from its end to its beginning."""
        for at in reversed(range(0, self._size, PIECE)):
            piece = self._file.read(min(PIECE, self._size - at), self._data + at)
            self._file.write(piece, self._data + distance + at)
        self._data += distance

    def abort(self):
        """Gives the file up; does nothing when it is complete."""
        self._file.abort()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            if kind is None:
                self.close()
        finally:
            self.abort()
