"""10,000 mutated GGUF files under AddressSanitizer and UndefinedBehaviorSanitizer: each opens or raises FormatError."""

import json
from pathlib import Path

SCRIPT = Path(__file__).with_name("fuzz_gguf.py")
COUNT = 10_000


def test_mutated_files(sanitized, tmp_path):
    done = sanitized([SCRIPT, 1, COUNT, tmp_path])
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    reasons = result["reasons"]
    assert sum(reasons.values()) == COUNT
    # The mutations reach all parts of the reader: many files still open, many different things go wrong.
    assert reasons["opened"] > 500 and len(reasons) > 20, reasons
    assert result["slowest_s"] < 1 and result["grown_kb"] < 100_000, result


def test_sanitizer_sees_an_overflow(sanitized):
    """The build is what it claims to be: one row too many is read past the blocks, and that ends the process."""
    code = """
import torch
from specdec_kernels import native
blocks, out = torch.zeros(4, 34, dtype=torch.uint8), torch.zeros(5, 32)
native.cpu.dequantize_ggml(1, 5, blocks.data_ptr(), 34, out.data_ptr(), 32, 5, 1)
"""
    done = sanitized(["-c", code])
    assert done.returncode == 99 and "heap-buffer-overflow" in done.stderr, done.stderr[-2000:]
