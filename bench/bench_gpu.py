"""The GPU backends against eager PyTorch and FlashInfer on the same device, and against its copy bandwidth.

    python bench/bench_gpu.py [--out bench/results] [--seconds 90] [--tests DIR]
    python bench/bench_gpu.py --device cpu --out DIR        # dry run: the same steps and the same JSON, no GPU figure

Writes <out>/<device>.json. No such file is committed yet: this has not run on a GPU, and any figure for one that is
found elsewhere in this repository is a prediction.

Ratios are a rival's time over ours, both sides taking turns (ab.py), as medians with a bootstrap interval; "aa" is the
same statistic for ours against itself. A lap calls once for each of enough copies of the inputs that none is in the
device's cache, replayed as a CUDA graph where both sides can be captured ("graph": device time), else called from
Python ("calls"). GB/s counts what has to be read and written once, all drafts being accepted; the share is of the
measured copy bandwidth.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import time
import xml.etree.ElementTree
from pathlib import Path

import gpu_streaming
import torch
from ab import aa, compare
from gpu_work import everything

import specdec_kernels as sk

ROOT = Path(__file__).resolve().parent.parent


# ---- the device --------------------------------------------------------------------------------------------------


class Gpu:
    backends = ("cuda", "hip", "triton")
    copy_size = 1 << 29

    def __init__(self):
        self.device = torch.device("cuda")
        facts = torch.cuda.get_device_properties(0)
        self.name = facts.name
        self.cold = max(4 * getattr(facts, "L2_cache_size", 0), 256 << 20)
        self.sync = torch.cuda.synchronize

    def capture(self, lap):
        """The lap as a graph, or None where something in it can't be captured."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            lap()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                lap()
        except RuntimeError:
            torch.cuda.synchronize()
            return None
        return graph.replay


class Cpu:
    """For the dry run: everything but the figures."""

    backends = ("cpu", "reference")
    copy_size, cold, name = 1 << 22, 0, "dry run on a CPU"
    device = torch.device("cpu")

    def sync(self):
        pass

    def capture(self, lap):
        return None


def copy_bandwidth(gpu):
    """Bytes read and written per second by the device's own copy, best of ten."""
    a = torch.zeros(gpu.copy_size, dtype=torch.int8, device=gpu.device)
    b = torch.empty_like(a)
    b.copy_(a)
    best = float("inf")
    for _ in range(10):
        gpu.sync()
        start = time.perf_counter()
        for _ in range(4):
            b.copy_(a)
        gpu.sync()
        best = min(best, (time.perf_counter() - start) / 4)
    return 2 * gpu.copy_size / best


# ---- measuring ---------------------------------------------------------------------------------------------------


def laps(gpu, work, functions):
    """Per function one lap over the copies, all captured or none; and which of the two."""
    plain = [lambda f=f: [f(i) for i in range(work.copies)] for f in functions]
    for lap in plain:
        lap()
    graphs = [gpu.capture(lap) for lap in plain]
    if all(graphs):
        return graphs, "graph"
    return plain, "calls"


def timed(gpu, lap):
    def run():
        lap()
        gpu.sync()

    return run


