"""What a process has in memory, told apart by what can be taken back.

A limit on memory kills for anonymous and shared memory; pages of a mapped file are given back when others need them,
and count in "RSS" and "peak RSS" all the same. So the kinds are never added up here.
"""

from pathlib import Path
from typing import NamedTuple


class Footprint(NamedTuple):
    """Bytes in memory. ``owned`` is what a budget has to cover."""

    anonymous: int
    shared: int  # shared memory and tmpfs
    files: int  # pages of mapped files, which the system can drop

    @property
    def owned(self):
        return self.anonymous + self.shared


def footprint(pid="self"):
    """The Footprint of a process, this one or ``pid``. Raises OSError where the system has no /proc."""
    kilobytes = dict.fromkeys(("RssAnon", "RssShmem", "RssFile"), 0)  # a thread of the kernel has none
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.startswith("Rss"):
            kilobytes[name] = int(value.split()[0]) * 1024
    return Footprint(kilobytes["RssAnon"], kilobytes["RssShmem"], kilobytes["RssFile"])
