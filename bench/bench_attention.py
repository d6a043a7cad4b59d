"""Decode attention: int8, f16 and f32 caches against each other and against a plain read of the cache; caches cold.

    python bench/bench_attention.py [--json] [--isa avx2] [--pairs 15] [--keys 1024] [--rows 1]

The shape of one SmolLM2-135M layer (9 query heads, 3 kv heads of 64). Each timing works through a ring of caches larger
than the last-level cache, as a decode pass does, which reads all weights between two visits of a layer's cache. Both
sides of a ratio take turns; a ratio inside the A/A interval means nothing. `share` is the time of a plain read of the
same keys, values and scales over the time of the call.
"""

import argparse
import functools

import torch
from ab import aa, as_json, compare

import specdec_kernels as sk
from specdec_kernels import native

HEADS, KV_HEADS, DIM, PAGE = 9, 3, 64, 64
RING_BYTES = 64 << 20  # twice the last-level cache
DTYPES = {"int8": torch.int8, "f16": torch.float16, "f32": torch.float32}


class Ring:
    """Caches of ``keys`` tokens, as many as leave none of them in the processor's caches when its turn comes again."""

    def __init__(self, name, keys):
        dtype, shape = DTYPES[name], (-(-keys // PAGE), PAGE, KV_HEADS)
        tokens = shape[0] * PAGE
        one = self._cache(shape, dtype)
        self.parts = [t for t in one if t is not None]
        self.bytes = sum(t.nbytes for t in self.parts) * keys // tokens
        self.caches = [self._cache(shape, dtype) for _ in range(-(-RING_BYTES // self.bytes))]
        self.table = torch.arange(shape[0], dtype=torch.int32)[None]
        self.lengths = torch.tensor([keys], dtype=torch.int32)
        self.at = 0

    @staticmethod
    def _cache(shape, dtype):
        """Laid out as specloop's: a head's tokens of a page together."""
        pages, page, heads = shape
        by_token = lambda t: t.transpose(1, 2)
        if dtype is torch.int8:
            codes = lambda: by_token(torch.randint(-127, 128, (pages, heads, page, DIM), dtype=dtype))
            scales = lambda: by_token(torch.rand(pages, heads, page) * 0.02)
            return codes(), scales(), codes(), scales()
        values = lambda: by_token(torch.rand(pages, heads, page, DIM).sub_(0.5).to(dtype))
        return values(), None, values(), None

    def attend(self, q, out):
        def run():
            self.at = (self.at + 1) % len(self.caches)
            sk.attend_int8(q, *self.caches[self.at], self.table, self.lengths, out=out)

        return run

    def read(self):
        def run():
            self.at = (self.at + 1) % len(self.caches)
            for part in self.caches[self.at]:
                if part is not None:
                    native.cpu.read_bytes(part.data_ptr(), part.nbytes, native.threads())

        return run


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--isa", choices=native.ISA_NAMES)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--keys", type=int, nargs="*", default=[256, 1024, 4096, 8192])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 8])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.isa and not native.cpu.set_isa(options.isa):
        parser.error(f"--isa {options.isa}: this machine runs at most {native.cpu.machine_isa()}")

    def report(name, result, **extra):
        if options.json:
            print(as_json(name, result, isa=native.cpu.isa(), threads=native.threads(), **extra))
            return
        low, high = result.interval
        times = f"{result.a_seconds * 1e6:8.0f} {result.b_seconds * 1e6:8.0f} us"
        tail = "".join(f"  {key} {value:.2f}" for key, value in extra.items())
        print(f"{name:40s} {result.ratio:6.2f} [{low:.2f}, {high:.2f}] {times}{tail}")

    for keys in options.keys:
        rings = {name: Ring(name, keys) for name in DTYPES}
        repeat = max(1, 4096 // keys)
        time = functools.partial(compare, pairs=options.pairs, repeat=repeat)
        for rows in options.rows:
            if rows > keys:
                continue
            q, out = torch.randn(1, rows, HEADS, DIM), torch.empty(1, rows, HEADS, DIM)
            runs = {name: ring.attend(q, out) for name, ring in rings.items()}
            label = f"{keys} keys, {rows} rows"
            report(f"{label}: int8 A/A", aa(runs["int8"], pairs=options.pairs, repeat=repeat))
            for name in ("f32", "f16"):
                report(f"{label}: {name} / int8", time(runs[name], runs["int8"]))
            for name, ring in rings.items():
                read = time(ring.read(), runs[name])
                report(f"{label}: read / {name}", read, share=read.ratio, gbps=ring.bytes / read.b_seconds / 1e9)


if __name__ == "__main__":
    main()
