"""Where the time of a decoder pass goes: in compiled code or in Python, and which call takes how long for its bytes.

    python bench/bench_pass.py [--rows 1 5] [--past N] [--kv int8|f16|f32] [--shared] [--rounds N] [--quick] [--json]

A pass of SmolLM2-135M (int8) over a few rows behind ``--past`` tokens, made by ``Llama.forward``; the same without its
compiled calls, in turn with it: that is Python's share. Then every call by itself, with the bytes of weights, keys and
values that it reads, and their rate in percent of a plain read with as many threads. ``--shared``: passes for several
requests, and for trees of drafts, against the passes of as many rows that one request makes, in turn.
"""

import argparse
import functools
import json
import statistics
import time
from collections import defaultdict

import torch

from specdec_kernels import native
from specloop.models.base import Part
from specloop.pair import load


def seconds(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def read_bandwidth(size=256 << 20):
    """Bytes per second of a plain read from memory."""
    data = torch.zeros(size, dtype=torch.uint8)
    read = lambda: native.cpu.read_bytes(data.data_ptr(), size, torch.get_num_threads())
    return size / min(seconds(read) for _ in range(5))


def bytes_read(model, cache, length):
    """Per call of a pass, in order: what it reads besides activations."""
    kv = cache.pool.page_nbytes / len(model.weights.layers) * length / 64
    per_layer = [(layer.qkv.nbytes, kv, layer.attention_out.nbytes, layer.gate_up.nbytes + layer.down.nbytes)
                 for layer in model.weights.layers]  # fmt: skip
    return [size for layer in per_layer for size in layer] + [model.weights.head.nbytes]


def measure(model, rows, past, rounds):
    cache = model.new_cache(past + rows)
    ids = list(range(100, 100 + past + rows))
    model.forward(ids[:past], cache, last=0)
    for _ in range(3):
        model.forward(ids[past:], cache, last=rows)
        cache.truncate(past)
    passes, key = next(reversed(model._shapes.values())).passes, ("all", True)
    program = passes[key].__self__.program
    whole, python, calls = [], [], []
    for _ in range(rounds):
        for run, times in ((passes[key], whole), (lambda: None, python)):
            kept, passes[key] = passes[key], run
            times.append(seconds(lambda: model.forward(ids[past:], cache, last=rows)))
            passes[key] = kept
            cache.truncate(past)
        calls.append(program.time(torch.get_num_threads()))
    table = defaultdict(lambda: [0, 0.0, 0])
    for i, size in enumerate(bytes_read(model, cache, past + rows)):
        name = calls[0][i][0] if i < len(calls[0]) - 1 else "head"
        line = table[name]
        line[0], line[2] = line[0] + 1, line[2] + size
        line[1] += statistics.median(call[i][1] for call in calls)
    pass_s, python_s = statistics.median(whole), statistics.median(python)
    return {
        "rows": rows,
        "calls": len(program),
        "pass_ms": pass_s * 1e3,
        "least_pass_ms": min(whole) * 1e3,
        "python_ms": python_s * 1e3,
        "python_percent": 100 * python_s / pass_s,
        "table": [
            {"call": name, "count": n, "us_each": s / n * 1e6, "mb": size / 1e6, "gb_per_s": size / s / 1e9}
            for name, (n, s, size) in table.items()
        ],
    }


REQUESTS = {
    "2 requests": [1, 1],
    "4 requests": [1] * 4,
    "8 requests": [1] * 8,
    "4 requests of 5": [5] * 4,
    "1 + 2 + 5 + 9": [1, 2, 5, 9],
}
TREES = {
    "tree of 2 paths": [-1, 0, 0, 1],
    "tree of 4 paths": [-1, -1, 0, 0, 1, 2, 2, 6],
    "tree of 8 paths": [-1] * 8,
}


def shared(model, past, rounds):
    """Seconds of passes for several requests and of trees, and of one request's with as many rows: medians, in turn."""
    ids = list(range(100, 100 + past))
    caches = [model.new_cache(past + 32) for _ in range(8)]
    for cache in caches:
        model.forward(ids, cache, last=0)

    def forward(*parts):
        model.forward_parts([Part(cache, [7] * n, n, tree) for cache, (n, tree) in zip(caches, parts, strict=False)])
        for cache in caches:
            cache.truncate(past)

    ways = {name: [(n, None) for n in rows] for name, rows in REQUESTS.items()}
    ways |= {name: [(1 + len(parents), parents)] for name, parents in TREES.items()}
    for name, parts in ways.items():
        runs = functools.partial(forward, *parts), functools.partial(forward, (sum(n for n, _ in parts), None))
        for run in (*runs, *runs):
            run()  # captured the second time
        times = [[seconds(run) for run in runs] for _ in range(rounds)]
        several, one = (statistics.median(t) * 1e3 for t in zip(*times, strict=True))
        yield {"way": name, "rows": sum(n for n, _ in parts), "ms": several, "one_request_ms": one}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--past", type=int, default=256, help="tokens in the cache")
    parser.add_argument("--kv", default="int8")
    parser.add_argument("--shared", action="store_true", help="also passes for several requests and trees")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="9 rounds")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if native.cpu is None:
        raise SystemExit(f"no compiled calls to measure: {native.cpu_reason}")
    model = load("smollm2", draft="none", kv=options.kv).model
    plain = read_bandwidth() / 1e9
    report = {"name": "pass", "threads": torch.get_num_threads(), "kv": options.kv, "past": options.past}
    report["read_gb_per_s"] = plain
    rounds = 9 if options.quick else options.rounds
    report["passes"] = [measure(model, rows, options.past, rounds) for rows in options.rows]
    report["shared"] = list(shared(model, options.past, rounds)) if options.shared else []
    if options.json:
        print(json.dumps(report))
        return
    print(f"{report['threads']} threads, plain read {plain:.1f} GB/s, {options.past} tokens before, kv {options.kv}")
    for p in report["passes"]:
        print(
            f"\n{p['rows']} row(s): {p['pass_ms']:.2f} ms (least {p['least_pass_ms']:.2f}), {p['calls']} calls; "
            f"Python {p['python_ms']:.2f} ms: {p['python_percent']:.1f} %"
        )
        for line in p["table"]:
            print(
                f"  {line['call']:<16} {line['count']:>3} x {line['us_each']:7.1f} us  {line['mb']:7.1f} MB  "
                f"{line['gb_per_s']:5.1f} GB/s  {100 * line['gb_per_s'] / plain:4.0f} % of a read"
            )
    if report["shared"]:
        print("\nin one pass: ms, beside one request with as many rows")
    for p in report["shared"]:
        ratio = p["ms"] / p["one_request_ms"]
        print(f"  {p['way']:<16} {p['rows']:>3} rows {p['ms']:7.2f} {p['one_request_ms']:7.2f}  {ratio:.2f}")


if __name__ == "__main__":
    main()
