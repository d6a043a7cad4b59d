"""The quantise family against eager torch and against the memory it has to move; caches cold but where it says warm.

    python bench/bench_quantize.py [--json] [--isa avx2] [--pairs 15] [--only quantize]

Each timing works through a ring of buffers larger than the last-level cache, into outputs that exist already. Both
sides of a ratio take turns. GB/s counts what has to be read and written once; share_of_read is against a plain read of
the same size, share_of_copy against torch's copy of x in the same run. A ratio inside the A/A interval means nothing.
"""

import argparse
import statistics
import time

import torch
from ab import aa, as_json, compare

import specdec_kernels as sk
from specdec_kernels import native

ROWS, COLS, RING = 512, 4096, 12
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


# Eager torch: the formula as it reads, and with care (no f32 copy of x, steps in place); the same codes.


def plain_quantize(x):
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.clamp(torch.round(x / scale), -127, 127).to(torch.int8), scale


def eager_quantize(x):
    scale = x.abs().amax(-1, keepdim=True).float().div_(127)
    return (x / scale).round_().clamp_(-127, 127).to(torch.int8), scale


def eager_dequantize(q, scale, dtype):
    return (q * scale).to(dtype)


def eager_rms_norm(x, weight, residual):
    x = x + residual
    inverse = torch.rsqrt(x.float().pow_(2).mean(-1, keepdim=True).add_(1e-5))
    return eager_quantize((x * inverse).to(x.dtype) * weight)


def eager_layer_norm(x, weight, residual):
    x = x + residual
    return eager_quantize(torch.nn.functional.layer_norm(x, x.shape[-1:], weight, None, 1e-5))


