"""A pass over streamed weights against the longer of what it has to do: read its bytes, and compute.

python bench/bench_stream.py [--json] [--mb 96] [--blocks 24] [--budget 0.5] [--slots 3] [--rounds 9] [--limit 500MB]
                             [--engine auto] [--folder /tmp]

Each round measures three things one after the other, and the ratio is taken within the round:

read      the bytes of a pass by the same reader into as many slots, nothing else going on
compute   the same products on blocks that are all in memory
streamed  passes over the stream; their bytes are those that the reader counted meanwhile, read ahead or not

ratio = streamed / max(bytes / bandwidth, compute). First comes the streamed pass against itself. The rows are: reading
held to ``--limit`` bytes per second with one row and with so many rows that computing takes about as long as reading
(the hardest case), and the same without the limit. The weights are written to ``--folder``; reading past the page cache
measures that disk.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import torch
from ab import _bootstrap

from specdec_kernels import linear_int8, pack_int8
from specdec_kernels.stream import Pack, PackWriter, Reader, WeightStream, aligned_empty, parse_bytes, plan

WIDTH = 1024
PASSES = 2  # that are timed together, so that the step from one to the next counts


def write(folder, blocks, nbytes):
    rows = max(16, nbytes // blocks // WIDTH // 16 * 16)
    path = Path(folder) / "bench.safetensors"
    with PackWriter(path) as writer:
        for i in range(blocks):
            writer.add_block(f"b{i}", {"w": pack_int8(torch.randn(rows, WIDTH), group_size=64)})
    return path, rows


class Products:
    """What a pass computes: ``m`` rows times each block."""

    def __init__(self, m, rows):
        self.x, self.out = torch.randn(m, WIDTH), torch.empty(m, rows)

    def __call__(self, stream):
        for block in stream.blocks():
            linear_int8(self.x, block.tensors["w"], out=self.out)


def seconds(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def settle(stream):
    last = -1
    while last != (last := stream.stats.bytes_read):
        time.sleep(0.05)


def bandwidth(pack, made, options):
    """Bytes per second of a reader alone, with as many blocks under way as there are slots."""
    memory = deque(aligned_empty(made.slot_bytes) for _ in range(made.slots))
    with Reader(pack.files, **options) as reader:
        for target in memory:  # touched, as slots are
            target.zero_()
        under_way, total, start = deque(), 0, time.perf_counter()
        for index in made.streamed:
            if len(under_way) == made.slots:
                under_way.popleft().wait()
            block = pack.blocks[index]
            under_way.append(reader.submit(block.ranges, memory[0][: block.nbytes]))
            memory.rotate(-1)
            total += block.nbytes
        while under_way:
            under_way.popleft().wait()
        return total / (time.perf_counter() - start)


def measure(name, pack, made, m, rows, rounds, options):
    work = Products(m, rows)
    whole = replace(made, resident=tuple(made.sizes), streamed=(), slots=0, slot_bytes=0, mapped=False)
    ratios, again, streamed, reads, computes, waits, speeds = [], [], [], [], [], [], []
    with WeightStream(pack, made, **options) as stream, WeightStream(pack, whole) as resident:
        for _ in range(2):
            work(stream), work(resident)
        for _ in range(rounds):
            settle(stream)
            speed = bandwidth(pack, made, options)
            compute = seconds(lambda: work(resident))
            timed = []
            for _ in range(2):
                settle(stream)
                before = stream.stats
                timed.append(seconds(lambda: [work(stream) for _ in range(PASSES)]) / PASSES)
                after = stream.stats
                read = (after.bytes_read - before.bytes_read) / PASSES / speed
                ratios.append(timed[-1] / max(read, compute))
                reads.append(read)
                waits.append((after.wait_seconds - before.wait_seconds) / PASSES)
            again.append(timed[0] / timed[1])
            streamed += timed
            speeds.append(speed)
            computes.append(compute)
        engine = stream.stats.engine
    low, high = _bootstrap(ratios)
    same_low, same_high = _bootstrap(again)
    return {
        "name": name,
        "rows": m,
        "engine": engine,
        "ratio": statistics.median(ratios),
        "interval": [low, high],
        "least": min(ratios),
        "against_itself": [same_low, same_high],
        "streamed_ms": statistics.median(streamed) * 1e3,
        "read_ms": statistics.median(reads) * 1e3,
        "compute_ms": statistics.median(computes) * 1e3,
        "wait_ms": statistics.median(waits) * 1e3,
        "bytes_per_pass": made.bytes_per_pass,
        "gb_per_s": statistics.median(speeds) / 1e9,
    }


def as_long_as_reading(pack, made, rows, options):
    """The number of rows for which computing takes about as long as reading."""
    whole = replace(made, resident=tuple(made.sizes), streamed=(), slots=0, slot_bytes=0, mapped=False)
    reading = made.bytes_per_pass / statistics.median(bandwidth(pack, made, options) for _ in range(3))
    with WeightStream(pack, whole) as resident:
        m = 1
        while m < 512:
            work = Products(m, rows)
            if min(seconds(lambda work=work: work(resident)) for _ in range(3)) > reading:
                break
            m += max(1, m // 4)
    return m


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mb", type=int, default=96)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--budget", type=float, default=0.5, help="share of the weights")
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--limit", default="500MB", help="bytes per second of the throttled rows")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--folder", default=None, help="on the disk to be measured")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(dir=options.folder)
    try:
        path, rows = write(folder, options.blocks, options.mb * 10**6)
        with Pack.open(path) as pack:
            made = plan(pack, budget=int(options.budget * pack.nbytes), slots=options.slots)
            if not options.json:
                print(made)
            for limit in (options.limit, None):
                reader = {"engine": options.engine} | ({"limit": parse_bytes(limit)} if limit else {})
                name = f"read at {limit}/s" if limit else "read at full speed"
                balanced = as_long_as_reading(pack, made, rows, reader)
                for m in dict.fromkeys((1, balanced)):
                    row = measure(name, pack, made, m, rows, options.rounds, reader)
                    if options.json:
                        print(json.dumps(row))
                        continue
                    print(
                        f"{name}, {m} row{'s' * (m > 1)} ({row['engine']}): "
                        f"against itself {row['against_itself'][0]:.3f}..{row['against_itself'][1]:.3f}; "
                        f"streamed {row['streamed_ms']:.1f} ms = {row['ratio']:.3f} "
                        f"({row['interval'][0]:.3f}..{row['interval'][1]:.3f}, least {row['least']:.3f}) of "
                        f"max(read {row['read_ms']:.1f} ms, compute {row['compute_ms']:.1f} ms), "
                        f"waited {row['wait_ms']:.1f} ms, {row['gb_per_s']:.2f} GB/s"
                    )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
