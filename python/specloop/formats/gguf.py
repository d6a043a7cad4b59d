"""Reads GGUF files, versions 2 and 3, little-endian.

A file is a header (magic, version, counts), metadata (key, type, value), tensor descriptions, and, from the next
multiple of the alignment on, the tensors' blocks. The header is parsed once with every length checked against the file
before anything is allocated by it; tensor data is never mapped, only read row by row on demand, so that opening a model
costs a few megabytes whatever its size.
"""

import os
import stat
import struct
from array import array
from typing import NamedTuple

import torch

from specdec_kernels import dequantize_ggml
from specdec_kernels.ggml import BLOCKS

from ..errors import FormatError, ModelError, show
from .strings import Strings

MAX_HEADER = 128 << 20  # bytes of metadata and tensor descriptions
MAX_VALUES = 1 << 22  # array elements in all of the metadata; the largest vocabularies need a third of it
MAX_ENTRIES = 1 << 17  # metadata entries, and tensors
MAX_NESTING = 4  # arrays of arrays
MAX_DIMS = 4
PIECE = 1 << 20  # bytes of blocks that read() holds at a time

_KINDS = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 8: "Q8_0", 12: "Q4_K", 14: "Q6_K", 30: "BF16"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}
_SMALLEST = {code: struct.calcsize(letter) for code, letter in _NUMBERS.items()} | {_STRING: 8, _ARRAY: 12}
_LENGTH = struct.Struct("<Q").unpack_from


class TensorInfo(NamedTuple):
    name: str
    shape: tuple  # row-major: (rows..., columns); a vector is one row
    kind: str  # one of specdec_kernels.ggml.BLOCKS
    offset: int  # of the first block, in bytes from the start of the file
    nbytes: int

    @property
    def columns(self):
        return self.shape[-1]

    @property
    def row_bytes(self):
        elements, size = BLOCKS[self.kind]
        return self.columns // elements * size

    @property
    def rows(self):
        return self.nbytes // self.row_bytes


