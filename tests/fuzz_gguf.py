"""Opens mutated GGUF files. A script for test_fuzz_gguf.py: ``fuzz_gguf.py SEED COUNT FOLDER``, prints one JSON object.

A mutated file either opens, and then every tensor can be read and the tokenizer built or refused, or it raises
FormatError. Anything else ends the script with a traceback and the mutation's number, which replays it.
"""

import struct
import sys
from pathlib import Path

import gguf_bytes as gb
import mutations
from specloop.errors import FormatError, ModelError
from specloop.formats.gguf import GGUF
from specloop.text.tokenizer import Tokenizer

EXTREMES = (
    0,
    1,
    2,
    31,
    32,
    2**15,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**40,
    2**61,
    2**63 - 1,
    2**63,
    2**64 - 1,
)


def seeds():
    """The files that are mutated, each with the size of its header: every type and kind; a tokenizer; one tensor."""
    with_tokenizer = gb.file(
        [
            gb.entry("tokenizer.ggml.model", 8, gb.text("gpt2")),
            gb.entry("tokenizer.ggml.pre", 8, gb.text("smollm")),
            gb.entry("tokenizer.ggml.tokens", 9, gb.strings("a", "b", "ab", "<s>", "Ġ")),
            gb.entry("tokenizer.ggml.token_type", 9, gb.u32(5) + gb.u64(5) + struct.pack("<5i", 1, 1, 1, 3, 1)),
            gb.entry("tokenizer.ggml.merges", 9, gb.strings("a b")),
            gb.entry("tokenizer.ggml.eos_token_id", 4, gb.u32(3)),
        ],
        [gb.tensor("t", [64, 3], 2, 0)],
        bytes(108),
    )
    small = gb.file([], [gb.tensor("t", [32], 8, 0)], bytes(range(34)))
    return [(gb.example(), 1400), (with_tokenizer, 420), (small, 64)]


def fields(data, header):
    """Where 8 or 4 bytes of the header read like a length, a count, a dimension, or a type."""
    wide = [i for i in range(header - 8) if struct.unpack_from("<Q", data, i)[0] <= len(data)]
    return wide, [i for i in range(header - 4) if struct.unpack_from("<I", data, i)[0] <= 32]


def mutate(rng, data, header, wide, narrow):
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        header = min(header, len(data))
        at = rng.randrange(max(1, header))
        choice = rng.randrange(8)
        if choice == 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif choice == 1 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif choice == 2:
            at = rng.choice(wide)
            data[at : at + 8] = struct.pack(
                "<Q", rng.choice((*EXTREMES, len(data), len(data) - 1, rng.randrange(2**64)))
            )
        elif choice == 3:
            at = rng.choice(narrow)
            data[at : at + 4] = struct.pack("<I", rng.choice((*range(16), 30, 31, 2**31, 2**32 - 1)))
        elif choice == 4:
            del data[rng.randrange(len(data) + 1) :]
        elif choice == 5:
            end = at + rng.randrange(40)
            data[at:end] = data[at:end] * 2 if rng.random() < 0.5 else b""
        elif choice == 6:
            source, length = rng.randrange(max(1, len(data))), rng.randrange(1, 64)
            data[at : at + length] = data[source : source + length]
        else:
            data[at : at + 8] = rng.randbytes(8)
        if not data:
            break
    return bytes(data)


def examine(path):
    """What became of the file: "opened", or the reason with all numbers and names taken out."""
    try:
        with GGUF.open(path) as g:
            for name, info in g.tensors.items():
                tensor = g.read(name)
                assert tensor.shape == info.shape
            if "tokenizer.ggml.model" in g.metadata:
                try:
                    tokenizer = Tokenizer.from_gguf(g.metadata)
                    tokenizer.decode(tokenizer.encode("ab <s> é"))
                except ModelError as error:
                    return reason(error)
        return "opened"
    except FormatError as error:
        return reason(error)


def reason(error):
    message = str(error)
    assert "\n" not in message and len(message) < 600, message
    words = message.split(": ")[-1].split()
    return " ".join(word for word in words if word.isalpha())[:60]


def main(seed, count, folder):
    path = Path(folder, "mutated.gguf")
    files = [(data, header, *fields(data, header)) for data, header in seeds()]
    for data, *_ in files:
        path.write_bytes(data)
        assert examine(path) == "opened"
    mutations.run(seed, count, path, lambda rng: mutate(rng, *rng.choice(files)), examine)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
