"""Byte budgets as people write them, and how much memory a process here may use.

A machine's memory is rarely the limit in a container: the control groups above a process bound it, too, and what counts
is the smallest bound on the way up. ``root`` in the functions below is where the file system starts (tests lay out
machines in a folder).
"""

import math
import operator
import os
import re
from typing import NamedTuple

from . import checks
from .errors import BudgetError
from .files import show

UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    UNITS[f"{_letter}b"], UNITS[f"{_letter}ib"] = 1000**_power, 1024**_power
FORM = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([a-z]*)", re.IGNORECASE | re.ASCII)
EXPECTED = "bytes as a number, or a string such as '120MB' (10^6) or '120MiB' (2^20), of at least 1 byte"
DIGITS = 40  # of a number of bytes; Python refuses to convert many more


def parse_bytes(value, name="budget"):
    """A number of bytes: an int, a finite float (cut to whole bytes), or a string: '120MB' = 120 * 10^6 bytes,
    '120MiB' = 120 * 2^20, likewise k, G and T, a plain '120000000', case and space before the unit as you like.

    BudgetError names the argument (``name``) for anything else, and for less than a byte.
    """
    count = _count(value)
    if count is None or not 1 <= count < 10**DIGITS:
        raise BudgetError(f"{name}: expected {EXPECTED}, got {show(value)}")
    return count


def _count(value):
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        form = FORM.fullmatch(value.strip())
        unit = UNITS.get(form[2].lower()) if form else None
        if unit is None or len(form[1]) > DIGITS:
            return None
        whole, _, part = form[1].partition(".")  # in integers: 2**53 + 1 bytes are not 2**53
        return int((whole or "0") + part) * unit // 10 ** len(part)
    if isinstance(value, float):
        return int(value) if math.isfinite(value) else None
    try:
        return operator.index(value)
    except TypeError:
        return None


class Memory(NamedTuple):
    """So many bytes, and which file or setting says so."""

    nbytes: int
    why: str


def memory_limit(root="/"):
    """The most this process may ever use: the machine's memory or the smallest limit of a control group above it."""
    root = checks.path("root", root)
    total = _machine(root, "MemTotal", "SC_PHYS_PAGES")
    return min([total, *(Memory(group.limit, group.file) for group in _groups(root))])


def available_memory(root="/"):
    """What this process can still take without pushing anybody out: the least of what the machine has available and
    what each control group above has left. File pages that a group has not used lately count as free.
    """
    root = checks.path("root", root)
    available = _machine(root, "MemAvailable", "SC_AVPHYS_PAGES")
    left = (Memory(max(0, group.limit - group.used()), f"what is left of {group.file}") for group in _groups(root))
    return min([available, *left])


def _machine(root, field, setting):
    try:
        text = _read(root, "/proc/meminfo")
        return Memory(int(re.search(rf"^{field}:\s*(\d+) kB", text, re.MULTILINE)[1]) << 10, f"{field} of the machine")
    except (OSError, TypeError):
        pass  # not Linux
    try:
        return Memory(os.sysconf(setting) * os.sysconf("SC_PAGE_SIZE"), f"{setting} of the machine")
    except (AttributeError, OSError, ValueError):
        raise BudgetError("budget: expected a number of bytes, since this system does not tell its memory") from None


def _read(root, path):
    with open(os.path.join(root, path.lstrip("/")), encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


class Group(NamedTuple):
    """A limit of one control group; ``usage`` names the file with its use, ``idle`` the line of memory.stat with the
    part of it that gives way."""

    root: str
    folder: str
    name: str
    limit: int
    usage: str
    idle: str

    @property
    def file(self):
        return f"{self.folder}/{self.name}"

    def used(self):
        try:
            used = int(_read(self.root, f"{self.folder}/{self.usage}"))
            idle = re.search(rf"^{self.idle} (\d+)$", _read(self.root, f"{self.folder}/memory.stat"), re.MULTILINE)
        except (OSError, ValueError):
            return 0
        return used - (int(idle[1]) if idle else 0)


VERSIONS = {
    "cgroup2": (("memory.max", "memory.high"), "memory.current", "inactive_file"),
    "cgroup": (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
}


def _groups(root):
    """The limits of this process's control groups and of all above them that can be seen."""
    try:
        places, mounts = _places(_read(root, "/proc/self/cgroup")), _mounts(_read(root, "/proc/self/mountinfo"))
    except OSError:
        return
    for kind, top, above in mounts:
        if kind not in places:
            continue
        inside = os.path.relpath(places[kind], above)
        folder = top if inside.startswith("..") or inside == "." else f"{top.rstrip('/')}/{inside}"
        names, usage, idle = VERSIONS[kind]
        while True:
            for name in names:
                try:
                    limit = int(_read(root, f"{folder}/{name}"))
                except (OSError, ValueError):  # the root group has no such file; "max" is no limit
                    continue
                yield Group(root, folder, name, limit, usage, idle)
            if folder == top:
                break
            folder = os.path.dirname(folder)


def _places(text):
    """Where in the tree of each version this process is: lines of "id:controllers:path"."""
    places = {}
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            places["cgroup2"] = path
        elif "memory" in controllers.split(","):
            places["cgroup"] = path
    return places


def _mounts(text):
    """(version, where it is mounted, what of the tree is mounted there) of each tree that limits memory."""
    mounts = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            above, top = (re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), part) for part in before.split()[3:5])
            mounts.append((kind, top, above))
    return mounts
