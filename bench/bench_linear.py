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
from cold import SETS, Sweep

from specdec_kernels import linear_f32, linear_int8, native, pack_int8


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
            for m in (2, 4, 8, 9, 12, 16):
                report(f"{name} {grouping} M={m} / M=1", compare(sweep.run(m), one, pairs=options.pairs))


def bench_prefill(options, report):
    w = pack_int8(torch.randn(4096, 4096))
    q, s = torch.randint(-127, 128, (512, 4096), dtype=torch.int8), torch.rand(512, 1)
    out = torch.empty(512, 4096)
    result = aa(lambda: linear_int8((q, s), w, out=out), pairs=5)
    report("4096 row M=512 A/A", result, gmacs=512 * 4096 * 4096 / result.a_seconds / 1e9)


def bench_f32(options, report):
    weights = [torch.randn(4096, 4096) for _ in range(2)]
    halves = [w.bfloat16() for w in weights]
    read_threads = native.threads()

    def run(m, weights=weights):
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
    for m in (1, 5, 9):
        report(f"bf16 / f32 4096 M={m}", compare(run(m, halves), run(m), pairs=options.pairs))


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
