"""A pass over streamed weights against the longer of what it has to do: read its bytes, and compute.

python bench/bench_stream.py [--json] [--mb 96] [--blocks 24] [--budget 0.5] [--slots 3] [--rounds 9] [--limit 500MB]
                             [--engine auto] [--folder /tmp]

Each round measures these one after the other, and the ratio is taken within the round:

read      the bytes of a pass by the same reader into as many slots, nothing else going on
compute   the same products on blocks that are all in memory
together  both of them side by side, neither waiting for the other
streamed  passes over the stream; their bytes are those that the reader counted meanwhile, read ahead or not

ratio = streamed / max(bytes / bandwidth, compute). Beside it stand two floors of a machine whose cores serve the
disk, too: max(read, compute, the core seconds of both / cores), and together, in which they share cores and memory but
have no order to keep. First comes the streamed pass against itself. The rows are: reading held to ``--limit`` bytes per
second with one row and with so many rows that computing takes about as long as reading (the hardest case), and the same
without the limit. The weights are written to ``--folder``; reading past the page cache measures that disk.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
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


def core_seconds(run):
    """(seconds, what the cores of this process and the kernel in its name worked meanwhile)."""
    before = time.process_time()
    return seconds(run), time.process_time() - before


def side_by_side(*runs):
    """Seconds until all of them are done that started at once."""
    threads = [threading.Thread(target=run) for run in runs[1:]]

    def both():
        for thread in threads:
            thread.start()
        runs[0]()
        for thread in threads:
            thread.join()

    return seconds(both)


def settle(stream):
    last = -1
    while last != (last := stream.stats.bytes_read):
        time.sleep(0.05)


class Reads:
    """What ``PASSES`` passes read that start with full slots, by a reader alone with as many blocks under way."""

    def __init__(self, pack, made, options):
        self._blocks = ([pack.blocks[index] for index in made.streamed] * PASSES)[made.slots :]
        self._memory = deque(aligned_empty(made.slot_bytes).zero_() for _ in range(made.slots))  # touched, as slots are
        self._reader = Reader(pack.files, **options)
        self.nbytes = sum(block.nbytes for block in self._blocks)

    def __call__(self):
        under_way = deque()
        for block in self._blocks:
            if len(under_way) == len(self._memory):
                under_way.popleft().wait()
            under_way.append(self._reader.submit(block.ranges, self._memory[0][: block.nbytes]))
            self._memory.rotate(-1)
        while under_way:
            under_way.popleft().wait()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._reader.close()


def resident_plan(made):
    return replace(made, resident=tuple(made.sizes), streamed=(), slots=0, slot_bytes=0, mapped=False)


def measure(name, pack, made, m, rows, rounds, options):
    work, cores = Products(m, rows), len(os.sched_getaffinity(0))
    found = []
    with (
        WeightStream(pack, made, **options) as stream,
        WeightStream(pack, resident_plan(made)) as resident,
        Reads(pack, made, options) as reads,
    ):

        def passes(of):
            for _ in range(PASSES):
                work(of)

        for _ in range(2):
            work(stream), work(resident), reads()
        for _ in range(rounds):
            settle(stream)
            read, read_cores = core_seconds(reads)
            compute, compute_cores = (value / PASSES for value in core_seconds(lambda: passes(resident)))
            together = side_by_side(lambda: passes(resident), reads) / PASSES
            for _ in range(2):
                settle(stream)
                before = stream.stats
                streamed = seconds(lambda: passes(stream)) / PASSES
                after = stream.stats
                share = (after.bytes_read - before.bytes_read) / reads.nbytes
                found.append(
                    {
                        "streamed": streamed,
                        "read": share * read / PASSES,
                        "compute": compute,
                        "core": (share * read_cores / PASSES + compute_cores) / cores,
                        "together": together,
                        "wait": (after.wait_seconds - before.wait_seconds) / PASSES,
                        "gb_per_s": reads.nbytes / read / 1e9,
                    }
                )
        engine = stream.stats.engine

    def ratios(*floors):
        return [row["streamed"] / max(row[floor] for floor in floors) for row in found]

    ratio = ratios("read", "compute")
    times = {f"{key}_ms": 1e3 * statistics.median(row[key] for row in found) for key in found[0] if key != "gb_per_s"}
    return {
        "name": name,
        "rows": m,
        "engine": engine,
        "ratio": statistics.median(ratio),
        "interval": _bootstrap(ratio),
        "least": min(ratio),
        "ratio_to_cores": statistics.median(ratios("read", "compute", "core")),
        "ratio_to_together": statistics.median(ratios("together")),
        "against_itself": _bootstrap(
            [a["streamed"] / b["streamed"] for a, b in zip(found[::2], found[1::2], strict=True)]
        ),
        **times,
        "bytes_per_pass": made.bytes_per_pass,
        "gb_per_s": statistics.median(row["gb_per_s"] for row in found),
    }


def as_long_as_reading(pack, made, rows, options):
    """The number of rows for which computing takes about as long as reading."""
    with Reads(pack, made, options) as reads:
        reading = statistics.median(seconds(reads) for _ in range(3)) / PASSES
    with WeightStream(pack, resident_plan(made)) as resident:
        m = 1
        while m < 512:
            work = Products(m, rows)
            if min(seconds(lambda work=work: work(resident)) for _ in range(5)) > reading:
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
                        f"max(read {row['read_ms']:.1f} ms, compute {row['compute_ms']:.1f} ms), waited "
                        f"{row['wait_ms']:.1f} ms, {row['gb_per_s']:.2f} GB/s; {row['ratio_to_cores']:.3f} with the "
                        f"cores' {row['core_ms']:.1f} ms, {row['ratio_to_together']:.3f} of both together "
                        f"{row['together_ms']:.1f} ms",
                        flush=True,
                    )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
