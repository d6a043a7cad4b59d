"""How fast streamed weights reach a GPU, for bench_gpu.py: passes over a pack whose blocks the host keeps, against the
bandwidth of the link as torch's own page-locked memory has it.

Nothing is computed, so a pass is as fast as its copies. Without a GPU (dry run) the same pack streams from the file.
"""

import contextlib
import statistics
import tempfile
import time
from pathlib import Path

import torch

from specdec_kernels.stream import Pack, PackWriter, WeightStream, plan
from specdec_kernels.stream.device import PinError, TorchDevice
from specdec_kernels.stream.pinned import PIECE, PIECES

KINDS = {"pinned": {}, "ring": {}, "pageable": {"no_pin": True}}


def write(path, blocks, size):
    with PackWriter(path, {}) as writer:
        for i in range(blocks):
            writer.add_block(f"layer.{i}", {"bytes": torch.randint(0, 256, (size,), dtype=torch.uint8)})


def link_bandwidth(gpu, size):
    """Bytes per second from torch's page-locked memory to the device, best of ten."""
    source = torch.zeros(size, dtype=torch.uint8, pin_memory=gpu.device.type != "cpu")
    target, best = torch.empty(size, dtype=torch.uint8, device=gpu.device), float("inf")
    for _ in range(10):
        gpu.sync()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        gpu.sync()
        best = min(best, time.perf_counter() - start)
    return size / best


def measure(gpu, passes=5):
    """One result per way to the device."""
    dry = gpu.device.type == "cpu"
    blocks, size = (4, 1 << 16) if dry else (8, 64 << 20)
    link = link_bandwidth(gpu, size)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "pack"), blocks, size)
        for kind, options in {"file": {}}.items() if dry else KINDS.items():
            with Pack.open(Path(folder, "pack")) as pack:
                planned = plan(pack, budget=3 * max(b.nbytes for b in pack.blocks), device=gpu.device)
                allowed = only_a_ring() if kind == "ring" else contextlib.nullcontext()
                with allowed, WeightStream(pack, planned, **options) as stream:
                    yield {"name": f"{blocks} x {size >> 10} KiB", "kind": kind, **timed(gpu, stream, passes, link)}


def timed(gpu, stream, passes, link):
    times = []
    for _ in range(passes + 1):  # the first one is not counted
        gpu.sync()
        start = time.perf_counter()
        for _ in stream.blocks():
            pass
        gpu.sync()
        times.append(time.perf_counter() - start)
    seconds, stats = statistics.median(times[1:]), stream.stats
    gbps = stream.plan.bytes_per_pass / seconds / 1e9
    return {
        "link": stats.link,
        "ms": seconds * 1e3,
        "gbps": gbps,
        "share_of_link": gbps * 1e9 / link,
        "link_gbps": link / 1e9,
        "pinned_bytes": stats.pinned_bytes,
        "wait_seconds": stats.wait_seconds,
    }


@contextlib.contextmanager
def only_a_ring():
    """Inside, no more than a ring can be page-locked."""
    register = TorchDevice.register

    def some(self, address, nbytes):
        if nbytes > PIECE * PIECES:
            raise PinError(f"{nbytes} bytes are left alone, to measure the ring")
        return register(self, address, nbytes)

    TorchDevice.register = some
    try:
        yield
    finally:
        TorchDevice.register = register
