"""The int8 operations against what else a PyTorch user has, and against the memory that they have to read; caches cold.

    python bench/bench_int8.py [--quick] [--json] [--pairs 31] [--threads 2] [--cpu-time] [--isa avx2]

Products: eight 4096 x 4096 matrices in turn, so that none is in a cache (134 MB); x in f32, quantised inside the call.
The rivals are FBGEMM (``torch.ops.quantized.linear_dynamic``: one scale per tensor and activations of 7 bits), the f32
``F.linear`` and ``torch._int_mm`` (codes in, int32 out). Then the linear layers of SmolLM2-135M as one pass of the
decoder, and ``quantize_int8``. Both sides of a ratio take turns; a ratio inside the A/A interval means nothing, and
"least" (shortest time over shortest time) is what a busy machine disturbs least.
"""

import argparse
import json
import os
import time
import warnings

import torch
from ab import aa, as_json, compare
from bench_quantize import COLS, ROWS, Ring, plain_quantize
from cold import SETS, Sweep, in_turn, read

from specdec_kernels import linear_int8, native

N = K = 4096
MATRICES = 8


def fbgemm_matrices():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantised tensors are deprecated
        w = torch.quantize_per_tensor(torch.randn(N, K), 0.03, 0, torch.qint8)
        return [torch.ops.quantized.linear_prepack(w, None) for _ in range(MATRICES)]


def bench_products(options, report):
    sweep = Sweep([(N, K)] * MATRICES, lambda k: options.group)
    reads = in_turn(lambda w: read(w.codes), sweep.weights)

    def ours(m, weights=sweep.weights):
        x, out = torch.randn(m, K), torch.empty(m, N)
        return in_turn(lambda w: linear_int8(x, w, out=out), weights)

    one = ours(1)
    report("A/A, M = 1", aa(one, **options.timing))
    result = compare(reads, one, **options.timing)
    gbps = N * K / result.a_seconds / 1e9
    report("M = 1: plain read / ours", result, "at least 0.88", read_gbps=gbps)
    packed = fbgemm_matrices()
    for m, target in ((1, "at least 1"), (2, ""), (4, ""), (8, "at least 0.91"), (16, "")):
        x = torch.randn(m, K)
        fbgemm = in_turn(lambda w: torch.ops.quantized.linear_dynamic(x, w, True), packed)  # noqa: B023
        result = compare(fbgemm, ours(m), **options.timing)
        report(f"M = {m}: FBGEMM / ours", result, target, gmacs=m * N * K / result.b_seconds / 1e9)
    del packed
    for m in (4, 8, 16):
        report(f"M = {m}: ours / ours at M = 1", compare(ours(m), one, **options.timing))
    floats, x = [torch.randn(N, K) for _ in range(2)], torch.randn(1, K)
    f32 = in_turn(lambda w: torch.nn.functional.linear(x, w), floats)
    report("M = 1: F.linear f32 / ours", compare(f32, one, **options.timing), "at least 4.2")
    del floats
    codes, q = [torch.randint(-127, 128, (N, K), dtype=torch.int8) for _ in range(MATRICES)], torch.ones(1, K).char()
    int_mm = in_turn(lambda w: torch._int_mm(q, w.t()), codes)
    report("M = 1: torch._int_mm / ours", compare(int_mm, one, **options.timing), "at least 8")


def bench_prologue(options, report):
    """What quantising and rotating x adds to a product from codes."""
    for group in (K, 64):
        sweep = Sweep([(N, K)] * 4, lambda k: group)  # noqa: B023
        codes, floats = sweep.run(1), sweep.run(1, floats=True)
        rotated = sweep.run(1, floats=True, rotated=True)
        report(f"groups of {group}: x float / codes", compare(floats, codes, **options.timing))
        report(f"groups of {group}: x rotated / codes", compare(rotated, codes, **options.timing))


def bench_smollm2(options, report):
    """A pass over the linear layers, x float, in groups of 64 and rotated as the decoder ships them."""
    sweep = Sweep(SETS["smol"], lambda k: 64)
    run = lambda m: sweep.run(m, floats=True, rotated=True)
    macs, one = sweep.arena.numel(), run(1)
    report("SmolLM2 linear layers A/A, 1 row", aa(one, **options.timing))
    result = compare(sweep.read(), one, **options.timing)
    report("SmolLM2 1 row: plain read / ours", result, gmacs=macs / result.b_seconds / 1e9)
    for m, target in ((4, "at most 1.2"), (8, "at most 1.5, or 85 GMAC/s"), (16, "")):
        result = compare(run(m), one, **options.timing)
        report(f"SmolLM2 {m} rows / 1 row", result, target, gmacs=m * macs / result.a_seconds / 1e9)


def bench_quantize(options, report):
    ring = Ring(torch.bfloat16)
    ours = ring.turn(ring.quantize)
    target = [torch.empty_like(x) for x in ring.x]
    copy = ring.turn(lambda i: target[i].copy_(ring.x[i]))
    result = compare(copy, ours, **options.timing)
    share = result.ratio * 3 / 4  # bytes moved per value: 2 + 1 here, 2 + 2 there
    report(f"quantize {ROWS}x{COLS} bf16: copy / ours", result, "share at least 0.65", share_of_copy_bandwidth=share)
    eager = lambda i: plain_quantize(ring.x[i])
    report("quantize, cold: eager / ours", compare(ring.turn(eager), ours, **options.timing), "at least 12")
    warm = compare(lambda: eager(0), lambda: ring.quantize(0), **options.timing, repeat=5)
    report("quantize, warm: eager / ours", warm)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="few pairs: a look, no measurement")
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--isa", choices=native.ISA_NAMES)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="one thread, timed by the time it had a core")
    parser.add_argument("--group", type=int, help="group size of the 4096 x 4096 matrices (default: a scale per row)")
    parser.add_argument("--only", default="", help="run only the parts whose name contains this")
    options = parser.parse_args()
    options.pairs = options.pairs or (5 if options.quick else 31)
    torch.set_num_threads(1 if options.cpu_time else options.threads)
    options.timing = {"pairs": options.pairs, "clock": time.thread_time if options.cpu_time else time.perf_counter}
    if options.isa and not native.cpu.set_isa(options.isa):
        parser.error(f"--isa {options.isa}: this machine runs at most {native.cpu.machine_isa()}")

    def report(name, result, target="", **extra):
        if options.json:
            more = {"target": target, **extra} if target else extra
            print(as_json(name, result, isa=native.cpu.isa(), threads=native.threads(), **more), flush=True)
            return
        low, high = result.interval
        times = f"{result.a_seconds * 1e3:8.3f} {result.b_seconds * 1e3:8.3f} ms"
        tail = "".join(f"  {key} {value:.3g}" for key, value in extra.items()) + (f"  ({target})" if target else "")
        print(
            f"{name:40s}{result.ratio:7.3f} [{low:.3f}, {high:.3f}] least {result.least:.3f} {times}{tail}", flush=True
        )

    about = {"isa": native.cpu.isa(), "threads": native.threads(), "load": os.getloadavg()[0], "pairs": options.pairs}
    print(json.dumps(about) if options.json else "# " + ", ".join(f"{key} {value}" for key, value in about.items()))
    for part in (bench_products, bench_prologue, bench_smollm2, bench_quantize):
        if options.only in part.__name__:
            part(options, report)


if __name__ == "__main__":
    main()
