"""A Python process and its memory, looked at from outside while it runs.

What it owns is RssAnon + RssShmem of /proc/PID/status; the rest of VmRSS are pages of mapped files, which the system
can take back at any time.
"""

import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

EVERY = 0.004  # seconds between two looks

# What every decoder has to hold: torch and tokenizers imported, one operation run.
BARE = """
import torch, tokenizers
torch.mm(torch.ones(64, 64), torch.ones(64, 64))
"""


class Watched(NamedTuple):
    output: str
    owned: int  # most of RssAnon + RssShmem, bytes
    resident: int  # most of all resident pages, those of files with them
    looks: int


def _status(pid):
    """RssAnon + RssShmem, and VmRSS, in bytes; None when the process is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    sizes = dict.fromkeys(("RssAnon", "RssShmem", "VmRSS"), 0)
    for line in text.splitlines():
        name = line.partition(":")[0]
        if name in sizes:
            sizes[name] = int(line.split()[1]) * 1024
    return sizes["RssAnon"] + sizes["RssShmem"], sizes["VmRSS"]


def watch(code, *arguments, timeout=600, environment=None):
    """Runs ``code`` in a Python of its own, with ``arguments`` in sys.argv, and looks at it until it ends."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    # Output to a file: a full pipe would make the process wait. Elsewhere than in the checkout, which would hide the
    # installed package.
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, cwd=tempfile.gettempdir(), env=environment)
        owned = resident = looks = 0
        end = time.monotonic() + timeout
        while process.poll() is None:
            sizes = _status(process.pid)
            if sizes is not None:
                owned, resident, looks = max(owned, sizes[0]), max(resident, sizes[1]), looks + 1
            if time.monotonic() > end:
                process.kill()
                process.wait()
                raise TimeoutError(f"a watched process ran longer than {timeout} s")
            time.sleep(EVERY)
        if process.returncode:
            raise RuntimeError(f"a watched process ended with code {process.returncode}")
        out.seek(0)
        return Watched(out.read(), owned, resident, looks)


@contextlib.contextmanager
def waiting(code, *arguments):
    """A Python that has run ``code`` and waits, for as long as the block lasts."""
    code += "\nimport sys\nprint('ready', flush=True)\nsys.stdin.read()\n"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tempfile.gettempdir()
    )
    try:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("a watched process ended before it was ready")
        yield process.pid
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def shares(*pids):
    """Bytes of the processes together, what they share counted once (their PSS).

    Pages of libraries are shared with whatever else runs, too: what comes and goes elsewhere moves it by some MB.
    """
    return sum(_rolled_up(pid)["Pss"] for pid in pids)


def private(pid):
    """Bytes that this process alone has: where nothing else runs, what the machine has more of since it came."""
    sizes = _rolled_up(pid)
    return sizes["Private_Clean"] + sizes["Private_Dirty"]


def _rolled_up(pid):
    lines = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return {name[:-1]: int(size) * 1024 for name, size, _ in (line for line in lines if line[-1] == "kB")}
