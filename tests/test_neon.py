"""The CPU kernels on Arm: they compile for it, and under an emulator linear_int8 has the scalar path's bits."""

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[1] / "csrc"
CXX = shutil.which("aarch64-linux-gnu-g++")
QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
FLAGS = ["-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", "-Werror"]
FLAGS += [f"-I{CSRC}", f"-I{CSRC / 'include'}"]
SOURCES = [
    "linear_int8",
    "linear_int8_kernels",
    "linear_int8_neon",
    "int8_rows",
    "pack_int8",
    "rotate",
    "quantize",
    "isa",
    "threads",
]

needs_compiler = pytest.mark.skipif(CXX is None, reason="needs aarch64-linux-gnu-g++")


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@needs_compiler
@pytest.mark.parametrize("source", sorted(path.name for path in (CSRC / "cpu").glob("*.cpp")))
def test_compiles_for_arm(source, tmp_path):
    run([CXX, "-O0", *FLAGS, "-c", str(CSRC / "cpu" / source), "-o", str(tmp_path / "object.o")])


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    result = tmp_path_factory.mktemp("neon") / "compare"
    sources = [str(CSRC / "cpu" / f"{name}.cpp") for name in SOURCES]
    run(
        [
            CXX,
            "-O2",
            *FLAGS,
            "-static",
            str(Path(__file__).with_name("neon") / "compare.cpp"),
            *sources,
            "-o",
            str(result),
        ]
    )
    return result


@needs_compiler
@pytest.mark.skipif(QEMU is None, reason="needs qemu-aarch64-static")
@pytest.mark.parametrize(("processor", "sets"), [("max", "neon dotprod"), ("cortex-a53", "neon")])
def test_bits_of_the_scalar_path(program, processor, sets):
    said = run([QEMU, "-cpu", processor, str(program)])
    count, found = said.strip().split(" products: ")
    assert int(count) > 1000 and found == sets