def eager_gelu_mul(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return eager_quantize(torch.nn.functional.gelu(gate) * up)


def eager_silu_mul(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return eager_quantize(torch.nn.functional.silu(gate) * up)


class Ring:
    """The same shapes many times over, so that none of them is in a cache when its turn comes."""

    def __init__(self, dtype, rows=ROWS, cols=COLS, count=RING):
        make = lambda *shape: torch.randn(shape).to(dtype)
        self.at, self.count, self.dtype = 0, count, dtype
        self.x = [make(rows, cols) for _ in range(count)]
        self.residual = [make(rows, cols) for _ in range(count)]
        self.gate_up = [make(rows, 2 * cols) for _ in range(count)]
        self.weight = make(cols)
        self.copy = [make(rows, cols) for _ in range(count)]
        self.q = [torch.empty(rows, cols, dtype=torch.int8) for _ in range(count)]
        self.scale = [torch.empty(rows, 1) for _ in range(count)]
        self.read_size = rows * cols * make(1).element_size()

    def turn(self, call):
        def run():
            self.at = (self.at + 1) % self.count
            call(self.at)

        return run

    def read(self, i):
        native.cpu.read_bytes(self.x[i].data_ptr(), self.read_size, native.threads())

    def quantize(self, i, **options):
        sk.quantize_int8(self.x[i], out=(self.q[i], self.scale[i]), **options)

    def rms_norm(self, i):
        out, stream = (self.q[i], self.scale[i]), self.residual[i]
        sk.rms_norm_quantize_int8(self.x[i], self.weight, 1e-5, residual=stream, residual_out=stream, out=out)

    def layer_norm(self, i):
        out, stream = (self.q[i], self.scale[i]), self.residual[i]
        sk.layer_norm_quantize_int8(self.x[i], self.weight, 1e-5, residual=stream, residual_out=stream, out=out)

    def silu_mul(self, i):
        sk.silu_mul_quantize_int8(self.gate_up[i], out=(self.q[i], self.scale[i]))

    def gelu_mul(self, i):
        sk.gelu_mul_quantize_int8(self.gate_up[i], out=(self.q[i], self.scale[i]))

    def copied(self, i):
        self.copy[i].copy_(self.x[i])


def bench_dtype(name, options, report):
    ring = Ring(DTYPES[name])
    values, bytes_of = ROWS * COLS, ring.x[0].element_size()
    ours = ring.turn(ring.quantize)
    report(f"{name} A/A", aa(ours, pairs=options.pairs))
    read = compare(ours, ring.turn(ring.read), pairs=options.pairs)
    bandwidth = ring.read_size / read.b_seconds

    def against(what, a, b, bytes_per_value):
        if options.only and options.only not in what:
            return
        result = compare(ring.turn(b), ring.turn(a), pairs=options.pairs)
        rate = values * bytes_per_value / result.b_seconds
        report(f"{name} {what}", result, gbps=rate / 1e9, share_of_read=rate / bandwidth)

    def of_copy(what, a, b, **how):
        if options.only and options.only not in what:
            return
        result = compare(b, a, pairs=options.pairs, **how)
        share = result.ratio * (bytes_of + 1) / (2 * bytes_of)
        report(f"{name} {what}", result, share_of_copy=share)

    of_copy("quantize: copy / ours", ring.turn(ring.quantize), ring.turn(ring.copied))
    of_copy("quantize warm: copy / ours", lambda: ring.quantize(0), lambda: ring.copied(0), repeat=10)
    against("quantize: plain eager / ours", ring.quantize, lambda i: plain_quantize(ring.x[i]), bytes_of + 1)
    warm = compare(lambda: plain_quantize(ring.x[0]), lambda: ring.quantize(0), pairs=options.pairs, repeat=10)
    if not options.only or options.only in "quantize warm":
        report(f"{name} quantize warm: plain eager / ours", warm, gbps=values * (bytes_of + 1) / warm.b_seconds / 1e9)
    against("quantize: eager / ours", ring.quantize, lambda i: eager_quantize(ring.x[i]), bytes_of + 1)
    sums = sk.quantize_int8(ring.x[0], return_sums=True)[2]
    with_sums = lambda i: sk.quantize_int8(ring.x[i], return_sums=True, out=(ring.q[i], ring.scale[i], sums))
    against("quantize: with sums / ours", ring.quantize, with_sums, bytes_of + 1)
    stochastic = lambda i: ring.quantize(i, stochastic_seed=1)
    against("quantize: stochastic / ours", ring.quantize, stochastic, bytes_of + 1)
    back = lambda i: sk.dequantize_int8(ring.q[i], ring.scale[i], dtype=ring.dtype)
    eager_back = lambda i: eager_dequantize(ring.q[i], ring.scale[i], ring.dtype)
    against("dequantize: eager / ours", back, eager_back, bytes_of + 1)
    eager_norm = lambda i: eager_rms_norm(ring.x[i], ring.weight, ring.residual[i])
    against("rms_norm: eager / ours", ring.rms_norm, eager_norm, 3 * bytes_of + 1)
    eager_layer = lambda i: eager_layer_norm(ring.x[i], ring.weight, ring.residual[i])
    against("layer_norm: eager / ours", ring.layer_norm, eager_layer, 3 * bytes_of + 1)
    eager_silu = lambda i: eager_silu_mul(ring.gate_up[i])
    against("silu_mul: eager / ours", ring.silu_mul, eager_silu, 2 * bytes_of + 1)
    eager_gelu = lambda i: eager_gelu_mul(ring.gate_up[i])
    against("gelu_mul: eager / ours", ring.gelu_mul, eager_gelu, 2 * bytes_of + 1)


def bench_overhead(options):
    """Microseconds per call on 1 x 64; short windows, because a busy machine takes the core away in long ones."""
    x, weight, stream, gate_up = torch.randn(1, 64), torch.ones(64), torch.randn(1, 64), torch.randn(1, 128)
    out = sk.quantize_int8(x)
    calls = {
        "quantize_int8 out=": lambda: sk.quantize_int8(x, out=out),
        "quantize_int8": lambda: sk.quantize_int8(x),
        "rms_norm_quantize_int8 out=": lambda: sk.rms_norm_quantize_int8(
            x, weight, 1e-5, residual=stream, residual_out=stream, out=out
        ),
        "silu_mul_quantize_int8 out=": lambda: sk.silu_mul_quantize_int8(gate_up, out=out),
    }
    for name, call in calls.items():
        times = []
        for _ in range(400):
            start = time.perf_counter()
            for _ in range(50):
                call()
            times.append((time.perf_counter() - start) / 50 * 1e6)
        yield f"overhead {name}", min(times), statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--isa", choices=native.ISA_NAMES)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.isa and not native.cpu.set_isa(options.isa):
        parser.error(f"--isa {options.isa}: this machine runs at most {native.cpu.machine_isa()}")

    def report(name, result, **extra):
        if options.json:
            print(as_json(name, result, isa=native.cpu.isa(), threads=native.threads(), **extra))
            return
        low, high = result.interval
        times = f"{result.a_seconds * 1e3:8.3f} {result.b_seconds * 1e3:8.3f} ms"
        tail = "".join(f"  {key} {value:.2f}" for key, value in extra.items())
        print(f"{name:36s} {result.ratio:7.2f} [{low:.2f}, {high:.2f}] least {result.least:.2f} {times}{tail}")

    for name in options.dtype or DTYPES:
        bench_dtype(name, options, report)
    for name, best, median in bench_overhead(options):
        print(
            f'{{"name": "{name}", "min_us": {best:.2f}, "median_us": {median:.2f}}}'
            if options.json
            else f"{name:36s} {median:7.2f} us (min {best:.2f})"
        )


if __name__ == "__main__":
    main()
