"""linear_int8 against the memory it has to read, and against itself with more rows; caches cold.

    python bench/bench_linear.py [--json] [--isa avx2] [--pairs 15] [--only smol]

Every timing sweeps a set of weights much larger than the last-level cache: eight 4096 x 4096 matrices, or the linear
layers of a 135M llama (30 layers and the head). The plain read goes over the same bytes with the same threads, in turn
with the product. A ratio inside the A/A interval means nothing.
"""

import argparse
import json
import os
import statistics
import time

import torch
from ab import aa, as_json, compare

from specdec_kernels import linear_f32, linear_int8, native, pack_int8, record
from specdec_kernels.int8_weight import Int8Weight

LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))
SETS = {
    "4096": [(4096, 4096)] * 8,
    "smol": [shape for _ in range(30) for shape in LAYER] + [(49152, 576)],
}


class Sweep:
    """All products of one pass over a set of weights whose codes lie one after the other in memory."""

    def __init__(self, shapes, group_of):
        sizes = [n * k for n, k in shapes]  # no padding: n is a multiple of 16, groups are multiples of 4
        self.arena = torch.randint(0, 256, (sum(sizes),), dtype=torch.uint8)
        self.weights, at = [], 0
        for (n, k), size in zip(shapes, sizes, strict=True):
            empty = Int8Weight.empty(16, k, group_of(k))
            codes = self.arena[at : at + size].view(n // 16, *empty.codes.shape[1:])
            scale = torch.rand(n // 16, *empty.scale.shape[1:])
            self.weights.append(Int8Weight(n, k, empty.group_size, codes, scale))
            at += size

    def run(self, m):
        """A function that multiplies m rows by every weight, from quantised rows and into given outputs."""
        gen = torch.Generator().manual_seed(0)
        x = {}
        for w in self.weights:
            q = torch.randint(-127, 128, (m, w.k), dtype=torch.int8, generator=gen)
            x[w.k, w.groups] = (q, torch.rand(m, w.groups, generator=gen))
        calls = [(x[w.k, w.groups], w, torch.empty(m, w.n)) for w in self.weights]

        with record() as recording:  # as the decoder does: no checks in later passes
            for pair, weight, out in calls:
                linear_int8(pair, weight, out=out)
        return recording.run

    def read(self):
        address, size, threads = self.arena.data_ptr(), self.arena.numel(), native.threads()
        return lambda: native.cpu.read_bytes(address, size, threads)


def bench_sets(options, report):
    for name, shapes in SETS.items():
        for grouping, group_of in (("row", lambda k: None), ("group of 64", lambda k: 64)):
            if options.only and options.only not in f"{name} {grouping}":
                continue
            sweep = Sweep(shapes, group_of)
            one, read = sweep.run(1), sweep.read()
            gb = sweep.arena.numel() / 1e9
            noise = aa(one, pairs=options.pairs)
            report(f"{name} {grouping} A/A", noise)
            result = compare(one, read, pairs=options.pairs)
            share = 1 / result.ratio
            report(f"{name} {grouping} M=1 / plain read", result, share=share, read_gbps=gb / result.b_seconds)
            for m in (2, 4, 8, 9):
                report(f"{name} {grouping} M={m} / M=1", compare(sweep.run(m), one, pairs=options.pairs))


def bench_prefill(options, report):
    w = pack_int8(torch.randn(4096, 4096))
    q, s = torch.randint(-127, 128, (512, 4096), dtype=torch.int8), torch.rand(512, 1)
    out = torch.empty(512, 4096)
    result = aa(lambda: linear_int8((q, s), w, out=out), pairs=5)
    report("4096 row M=512 A/A", result, gmacs=512 * 4096 * 4096 / result.a_seconds / 1e9)


def bench_f32(options, report):
    weights = [torch.randn(4096, 4096) for _ in range(2)]
    read_threads = native.threads()

    def run(m):
        x, out = torch.randn(m, 4096), torch.empty(m, 4096)
        return lambda: [linear_f32(x, w, out=out) for w in weights]

    def read():
        for w in weights:
            native.cpu.read_bytes(w.data_ptr(), w.numel() * 4, read_threads)

    one = run(1)
    result = compare(one, read, pairs=options.pairs)
    report("f32 4096 M=1 / plain read", result, share=1 / result.ratio)
    for m in (4, 8):
        report(f"f32 4096 M={m} / M=1", compare(run(m), one, pairs=options.pairs))


def bench_overhead(options, report):
    w = pack_int8(torch.randn(16, 16))
    pair, out = (torch.ones(1, 16, dtype=torch.int8), torch.ones(1, 1)), torch.empty(1, 16)
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(5000):
            linear_int8(pair, w, out=out)
        seconds.append((time.perf_counter() - start) / 5000)
    median, least = statistics.median(seconds) * 1e6, min(seconds) * 1e6
    if options.json:
        print(json.dumps({"name": "call overhead with out=", "median_us": median, "min_us": least}))
    else:
        print(f"call overhead with out=: {median:.2f} us (min {least:.2f})")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--isa", default=None)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--only", default="", help="run only the parts whose name contains this")
    options = parser.parse_args()
    if options.isa and not native.cpu.set_isa(options.isa):
        parser.error(f"this machine can't run {options.isa}")
    if not options.json:
        print(f"# isa {native.cpu.isa()}, {native.threads()} threads, load {os.getloadavg()[0]:.1f}")

    def report(name, result, **extra):
        if options.json:
            print(as_json(name, result, isa=native.cpu.isa(), **extra), flush=True)
            return
        low, high = result.interval
        more = "".join(f"  {key} {value:.3g}" for key, value in extra.items())
        print(
            f"{name:34s} {result.ratio:.3f}x [{low:.3f}, {high:.3f}]  {result.a_seconds * 1e3:.3f} ms{more}", flush=True
        )

    bench_sets(options, report)
    for part in (bench_prefill, bench_f32):
        if not options.only or options.only in part.__name__:
            part(options, report)
    bench_overhead(options, report)


if __name__ == "__main__":
    main()
