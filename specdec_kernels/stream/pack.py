"""A pack: a model's weights in one safetensors file, in the order in which a pass needs them.

Every block starts at a multiple of 4096 bytes and fills whole pages, so that it can be read past the page cache and
straight into the memory where it is used; parts in it start on cache lines. What two matrices share is stored once.
The file is an ordinary safetensors file (manifest.py says what its metadata holds); PackWriter writes one.
"""

import threading
import zlib

import torch

from ..validate import tensor
from . import checks
from .buffers import view_of
from .errors import StreamError
from .files import PackFile
from .folder import blocks_of_files
from .manifest import parse_manifest
from .rows import Rows
from .safetensors import header_of


class Pack:
    """An open pack.

    config : what the writer put there
    blocks : tuple of Block
    order : the indexes of the blocks that one pass needs, in its order; other blocks are only read by rows
    matrices : name -> ((block index, part name), ...), from top to bottom
    files : tuple of PackFile; ranges of blocks name them by index
    nbytes : bytes of all blocks
    row_bytes : bytes that ``rows`` has read so far

    Use as a context manager. All methods may be called from several threads at once.
    """

    def __init__(self, files, config, blocks, order, matrices):
        self.files, self.config, self.blocks = tuple(files), config, tuple(blocks)
        self.order, self.matrices = tuple(order), matrices
        self.path = self.files[0].path
        self.nbytes = sum(block.nbytes for block in self.blocks)
        self.row_bytes, self._counting = 0, threading.Lock()
        self._rows = {}

    @classmethod
    def open(cls, source):
        """Opens and checks a pack: ``source`` is a path, a file descriptor (it is duplicated), or a Pack, which is
        returned as it is.

        The header is checked completely, the weights when they are read (``check_block``). Raises OSError where there
        is no such file, PackError where it is not a well-formed pack.
        """
        if isinstance(source, Pack):
            return source
        file = PackFile(checks.source("source", source))
        try:
            pack = cls([file], *parse_manifest(*header_of(file), file.path, file.size))
            file.check_unchanged()
            return pack
        except BaseException:
            file.close()
            raise

    @classmethod
    def from_safetensors(cls, source, layout, *, config=None, matrices=None, order=None):
        """A plain safetensors model as a pack, without a conversion and without checksums.

        source : a folder (its index is followed), or a list of files
        layout : [(block name, [(part name, [tensor name, ...])])]; the tensors of a part have the same dtype and the
            same columns and are stacked by rows. Values stay as they are stored.
        config, matrices, order : as of a pack; ``order`` is None for all blocks
        """
        files, blocks, order, matrices = blocks_of_files(source, layout, order, {} if matrices is None else matrices)
        return cls(files, config, blocks, order, matrices)

    def check_unchanged(self):
        """Raises StreamError if a file was written to since it was opened. Renaming or deleting it does no harm."""
        for file in self.files:
            file.check_unchanged()

    def check_block(self, index, memory):
        """Raises StreamError if the block that was read into ``memory`` (a CPU tensor or buffer) is damaged."""
        block = self._block(index)
        view = checks.memory(memory, block.nbytes, writable=False)
        if block.crc32 is None:
            return
        found = zlib.crc32(view[: block.nbytes])
        if found != block.crc32:
            raise StreamError(
                f"{self.path}: block {block.index} ({block.name}) is damaged: "
                f"expected crc32 {block.crc32:08x}, got {found:08x}"
            )

    def read_block(self, index, memory):
        """Reads a block through the page cache into ``memory`` and returns its views.

        memory : a uint8 CPU tensor or a writable buffer, at an address on 64 bytes: torch's memory is, that of a
            bytearray only by chance; ValueError before anything is read
        """
        block = self._block(index)
        view = checks.memory(memory, block.nbytes)
        views = block.views(memory if isinstance(memory, torch.Tensor) else torch.frombuffer(memory, dtype=torch.uint8))
        for part in block.ranges:
            self.files[part.file].read_into(view[part.at : part.at + part.nbytes], part.offset)
        self.check_block(index, memory)
        return views

    def read_vector(self, index, name):
        """A plain part of a block, of one dimension: read from the file into memory of its own, without a checksum."""
        block = self._block(index)
        part = block.parts.get(checks.text("name", name))
        if part is None or part.kind != "tensor" or len(part.shape) != 1:
            raise ValueError(f"name: expected that of a vector of block {block.name}, got {name!r}")
        (piece,) = part.pieces
        values = torch.empty(piece.shape, dtype=piece.dtype)
        self._read(block, piece.at, view_of(values))
        return values

    def rows(self, matrix, ids, out=None):
        """Rows of a logical matrix in f32, read from the file: the bits that ``Int8Weight.rows`` gives.

        matrix : a name in ``matrices``
        ids : int64 [r]; out : f32 [r, k] on any device, or None
        """
        rows = self._rows.get(checks.text("matrix", matrix))
        if rows is None:
            rows = self._rows[matrix] = Rows(matrix, self._parts(matrix), self._read)
        if out is None:
            out = torch.empty(len(tensor("ids", ids, (torch.int64,), ndim=1)), rows.shape[1])
        count = rows.write(ids, out)
        with self._counting:
            self.row_bytes += count
        return out

    def _block(self, index):
        return self.blocks[checks.index("index", index, len(self.blocks))]

    def _parts(self, matrix):
        if matrix not in self.matrices:
            known = ", ".join(self.matrices) or "none"
            raise ValueError(f"matrix: expected one of this pack's ({known}), got {matrix!r}")
        return [(self.blocks[index], self.blocks[index].parts[part]) for index, part in self.matrices[matrix]]

    def _read(self, block, at, view):
        """Fills ``view`` from the block's byte ``at`` on; it may cross from one range into the next."""
        done = 0
        for part in block.ranges:
            start = at + done - part.at
            if 0 <= start < part.nbytes and done < len(view):
                count = min(len(view) - done, part.nbytes - start)
                self.files[part.file].read_into(view[done : done + count], part.offset + start)
                done += count
        assert done == len(view)

    def close(self):
        self._rows.clear()  # each has a method of this pack
        for file in self.files:
            file.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __repr__(self):
        return f"Pack({self.path!r}, {len(self.blocks)} blocks, {self.nbytes} bytes)"
