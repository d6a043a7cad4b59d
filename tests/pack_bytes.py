"""Safetensors and pack files built byte by byte, so that tests of the reader do not trust the writer.

``raw`` puts a header in front of data. ``entries`` describes tensors that lie one after the other; a test changes the
description, or the data, and writes what comes of it. ``pack`` makes a small valid pack of given blocks.
"""

import json
import struct
import zlib

import torch

PAGE = 4096

# The tags of the format, the torch dtype of each, and the bytes of an element.
TAGS = {
    "BOOL": (torch.bool, 1),
    "U8": (torch.uint8, 1),
    "I8": (torch.int8, 1),
    "U16": (torch.uint16, 2),
    "I16": (torch.int16, 2),
    "U32": (torch.uint32, 4),
    "I32": (torch.int32, 4),
    "U64": (torch.uint64, 8),
    "I64": (torch.int64, 8),
    "F8_E4M3": (torch.float8_e4m3fn, 1),
    "F8_E5M2": (torch.float8_e5m2, 1),
    "F16": (torch.float16, 2),
    "BF16": (torch.bfloat16, 2),
    "F32": (torch.float32, 4),
    "F64": (torch.float64, 8),
    "C64": (torch.complex64, 8),
}


def raw(header, data=b"", length=None):
    """A file: the header (anything for json, or bytes as they are), its length (or another number), the data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(tag, shape, begin, end):
    return {"dtype": tag, "shape": list(shape), "data_offsets": [begin, end]}


def size(tag, shape):
    count = 1
    for n in shape:
        count *= n
    return count * TAGS[tag][1]


def entries(tensors):
    """``{name: entry}`` of tensors [(name, tag, shape)] that lie one after the other, and how many bytes they take."""
    result, at = {}, 0
    for name, tag, shape in tensors:
        end = at + size(tag, shape)
        result[name] = entry(tag, shape, at, end)
        at = end
    return result, at


def pattern(n, start=0):
    """n bytes among which line ends and end-of-file marks of text modes are common."""
    return bytes((0x1A, 0x0D, 0x0A, 0x00, 0xFF, i * 7 & 255)[i % 6] for i in range(start, start + n))


def file(tensors, metadata=None):
    """A valid file of tensors [(name, tag, shape)] filled with ``pattern``."""
    header, total = entries(tensors)
    if metadata is not None:
        header = {"__metadata__": metadata, **header}
    return raw(header, pattern(total))


def up(n, multiple):
    return -(-n // multiple) * multiple


class PackBytes:
    """A pack by hand: ``blocks`` = [(name, [part])], part = (name, tag, shape, data) or an Int8Weight's
    (name, weight). Change ``header`` (the file's) or ``manifest`` before ``bytes()``."""

    def __init__(self, blocks, config=None, matrices=None, room=3 * PAGE):
        self.room, self.header, self.data, listed = room, {}, bytearray(), []
        for name, parts in blocks:
            start, described = len(self.data), []
            for part in parts:
                described.append(self._part(name, *part))
            self._pad(PAGE)
            crc = zlib.crc32(self.data[start:])
            sizes = {"offset": room + start, "nbytes": len(self.data) - start, "crc32": crc}
            listed.append({"name": name, **sizes, "parts": described})
        self.manifest = {"config": config, "blocks": listed, "order": list(range(len(listed)))}
        self.manifest["matrices"] = matrices or {}
        self.metadata = {"format": "specdec-pack", "version": "1"}

    def _add(self, name, tag, shape, data):
        self._pad(64)
        self.header[name] = entry(tag, shape, len(self.data), len(self.data) + len(data))
        self.data += data
        return name

    def _pad(self, multiple):
        rest = -len(self.data) % multiple
        if rest:
            name = f"_pad.{sum(name.startswith('_pad') for name in self.header)}"
            self.header[name] = entry("U8", [rest], len(self.data), len(self.data) + rest)
            self.data += bytes(rest)

    def _part(self, block, name, *rest):
        if len(rest) == 3:
            return {
                "name": name,
                "kind": "tensor",
                "shape": list(rest[1]),
                "tensors": [self._add(f"{block}.{name}", *rest)],
            }
        (w,) = rest
        codes, scale = w.codes.numpy().tobytes(), w.scale.numpy().tobytes()
        tensors = [self._add(f"{block}.{name}.codes", "U8", w.codes.shape, codes)]
        tensors.append(self._add(f"{block}.{name}.scale", "F32", w.scale.shape, scale))
        form = {"group_size": w.group_size, "rotated": w.rotated, "layout": "i8-panel16x4/2"}
        return {"name": name, "kind": "int8", "shape": list(w.shape), **form, "tensors": tensors}

    def bytes(self):
        text = json.dumps({"__metadata__": {**self.metadata, "pack": json.dumps(self.manifest)}, **self.header})
        text = text.encode()
        assert len(text) + 8 <= self.room, len(text)
        return raw(text.ljust(self.room - 8), bytes(self.data))


def example(weight):
    """A pack of two blocks and an embedding outside of the order, with an int8 matrix in the first one."""
    vector = ("norm", "F32", [5], struct.pack("<5f", 1, 2, 3, 4, 5))
    made = PackBytes(
        [
            ("layer0", [("w", weight), vector]),
            ("layer1", [("table", "I32", [3, 4], pattern(48)), ("flag", "BOOL", [], b"\1")]),
            ("embedding", [("rows", "BF16", [9, 6], pattern(108))]),
        ],
        config={"model": "example"},
        matrices={"embedding": [[2, "rows"]], "w": [[0, "w"]]},
    )
    made.manifest["order"] = [0, 1]
    return made
