"""Reads the header of a safetensors file, strictly.

A file is the length of the header (8 bytes, little-endian), the header (JSON: name -> dtype, shape, begin and end of
the data), and the data. What is accepted here has no two tensors over the same byte, no byte without a tensor, no size
that disagrees with shape and dtype, and no name twice; nothing is allocated by a number that was not compared with the
file's size first. The entries may come in any order.
"""

import json
import os
from typing import NamedTuple

import torch

from .errors import PackError
from .files import PackFile, show

MAX_HEADER = 100_000_000
MAX_DIMS = 64

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
# An older torch lacks the newest of them.
DTYPES = {tag: getattr(torch, name) for tag, name in _DTYPES.items() if hasattr(torch, name)}
TAGS = {dtype: tag for tag, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """A tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple
    offset: int  # of its first byte, from the start of the file
    nbytes: int


def read_header(fd, path):
    """``(entries by name, metadata)`` of the safetensors file open as ``fd``; ``path`` names it in messages.

    The metadata maps strings to strings. Raises PackError if anything is malformed; tensor data is not read.
    """
    with _Borrowed(fd, path) as file:
        return header_of(file)


def header_of(file):
    """``read_header`` of a :class:`PackFile`."""
    path, size = file.path, file.size
    if size < 8:
        raise PackError(f"{path}: truncated: a safetensors file has at least 8 bytes, got {size}")
    start = bytearray(8)
    file.read_into(start, 0)
    length = int.from_bytes(start, "little")
    if not 2 <= length <= min(MAX_HEADER, size - 8):
        reason = file.what_else()
        if reason is None:
            reason = f"a header of {length} bytes in a file of {size} bytes"
            reason = f"truncated: {reason}" if length <= MAX_HEADER and length > size - 8 else reason
        raise PackError(f"{path}: {reason}")
    text = bytearray(length)
    file.read_into(text, 8)
    fields = _parse(text, path)
    del text
    metadata = _metadata(fields.pop("__metadata__", None), path)
    data = 8 + length
    entries = {name: _entry(name, value, data, size, path) for name, value in fields.items()}
    _check_cover(entries, data, size, path)
    return entries, metadata


class _Borrowed(PackFile):
    """A file whose descriptor belongs to somebody else."""

    def __init__(self, fd, path):
        self.path, self.fd, self.size = path, fd, os.fstat(fd).st_size

    def close(self):
        self.fd = -1


def unique(pairs):
    """For json: an object in which no name appears twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen = set()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the name {show(name)} appears twice")
    return result


def no_constant(text):
    """For json: no NaN and no infinity."""
    raise ValueError(f"{text} is no JSON")


def _parse(text, path):
    """The header as a dict; every way in which it can be no JSON ends in PackError."""
    try:
        if text[:1] != b"{":
            raise ValueError("it must begin with '{'")
        text = text.rstrip(b" ").decode("utf-8")  # a pack's header is mostly padding
        fields = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
        for name in fields:
            name.encode()  # half of a surrogate pair can be written in JSON, but not printed
    except (ValueError, RecursionError) as error:
        reason = "it nests too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise PackError(f"{path}: the header is not valid: {reason}") from None
    return fields


def _metadata(value, path):
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise PackError(f"{path}: __metadata__: expected an object of strings, got {show(value)}")
    return dict(value)


def is_count(value):
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _entry(name, value, data, size, path):
    def refuse(what, expected, got):
        return PackError(f"{path}: tensor {show(name)}: {what}: expected {expected}, got {show(got)}")

    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise PackError(f"{path}: tensor {show(name)}: expected dtype, shape and data_offsets, got {show(value)}")
    tag, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(tag, str) or tag not in DTYPES:
        raise refuse("dtype", f"one of {', '.join(DTYPES)}", tag)
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(is_count, shape)):
        raise refuse("shape", f"at most {MAX_DIMS} sizes >= 0", shape)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_count, offsets)):
        raise refuse("data_offsets", "[begin, end]", offsets)
    begin, end = offsets
    if not begin <= end <= size - data:
        lost = end - (size - data)
        why = f"truncated: the data of the file ends {lost} bytes earlier" if lost > 0 else "begin > end"
        raise PackError(f"{path}: tensor {show(name)}: data_offsets {show(offsets)}: {why}")
    nbytes = elements(shape) * DTYPES[tag].itemsize
    if nbytes != end - begin:
        needs = f"{nbytes} bytes for shape {show(shape)} of {tag}"
        raise refuse("data_offsets", needs, offsets)
    return Entry(name, DTYPES[tag], tuple(shape), data + begin, nbytes)


def elements(shape):
    """How many elements a tensor has. An impossible product of sizes gives 2^63, which is no size of any tensor."""
    count, empty = 1, False
    for n in shape:
        empty |= n == 0
        count *= n or 1
        if count >= 2**63:
            return 2**63
    return 0 if empty else count


def _check_cover(entries, data, size, path):
    """Every byte of the data belongs to one tensor."""
    at, last = data, None
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset != at:
            what = "overlaps" if entry.offset < at else f"leaves a hole of {entry.offset - at} bytes behind"
            before = "the header" if last is None else f"tensor {show(last)}"
            raise PackError(f"{path}: tensor {show(entry.name)} {what} {before}")
        at, last = entry.offset + entry.nbytes, entry.name
    if at != size:
        raise PackError(f"{path}: {size - at} bytes at the end belong to no tensor")
