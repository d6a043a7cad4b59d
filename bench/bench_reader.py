"""How fast a disk is read: each engine of stream.Reader against dd, with idle and with busy cores.

python bench/bench_reader.py [--json] [--mb 512] [--rounds 9] [--block 3.5MB] [--slots 3] [--folder /tmp]
                             [--engines io_uring,direct,buffered] [--sweep]

The file is read in blocks into slots, the oldest of which is waited for before its memory is used again: the number of
bytes that can be on their way is slots x block, as when weights stream. dd reads the same file past the page cache with
blocks of 1, 4 and 16 MB; the best of them in a round is the plain tool that the ratio refers to (the same round: above
1 = the reader is faster). First comes dd against itself. Buffered reading starts with the file out of the page cache.
"busy" is with a thread per core that reads memory as fast as it comes, as decoding does.

--sweep tries pieces, threads and depths instead.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch
from ab import _bootstrap

from specdec_kernels import native
from specdec_kernels.stream import Reader, StreamError, aligned_empty, parse_bytes
from specdec_kernels.stream.files import PackFile

DD = ("1M", "4M", "16M")
SWEEP = [("direct", {"threads": n, "piece": p << 20}) for n in (2, 4, 8) for p in (1, 2, 4)]
SWEEP += [("io_uring", {"depth": n, "piece": p << 20}) for n in (4, 8, 16, 32) for p in (1, 2, 4)]


class Part(NamedTuple):
    file: int
    offset: int
    nbytes: int
    at: int


def write(path, nbytes):
    with open(path, "wb") as file:
        for _ in range(0, nbytes, 1 << 24):
            file.write(random.randbytes(1 << 24))
        os.fsync(file.fileno())


class Busy:
    """Threads that read memory until the end of the ``with``."""

    def __init__(self, threads):
        self._arenas = [torch.zeros(32 << 20, dtype=torch.uint8) for _ in range(threads)]
        self._stop = False

    def _run(self, arena):
        while not self._stop:
            native.cpu.read_bytes(arena.data_ptr(), arena.nbytes, 1)

    def __enter__(self):
        self._threads = [threading.Thread(target=self._run, args=(arena,)) for arena in self._arenas]
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_):
        self._stop = True
        for thread in self._threads:
            thread.join()


def read(file, memories, engine, options):
    """Bytes per second."""
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    block = memories[0].nbytes
    with Reader([file], engine=engine, **options) as reader:
        start, tickets = time.perf_counter(), []
        for i, offset in enumerate(range(0, file.size - file.size % block, block)):
            if len(tickets) == len(memories):
                tickets.pop(0).wait()
            tickets.append(reader.submit([Part(0, offset, block, 0)], memories[i % len(memories)]))
        for ticket in tickets:
            ticket.wait()
        return reader.bytes_read / (time.perf_counter() - start)


def dd(file, block):
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    command = ["dd", f"if={file.path}", "of=/dev/null", f"bs={block}", "iflag=direct"]
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return file.size / (time.perf_counter() - start)


def measure(file, memories, engines, rounds, busy):
    """One list of rates per contender; all of them once per round, in a new order."""
    runs = {
        f"{name} {' '.join(f'{k}={v}' for k, v in options.items())}".strip(): (name, options)
        for name, options in engines
    }
    runs |= {f"dd bs={block}": block for block in DD} | {f"dd bs={block} again": block for block in DD}
    rates, costs = {name: [] for name in runs}, {name: [] for name in runs}
    for _ in range(rounds):
        for name in random.sample(list(runs), len(runs)):
            what = runs[name]
            with Busy(busy):
                before = sum(os.times()[:4])  # of this process and of dd's
                rates[name].append(dd(file, what) if isinstance(what, str) else read(file, memories, *what))
                costs[name].append((sum(os.times()[:4]) - before) / file.size)
    return rates, costs


def report(rates, costs, busy, as_json):
    tools = [[max(row) for row in zip(*(rates[f"dd bs={b}{end}"] for b in DD), strict=True)] for end in ("", " again")]
    rows = {"dd, best": tools[0], "dd, best, again": tools[1]}
    rows |= {name: values for name, values in rates.items() if not name.startswith("dd")}
    costs = costs | {"dd, best": costs["dd bs=4M"], "dd, best, again": costs["dd bs=4M again"]}
    for name, values in rows.items():
        ratios = [a / b for a, b in zip(values, tools[0], strict=True)]
        row = {"name": name, "busy": busy, "median": statistics.median(values), "best": max(values)}
        row |= {"ratio": statistics.median(ratios), "interval": _bootstrap(ratios)}
        row["core_seconds_per_gb"] = None if busy else statistics.median(costs[name]) * 1e9
        if as_json:
            print(json.dumps(row))
            continue
        low, high = row["interval"]
        cost = "" if busy else f"  {row['core_seconds_per_gb']:.2f} core s/GB"
        rate = f"{row['median'] / 1e9:6.2f} GB/s (best {row['best'] / 1e9:5.2f})"
        print(f"{name:32} {rate}  {row['ratio']:5.2f} [{low:.2f}, {high:.2f}]{cost}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mb", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--block", default="3.5MB")
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--folder")
    parser.add_argument("--engines", default="io_uring,direct,buffered")
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    block = parse_bytes(arguments.block, "--block") // 4096 * 4096
    memories = [aligned_empty(block).fill_(1) for _ in range(arguments.slots)]
    folder = tempfile.mkdtemp(dir=arguments.folder)
    try:
        path = Path(folder) / "weights"
        write(path, arguments.mb << 20)
        file = PackFile(path)
        engines = []
        for name, options in SWEEP if arguments.sweep else [(name, {}) for name in arguments.engines.split(",")]:
            try:
                Reader([file], engine=name).close()
                engines.append((name, options))
            except StreamError as error:
                print(error)
        for busy in (0, native.threads()):
            if not arguments.json:
                print(f"{'busy' if busy else 'idle'} cores, {arguments.slots} blocks of {block / 1e6:.1f} MB")
            report(*measure(file, memories, engines, arguments.rounds, busy), busy, arguments.json)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
