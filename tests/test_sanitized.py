"""The C++ of every operation under AddressSanitizer and UndefinedBehaviorSanitizer."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FAMILIES = ("ggml", "quantize", "linear", "attention", "verify", "sample")
FILES = sorted(path.name for family in FAMILIES for path in TESTS.glob(f"test_{family}*.py"))


def test_every_operation(sanitized):
    done = sanitized([TESTS / "smoke_operations.py"])
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    assert done.stdout.splitlines()[-1].startswith("done ")
    assert "scalar 1\nscalar 2\n" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_a_family_s_own_tests(sanitized, file):
    options = ["-q", "-s", "-p", "no:cacheprovider", f"--rootdir={TESTS.parent}"]  # -s: the report must not be captured
    done = sanitized(["-m", "pytest", *options, TESTS / file], timeout=1800)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
