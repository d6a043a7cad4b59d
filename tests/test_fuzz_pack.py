"""Mutated safetensors files and packs: each opens and can be read, or raises PackError; slow: under sanitizers too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fuzz_pack.py")


def check(done, count):
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    reasons = result["reasons"]
    assert sum(reasons.values()) == count
    # The mutations reach all parts of the reader: many files still open, many different things go wrong.
    opened = sum(n for what, n in reasons.items() if what.startswith("opened"))
    assert opened > count / 20 and len(reasons) > 60, reasons
    assert result["slowest_s"] < 1 and result["grown_kb"] < 50_000, result


def test_mutated_files(tmp_path):
    count = 4000
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, SCRIPT, "1", str(count), tmp_path]
    check(subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600), count)


@pytest.mark.slow
def test_mutated_files_under_sanitizers(sanitized, tmp_path):
    count = 20_000
    check(sanitized([SCRIPT, 2, count, tmp_path]), count)
