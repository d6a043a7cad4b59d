"""The committed table of what every GPU kernel needs (data/resources.csv): reading, writing, comparing.

A kernel must not spill, on any compiler. With the compiler of the table, shared memory is equal and registers are at
most a tenth above it; another version of the compiler allocates in its own way, so that the rest is only reported.
"""

import csv
from pathlib import Path

from gpu_compilers import Kernel

PATH = Path(__file__).resolve().parent / "data" / "resources.csv"
REGENERATE = "if that is intended: python tests/gates.py --write, and review the change of tests/data/resources.csv"


def read(path=PATH):
    if not path.exists():
        return []
    with path.open(newline="") as file:
        lines = csv.DictReader(file)
        return [
            Kernel(**{k: int(v) if k in ("registers", "shared", "spilled") else v for k, v in line.items()})
            for line in lines
        ]


def write(kernels, path=PATH):
    """Sorted, one kernel and target per line; a half-written table is never left behind."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(Kernel._fields)
        lines.writerows(sorted(kernels))
    temporary.replace(path)


def compare(found, table):
    """(errors, remarks) about the kernels found, for the compilers and targets that they were compiled for."""
    errors = [f"{_place(k)} spills {k.spilled} bytes" for k in found if k.spilled]
    remarks = []
    for place in sorted({(k.compiler, k.target) for k in found}):
        now = {k.name: k for k in found if (k.compiler, k.target) == place}
        then = {k.name: k for k in table if (k.compiler, k.target) == place}
        if not then:
            remarks.append(f"{' '.join(place)}: not in the table, only spills were checked")
            continue
        for name in sorted(now.keys() | then.keys()):
            if name not in then:
                errors.append(f"{_place(now[name])} is not in the table; {REGENERATE}")
            elif name not in now:
                errors.append(f"{_place(then[name])} is gone; {REGENERATE}")
            elif now[name].version == then[name].version:
                errors += [f"{_place(now[name])}: {change}; {REGENERATE}" for change in _changes(now[name], then[name])]
            else:
                versions = f"version {now[name].version}, the table is of {then[name].version}"
                remarks += [f"{_place(now[name])}: {change} ({versions})" for change in _changes(now[name], then[name])]
    return errors, remarks


def _changes(now, then):
    if now.registers > then.registers + then.registers // 10:
        yield f"{now.registers} registers, {then.registers} in the table (a tenth more is allowed)"
    if now.shared != then.shared:
        yield f"{now.shared} bytes of shared memory, {then.shared} in the table"


def _place(kernel):
    return f"{kernel.compiler} {kernel.target}: {kernel.name}"
