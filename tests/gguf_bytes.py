"""Builds GGUF files byte by byte, also wrong ones."""

import struct


def text(value):
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def entry(key, code, value):
    """One metadata entry; ``value`` is its bytes."""
    return text(key) + struct.pack("<I", code) + value


def u32(value):
    return struct.pack("<I", value)


def u64(value):
    return struct.pack("<Q", value)


def strings(*values):
    return u32(8) + u64(len(values)) + b"".join(text(v) for v in values)


def tensor(name, dims, code, offset):
    """``dims`` in the file's order: contiguous first."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, code, offset)


def file(entries=(), tensors=(), data=b"", *, magic=b"GGUF", version=3, alignment=32, counts=None):
    counts = counts or (len(tensors), len(entries))
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(entries) + b"".join(tensors)
    return head + b"\0" * (-len(head) % alignment) + data


def example():
    """A small valid file with every value type and every tensor kind."""
    entries = [
        entry("general.architecture", 8, text("llama")),
        entry("general.alignment", 4, u32(32)),
        entry("a.u8", 0, b"\xff"),
        entry("a.i8", 1, b"\xff"),
        entry("a.u16", 2, b"\xfe\xff"),
        entry("a.i16", 3, b"\xfe\xff"),
        entry("a.i32", 5, struct.pack("<i", -7)),
        entry("a.f32", 6, struct.pack("<f", 0.5)),
        entry("a.bool", 7, b"\x01"),
        entry("a.u64", 10, u64(2**63)),
        entry("a.i64", 11, struct.pack("<q", -(2**62))),
        entry("a.f64", 12, struct.pack("<d", -0.25)),
        entry("a.strings", 9, strings("one", "", "três")),
        entry("a.bools", 9, u32(7) + u64(3) + b"\1\0\1"),
        entry("a.numbers", 9, u32(5) + u64(3) + struct.pack("<3i", 1, -2, 3)),
        entry("a.nested", 9, u32(9) + u64(2) + strings("x") + u32(0) + u64(2) + b"\7\10"),
        entry("a.empty", 9, u32(6) + u64(0)),
    ]
    # kind code -> (elements, bytes) of a block
    kinds = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 8: (32, 34), 12: (256, 144), 14: (256, 210), 30: (1, 2)}
    tensors, data = [], b""
    for code, (elements, size) in kinds.items():
        dims = [elements * (3 if elements == 1 else 1), 2]
        tensors.append(tensor(f"t{code}", dims, code, len(data)))
        nbytes = dims[0] * dims[1] // elements * size
        data += bytes((i * 37 + code) & 0x3F for i in range(nbytes))
        data += b"\0" * (-len(data) % 32)
    return file(entries, tensors, data)
