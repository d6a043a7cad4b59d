"""Killed while loading (report 55): no process can clean up then, so nothing may be lying about at any time."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("gguf", reason="the gguf package writes the test files: pip install '.[test]'")
from test_loader import write

# Forks before it has any threads, so that a child begins in milliseconds and not with the import of torch. Prints what
# each child was killed by and what it left in the cache folder, every pack of which has to be whole.
SERVER = """
import json, os, signal, sys, time
import torch, specloop, specloop.convert, specloop.loader
from specdec_kernels import stream
from specloop.models.blueprint import Filler

source, count, cache = sys.argv[1], int(sys.argv[2]), os.environ["SPECDEC_CACHE"]
fill = Filler.fill

def child(begun):
    def slowly(self, part, weight):
        os.write(begun, b".")
        time.sleep(0.01)
        fill(self, part, weight)

    Filler.fill = slowly
    torch.set_num_threads(1)
    with specloop.load(source, source, context=64, memory_budget=2_000_000) as pair:
        pair.ready()
        while True:
            pair.swap(target=source)

def left():
    names = os.listdir(cache) if os.path.isdir(cache) else []
    for name in names:
        with stream.Pack.open(os.path.join(cache, name)) as pack:
            for block in pack.blocks:
                pack.read_block(block.index, torch.empty(block.nbytes, dtype=torch.uint8))
        os.unlink(os.path.join(cache, name))
    return names

report = []
for n in range(count):
    ready, begun = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            child(begun)
        finally:
            os._exit(1)
    for _ in range(1 + 30 * n // count):
        os.read(ready, 1)
    while n == count - 1 and not (os.path.isdir(cache) and os.listdir(cache)):
        time.sleep(0.01)
    time.sleep(0.003 * n)
    os.kill(pid, signal.SIGKILL)
    report.append((os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), left()))
    os.close(ready), os.close(begun)
print(json.dumps(report))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("count", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_nothing_but_whole_packs_is_left(tmp_path, count):
    source = str(write(tmp_path / "tiny.gguf"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary), "HOME": str(temporary)}
    environment |= {"SPECDEC_CACHE": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    before = shared_memory()
    command = [sys.executable, "-c", SERVER, source, str(count)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [signal for signal, _ in report] == [-9] * count, done.stderr  # each was alive until it was killed
    assert all(name.endswith(".pack") for _, names in report for name in names), report
    assert report[0][1] == [] and len(report[-1][1]) == 1, report  # the first before there was a pack, the last after
    assert os.listdir(temporary) == [] and shared_memory() == before


def shared_memory():
    return sorted(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else []
