"""Costs that were measured before: a small file per model and machine, so that loading need not measure again.

What passes cost depends on the model's shape (not on its weights), on the machine, the kernels and how many threads
they use. All that is the file's identity; its name is a hash of it. A file is believed if it is well formed and says
the same identity, and is written anew otherwise. What was measured while others were at work is not ``sure``: the next
load measures again and keeps the least of both, until one measurement, or two, agree with themselves. When the rounds
show that other costs hold now (``CostCurve.on_drift``) the file is removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import stat
import tempfile
from pathlib import Path

from .costs import ROWS, TWICE, CostCurve, hopeful, measure, nominal_costs

FORM = 2
WORTH_KEEPING = 0.01  # seconds: the costs of a tiny model are measured in no time
MOST_BYTES = 1 << 16
MOST_FILES = 256
LONGEST_PASS = 3600.0  # seconds
SUFFIX = ".costs.json"


def cost_curve(model, rows: int = ROWS[-1]) -> tuple[CostCurve, bool]:
    """What passes of the model over 1..``rows`` rows cost, or are hoped to cost, and whether that was known already."""
    about = identity(model, rows)
    path = None if about is None else _path(about)
    before, sure = (None, False) if path is None else _read(path, about)
    if sure:
        return CostCurve(before, on_drift=lambda: _remove(path)), True
    costs, sure = measure(model, rows)
    if path is None:
        return CostCurve(costs if sure else hopeful(costs, nominal_costs(model))), False
    if before is not None:  # others were at work then, or now: the least of both is nearer to the truth
        sure = sure or all(max(pair) <= TWICE * min(pair) for pair in zip(costs, before, strict=True))
        costs = [min(pair) for pair in zip(costs, before, strict=True)]
    if sum(costs) > WORTH_KEEPING:
        _write(path, {"form": FORM, "about": about, "seconds": costs, "sure": sure})
    if sure:
        return CostCurve(costs, on_drift=lambda: _remove(path)), False
    return CostCurve(hopeful(costs, nominal_costs(model))), False  # which the rounds may well contradict


def identity(model, rows: int) -> dict | None:
    """What the costs depend on; None for a model that does not say what it is."""
    import torch

    import specdec_kernels
    from specdec_kernels import native

    config = getattr(model, "config", None)
    if config is None:
        return None
    device = str(getattr(model, "device", "cpu"))
    if native.cpu is None:
        kernels = "reference"
    else:  # a development build keeps its version; size and time of the file tell one from the next
        built = os.stat(native.cpu.__file__)
        kernels = f"{native.cpu.isa()} {built.st_size} {built.st_mtime_ns}"
    if device.startswith("cuda"):
        kernels += f" {torch.cuda.get_device_name(model.device)} {torch.version.cuda or torch.version.hip}"
    return {
        "model": repr(config),
        "bytes": getattr(model, "weights_nbytes", None),
        "budget": getattr(model, "budget", None),
        "kv": getattr(model, "kv", None),
        "context": min(model.context, rows),
        "rows": rows,
        "device": device,
        "threads": torch.get_num_threads(),
        "machine": [platform.node(), platform.machine(), _processor(), os.cpu_count()],
        "torch": torch.__version__,
        "kernels": [specdec_kernels.__version__, kernels, specdec_kernels.forced_backend()],
    }


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.lower().startswith(("model name", "cpu part")):
                return line.partition(":")[2].strip()
    return platform.processor()


def _path(about) -> Path | None:
    """Where the file is or would be; None if there is no folder for it."""
    from .convert import cache_folder

    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]
    try:
        return cache_folder() / f"{digest}{SUFFIX}"
    except (OSError, RuntimeError):  # not writable; a user without a home
        return None


def _read(path, about) -> tuple[list[float] | None, bool]:
    """The costs that the file has, and whether they are sure; whatever is wrong with it, measuring is the answer."""
    nothing = None, False
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return nothing
            data = file.read(MOST_BYTES + 1)
        entry = json.loads(data) if len(data) <= MOST_BYTES else None
    except (OSError, ValueError, RecursionError):
        return nothing
    if not isinstance(entry, dict) or entry.get("form") != FORM or entry.get("about") != about:
        return nothing
    seconds, sure = entry.get("seconds"), entry.get("sure")
    if type(sure) is not bool or not isinstance(seconds, list) or len(seconds) != about["context"]:
        return nothing
    if not all(type(value) is float and 0 < value <= LONGEST_PASS for value in seconds):  # NaN is not
        return nothing
    return (seconds, sure) if seconds == sorted(seconds) else nothing


def _write(path, entry) -> None:
    """As a whole or not at all, readable by its owner only. A folder that takes no file is no reason to fail."""
    with contextlib.suppress(OSError):
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".costs-")  # mode 0600
        try:
            with open(descriptor, "w", encoding="ascii") as file:
                json.dump(entry, file)
            os.replace(name, path)
        except OSError:
            _remove(name)
            raise
        files = sorted(path.parent.glob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime)
        for old in files[:-MOST_FILES]:
            _remove(old)


def _remove(path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