def measure(gpu, work, backend, copy, pairs):
    """One result per rival, or a single one without."""
    with sk.use_backend(backend):
        if not work.right(work.ours(0)):
            raise AssertionError("the result is not what the inputs were made for")
        for rival, function in (work.rivals or {None: None}).items():
            sides, mode = laps(gpu, work, [work.ours, function] if rival else [work.ours])
            ours = timed(gpu, sides[0])
            start = time.perf_counter()
            ours()
            repeat = max(1, min(50, int(2e-3 / (time.perf_counter() - start))))
            noise = aa(ours, pairs=max(3, pairs // 2), repeat=repeat)
            against = compare(timed(gpu, sides[1]), ours, pairs=pairs, repeat=repeat) if rival else noise
            seconds = against.b_seconds / work.copies
            yield {
                "operation": work.operation,
                "name": work.name,
                "backend": backend,
                "timed": mode,
                "rival": rival,
                "ratio": against.ratio if rival else None,
                "interval": against.interval if rival else None,
                "aa": noise.interval,
                "us": seconds * 1e6,
                "rival_us": against.a_seconds / work.copies * 1e6 if rival else None,
                "call_us": call_time(gpu, work),
                "gbps": work.bytes / seconds / 1e9,
                "share_of_copy": work.bytes / seconds / copy,
            }


def call_time(gpu, work):
    """Microseconds of one call from Python until the device is done."""
    times = []
    for i in range(20):
        gpu.sync()
        start = time.perf_counter()
        work.ours(i % work.copies)
        gpu.sync()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


# ---- the file ----------------------------------------------------------------------------------------------------


def versions():
    found = {"specdec_kernels": sk.__version__, "torch": torch.__version__, "python": platform.python_version()}
    found |= {"cuda": torch.version.cuda, "hip": torch.version.hip}
    for package in ("triton", "flashinfer-python"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    found["driver"] = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    found["commit"] = said("git", "-C", str(ROOT), "describe", "--always", "--dirty")
    return found


def said(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def counted(folder):
    """How many device tests passed, failed and were skipped, by pytest's junit files."""
    counts = {}
    for path in sorted(folder.glob("*.xml")):
        suite = next(xml.etree.ElementTree.parse(path).iter("testsuite"))
        count = {name: int(suite.get(name)) for name in ("failures", "errors", "skipped")}
        counts[path.stem] = {"passed": int(suite.get("tests")) - sum(count.values()), **count}
    return counts


def write(facts, folder):
    """<folder>/<device>.json, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (re.sub(r"[^a-z0-9]+", "-", facts["device"].lower()).strip("-") + ".json")
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(facts, indent=1) + "\n")
    os.replace(temporary, path)
    return path


def line(result):
    text = f"{result['operation']:16s}{result['name']:54s}{result['backend']:10s}{result['timed']:6s}"
    text += f"{result['us']:9.1f} us {result['gbps']:7.0f} GB/s {100 * result['share_of_copy']:4.0f} %"
    return f"{text}  {result['ratio']:6.2f}x {result['rival']}" if result["rival"] else text


def stream_line(result):
    text = f"{'weight stream':16s}{result['name']:54s}{result['kind']:10s}{result['link'] or 'no link':8s}"
    return f"{text}{result['ms']:7.1f} ms {result['gbps']:7.1f} GB/s {100 * result['share_of_link']:4.0f} % of the link"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run")
    parser.add_argument("--out", type=Path, help="folder of the result (default: bench/results; a dry run needs one)")
    parser.add_argument("--seconds", type=float, default=90, help="starts nothing new after this time")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--tests", type=Path, help="folder of junit files of the device tests, for the result")
    options = parser.parse_args()
    dry = options.device == "cpu"
    if dry and options.out is None:
        parser.error("--device cpu: needs --out, so that no dry run ends up among the results")
    if not dry and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU")
    gpu = Cpu() if dry else Gpu()
    usable = [name for name in gpu.backends if sk.backends()[name]["usable"]]
    usable = usable[:1] if dry else usable
    if not usable:
        parser.error(f"no backend is usable: { ({name: sk.backends()[name]['reason'] for name in gpu.backends}) }")

    begin, results, declined, failed, left = time.monotonic(), [], [], [], 0
    copy = copy_bandwidth(gpu)
    print(f"{gpu.name}: {', '.join(usable)}; copy {copy / 1e9:.0f} GB/s")
    for work in everything(gpu):
        for backend in usable:
            if work.operation not in sk.backends()[backend]["operations"]:
                continue
            if time.monotonic() - begin > options.seconds:
                left += 1
                continue
            try:
                for result in measure(gpu, work, backend, copy, options.pairs):
                    results.append(result)
                    print(line(result), flush=True)
            except sk.BackendUnavailable as error:  # a call that the backend does not serve, and says so
                declined.append(str(error))
            except Exception as error:  # one operation that fails must not cost the other figures
                failed.append(f"{work.operation} {work.name} on {backend}: {type(error).__name__}: {error}")
                print(failed[-1], flush=True)
    streaming = []
    if time.monotonic() - begin > options.seconds:
        left += 1
    else:
        try:
            for result in gpu_streaming.measure(gpu):
                streaming.append(result)
                print(stream_line(result), flush=True)
        except Exception as error:
            failed.append(f"streaming: {type(error).__name__}: {error}")
            print(failed[-1], flush=True)
    facts = {
        "device": gpu.name,
        "dry_run": dry,
        "when": time.strftime("%Y-%m-%d", time.gmtime()),
        "versions": versions(),
        "backends": usable,
        "copy_gbps": copy / 1e9,
        "tests": counted(options.tests) if options.tests else None,
        "results": results,
        "streaming": streaming,
        "declined": sorted(set(declined)),
        "failed": failed,
        "left_out": left,
    }
    print(f"wrote {write(facts, options.out or ROOT / 'bench' / 'results')}; {left} left out for lack of time")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
