"""Opens mutated safetensors files and packs. A script for test_fuzz_pack.py: ``fuzz_pack.py SEED COUNT FOLDER``.

A mutated file either opens, and then every block can be read, or found to be damaged, and every matrix gives rows, or
it raises PackError. Anything else ends the script with a traceback and the mutation's number, which replays it. Prints
one JSON object.
"""

import struct
import sys
from pathlib import Path

import torch

import mutations
import pack_bytes as pb
from specdec_kernels import pack_int8
from specdec_kernels.stream import Pack, PackError, StreamError

NUMBERS = (
    0,
    1,
    2,
    31,
    63,
    64,
    4095,
    4096,
    8192,
    12288,
    2**31,
    2**32,
    2**53,
    2**62,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
    -1,
    0.5,
)
TOKENS = (
    '"U8"',
    '"F32"',
    '"BF16"',
    '"F64"',
    "null",
    "true",
    "[]",
    "{}",
    '""',
    '"int8"',
    '"tensor"',
    "1e400",
    '"\\ud800"',
)


def seeds(weight):
    """(bytes, length of the header's text) of a pack with all kinds of parts, and of a plain file."""
    pack = pb.example(weight).bytes()
    plain = pb.file([("a", "F32", [3, 2]), ("b", "U8", [5]), ("empty", "I64", [0]), ("c", "BF16", [4])], {"k": "v"})
    return [(data, data.index(b"}", data.rindex(b"data_offsets"))) for data in (pack, pack, plain)]


def mutate(rng, data, end):
    """One to four changes, most of them in the header, whose length stays right if only values are replaced."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(8, max(9, min(end, len(data))))
        choice = rng.randrange(10)
        if choice == 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif choice == 1 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif choice == 2:
            data[:8] = struct.pack("<Q", rng.choice((0, 1, 8, end, len(data) - 8, len(data), 2**31, 2**63, 2**64 - 1)))
        elif choice == 3:
            del data[rng.randrange(len(data) + 1) :]
        elif choice == 4:
            source, length = rng.randrange(8, max(9, len(data))), rng.randrange(1, 64)
            data[at : at + length] = data[source : source + length]
        elif choice == 5 and len(data) > end:
            data[rng.randrange(end, len(data))] ^= 1 << rng.randrange(8)
        elif choice == 6:
            data += bytes(rng.choice((1, 64, 4096)))
        else:
            data = replace_value(rng, data, at, end)
        if len(data) < 9:
            break
    return bytes(data)


def replace_value(rng, data, at, end):
    """Puts another number or token in the place of the next one, and keeps what follows where it was."""
    digits = [i for i in range(at, min(end, len(data))) if chr(data[i]).isdigit()][:1]
    if not digits or rng.random() < 0.2:
        start = data.find(b":", at, end) + 1
        stop = min((i for i in (data.find(c, start, end) for c in b",}]") if i >= 0), default=start)
        new = rng.choice(TOKENS)
    else:
        (start,) = digits
        while start and chr(data[start - 1]).isdigit():
            start -= 1
        stop = start
        while stop < len(data) and chr(data[stop]).isdigit():
            stop += 1
        old = int(data[start:stop])
        new = str(rng.choice((*NUMBERS, old + 1, max(0, old - 1), old * 2, old + 4096, old + 64)))
    changed = data[:start] + new.encode() + data[stop:]
    grown = len(changed) - len(data)
    if grown and len(changed) > 8:  # the padding behind the header takes it up; a plain file has none
        length = struct.unpack_from("<Q", changed)[0]
        head = 8 + length
        if grown > 0 and changed[head : head + grown].isspace() and head + grown <= len(changed):
            del changed[head : head + grown]
        elif grown < 0 and head <= len(data) and data[head - 1 : head].isspace():
            changed[head + grown : head + grown] = b" " * -grown
        else:
            struct.pack_into("<Q", changed, 0, max(0, min(length + grown, 2**64 - 1)))
    return changed


def describe_wrongly(rng, weight):
    """A pack whose header or description, as values, has one to three other values somewhere."""
    made = pb.example(weight)
    for _ in range(rng.choice((1, 1, 2, 3))):
        target = rng.choice((made.manifest, made.manifest, made.manifest, made.header, made.metadata))
        for _ in range(8):
            keys = list(target) if isinstance(target, dict) else range(len(target))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(target[key], (dict, list)) and rng.random() < 0.9:
                target = target[key]
                continue
            target[key] = other_value(rng, target[key], made)
            break
    return made.bytes()


def other_value(rng, value, made):
    if isinstance(value, int) and rng.random() < 0.7:
        return rng.choice((*NUMBERS, value + 1, value - 1, 2 * value, value + 4096, value - 4096, value + 64))
    if isinstance(value, str) and rng.random() < 0.7:
        return rng.choice((*made.header, "U8", "F32", "BF16", "tensor", "int8", "w", "norm", "rows", value * 2))
    return rng.choice((None, True, [], {}, "", 1.5, [[]], [0], [value], {"x": value}, value))


def examine(path):
    """What became of the file: "opened", or the reason with all numbers and names taken out."""
    try:
        pack = Pack.open(path)
    except PackError as error:
        if "no pack, but a plain safetensors file" not in str(error):
            return reason(error)
        return examine_plain(path)
    with pack:
        damaged = 0
        for block in pack.blocks:
            assert block.nbytes <= pack.files[0].size and block.nbytes % 4096 == 0
            memory = torch.empty(block.nbytes, dtype=torch.uint8)
            try:
                pack.read_block(block.index, memory)
            except StreamError:
                damaged += 1
            for part in block.views(memory).values():
                part.dequantize() if hasattr(part, "dequantize") else part.clone()
        for name, parts in pack.matrices.items():
            rows = sum(pack.blocks[b].parts[p].shape[0] for b, p in parts)
            if rows:
                assert pack.rows(name, torch.tensor([0, rows - 1])).shape[0] == 2
        return f"opened with {damaged} damaged" if damaged else "opened"


def examine_plain(path):
    from specdec_kernels.stream.shards import Shards

    with Shards([path]) as shards:
        layout = [("all", [(name, [name]) for name in shards.tensors])] if shards.tensors else []
    with Pack.from_safetensors([path], layout) as pack:
        for block in pack.blocks:
            pack.read_block(block.index, torch.empty(block.nbytes, dtype=torch.uint8))
    return "opened as plain"


def reason(error):
    message = str(error)
    assert "\n" not in message and len(message) < 700, message
    words = message.partition(": ")[2].replace(":", " ").split()
    return " ".join(word for word in words if word.isalpha())[:60]


def main(seed, count, folder):
    path = Path(folder, "mutated.pack")
    torch.manual_seed(0)
    weight = pack_int8(torch.randn(35, 64), group_size=32, rotate=True)
    files = seeds(weight)
    for data, _ in files:
        path.write_bytes(data)
        assert examine(path).startswith("opened")
    either = lambda rng: describe_wrongly(rng, weight) if rng.random() < 0.5 else mutate(rng, *rng.choice(files))
    mutations.run(seed, count, path, either, examine)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