class GGUF:
    """An open file. ``tensors`` maps names to :class:`TensorInfo`, ``metadata`` keys to Python values: arrays are
    lists, except that arrays of strings are :class:`Strings`.

    Use as a context manager. The read methods may be called from several threads.
    """

    @classmethod
    def open(cls, path):
        """Opens and checks the file; raises ModelError if it can't be read, FormatError if it is malformed."""
        path = os.fspath(path)
        try:
            # Not blocking, because a pipe without a writer would wait for ever before it could be refused.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
        try:
            return cls(path, fd)
        except BaseException:
            os.close(fd)
            raise

    def __init__(self, path, fd):
        self.path, self._fd = path, fd
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"{path}: not a regular file")
        header = _Header(path, fd, status.st_size)
        version, tensor_count, metadata_count = header.start()
        self.version = version
        self.metadata = header.metadata(metadata_count)
        self.tensors = header.tensors(tensor_count, self.metadata.get("general.alignment", 32))

    def close(self):
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def info(self, name):
        try:
            return self.tensors[name]
        except KeyError:
            raise FormatError(f"{self.path}: has no tensor {show(name)}") from None

    def read_blocks(self, name, start, stop):
        """Rows start..stop as they are in the file: uint8 [stop - start, row bytes]."""
        info = self.info(name)
        if not 0 <= start <= stop <= info.rows:
            raise ValueError(f"rows: expected 0 <= start <= stop <= {info.rows}, got {start}..{stop}")
        size = (stop - start) * info.row_bytes
        if size == 0:
            return torch.empty(0, info.row_bytes, dtype=torch.uint8)
        buffer = bytearray(size)
        view, done = memoryview(buffer), 0
        while done < size:
            n = os.preadv(self._fd, [view[done:]], info.offset + start * info.row_bytes + done)
            if n <= 0:
                raise FormatError(f"{self.path}: tensor {show(name)}: the file was cut while it was open")
            done += n
        return torch.frombuffer(buffer, dtype=torch.uint8).view(stop - start, info.row_bytes)

    def read_rows(self, name, start, stop, *, out=None):
        """Rows start..stop in f32 [stop - start, columns]; all leading dimensions of a tensor count as rows."""
        return dequantize_ggml(self.read_blocks(name, start, stop), self.info(name).kind, out=out)

    def read(self, name):
        """The whole tensor in f32 and in its own shape, read a piece at a time."""
        info = self.info(name)
        out = torch.empty(info.rows, info.columns)
        step = max(1, PIECE // info.row_bytes)
        for start in range(0, info.rows, step):
            stop = min(start + step, info.rows)
            self.read_rows(name, start, stop, out=out[start:stop])
        return out.view(info.shape)


class _Header:
    """A cursor over the head of the file. ``what`` names the part that is being read, for the messages."""

    def __init__(self, path, fd, size):
        self.path, self.fd, self.size = path, fd, size
        self.what = "header"
        self.data, self.at = bytearray(), 0
        self.values_left = MAX_VALUES

    def error(self, message):
        return FormatError(f"{self.path}: {self.what}: {message}")

    def need(self, n):
        """Makes the next n bytes available in ``data``."""
        end = self.at + n
        if end <= len(self.data):
            return
        if end > self.size:
            left = self.size - self.at
            raise self.error(f"truncated: needs {n} bytes at byte {self.at}, but only {left} are left in the file")
        if end > MAX_HEADER:
            raise self.error(f"needs {n} bytes at byte {self.at}; metadata beyond {MAX_HEADER} bytes is refused")
        goal = min(self.size, MAX_HEADER, max(end, 2 * len(self.data), 1 << 16))
        while len(self.data) < goal:
            piece = os.pread(self.fd, goal - len(self.data), len(self.data))
            if not piece:
                raise self.error("the file was cut while it was being read")
            self.data += piece

    def check_count(self, count, smallest, things, limit):
        """Refuses a count of things that could not fit into the rest of the file, or that is absurd."""
        if count * smallest > self.size - self.at:
            left = self.size - self.at
            raise self.error(f"{count} {things} can't fit into the {left} bytes that are left in the file")
        if count > limit:
            raise self.error(f"{count} {things} are more than the {limit} that this reader takes")

    def numbers(self, letter, count=1):
        form = f"<{count}{letter}"
        size = struct.calcsize(form)
        self.need(size)
        values = struct.unpack_from(form, self.data, self.at)
        self.at += size
        return values

    def text(self):
        self.need(8)
        (n,) = _LENGTH(self.data, self.at)
        self.at += 8
        self.need(n)
        start = self.at
        self.at += n
        try:
            return self.data[start : start + n].decode()
        except UnicodeDecodeError:
            raise self.error(f"the {n} bytes of text at byte {start} are not UTF-8") from None

    def strings(self, count):
        packed, ends = bytearray(), array("I")
        for _ in range(count):
            start = self.at + 8
            self.text()  # checks the length and the encoding
            packed += self.data[start : self.at]
            ends.append(len(packed))
        return Strings(bytes(packed), ends)

    def start(self):
        """(version, tensor count, metadata count)"""
        if self.size < 4:
            raise self.error(f"not a GGUF file: it has only {self.size} bytes")
        self.need(4)
        if self.data[:4] != b"GGUF":
            raise self.error(f"not a GGUF file: it starts with {bytes(self.data[:4])!r}")
        self.at = 4
        (version,) = self.numbers("I")
        if version not in (2, 3):
            if version and version & 0xFFFF == 0:
                raise self.error("big-endian; only little-endian files are supported")
            raise self.error(f"version {version} is not supported (2 and 3 are)")
        return version, *self.numbers("Q", 2)

    def metadata(self, count):
        self.check_count(count, 8 + 4 + 1, "metadata entries", MAX_ENTRIES)
        metadata = {}
        for index in range(count):
            self.what = f"metadata entry {index}"
            key = self.text()
            self.what = f"metadata {show(key)}"
            if key in metadata:
                raise self.error("this key occurs twice")
            metadata[key] = self.value(*self.numbers("I"), 0)
        return metadata

    def value(self, code, nesting):
        if code == _STRING:
            return self.text()
        if code == _ARRAY:
            return self.array(nesting + 1)
        if code not in _NUMBERS:
            raise self.error(f"unknown value type {code}")
        (value,) = self.numbers(_NUMBERS[code])
        return self.bools([value])[0] if code == _BOOL else value

    def array(self, nesting):
        if nesting > MAX_NESTING:
            raise self.error(f"arrays are nested more than {MAX_NESTING} deep")
        (code,) = self.numbers("I")
        (count,) = self.numbers("Q")
        if code not in _SMALLEST:
            raise self.error(f"unknown array element type {code}")
        self.check_count(count, _SMALLEST[code], "array elements", self.values_left)
        self.values_left -= count
        if code == _STRING:
            return self.strings(count)
        if code == _ARRAY:
            return [self.array(nesting + 1) for _ in range(count)]
        values = list(self.numbers(_NUMBERS[code], count))
        return self.bools(values) if code == _BOOL else values

    def bools(self, values):
        if any(value > 1 for value in values):
            raise self.error("a bool that is neither 0 nor 1")
        return [value == 1 for value in values]

    def tensors(self, count, alignment):
        self.what = "tensors"
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise self.error(f"general.alignment: expected a power of two, got {show(alignment)}")
        self.check_count(count, 8 + 4 + 8 + 4 + 8, "tensor descriptions", MAX_ENTRIES)
        tensors = {}
        for index in range(count):
            self.what = f"tensor {index}"
            info = self.tensor(alignment)
            if info.name in tensors:
                raise self.error("this name occurs twice")
            tensors[info.name] = info
        # Offsets count from the first aligned byte after the header, which is known only now.
        start = -(-self.at // alignment) * alignment
        for name, info in tensors.items():
            tensors[name] = info = info._replace(offset=start + info.offset)
            if info.offset + info.nbytes > self.size:
                self.what = f"tensor {show(name)}"
                end = info.offset + info.nbytes
                raise self.error(f"bytes {info.offset}..{end} are beyond the end of the file ({self.size} bytes)")
        return tensors

    def tensor(self, alignment):
        name = self.text()
        self.what = f"tensor {show(name)}"
        (n,) = self.numbers("I")
        if not 1 <= n <= MAX_DIMS:
            raise self.error(f"expected 1 to {MAX_DIMS} dimensions, got {n}")
        shape = self.numbers("Q", n)[::-1]  # the file has the contiguous dimension first
        (code,) = self.numbers("I")
        (offset,) = self.numbers("Q")
        if 0 in shape:
            raise self.error(f"shape {list(shape)}: a dimension is zero")
        if code not in _KINDS:
            raise self.error(f"type {code} is not supported (supported: {', '.join(_KINDS.values())})")
        kind = _KINDS[code]
        elements, size = BLOCKS[kind]
        if shape[-1] % elements:
            raise self.error(f"shape {list(shape)}: {kind} rows are multiples of {elements} elements")
        nbytes = size
        for extent in (*shape[:-1], shape[-1] // elements):
            nbytes *= extent
        if nbytes > self.size:
            raise self.error(f"shape {list(shape)} of {kind} is larger than the file ({self.size} bytes)")
        if offset % alignment:
            raise self.error(f"offset {offset} is not a multiple of the alignment {alignment}")
        return TensorInfo(name, shape, kind, offset, nbytes)
