"""Compile gates: every GPU kernel compiles for its targets without spilling a register. No GPU needed.

    python tests/gates.py                          # one NVIDIA and one AMD target
    python tests/gates.py --cuda 75,80,90 --hip gfx906,gfx90a,gfx1030

Prints a table of registers and shared memory per kernel. Exit code 1 if something does not compile or spills; so does
a compiler that is not installed, unless --allow-missing is given.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import setup_native  # noqa: E402

Kernel = namedtuple("Kernel", "target name registers spilled shared")


def nvcc_command(tool, arch):
    verbose = "-Xptxas=-v,--warn-on-spills,--warn-on-local-memory-usage"
    return [tool, *setup_native.NVCCFLAGS, f"-gencode=arch=compute_{arch},code=sm_{arch}", verbose]


def nvcc_kernels(target, said):
    """What ptxas -v says: a stack frame counts as spilled, too, since it is local memory."""
    pattern = r"function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores.*?Used (\d+) registers(.*)"
    for block in said.split("ptxas info    : Compiling")[1:]:
        name, stack, spilled, registers, rest = re.search(pattern, block, re.S).groups()
        shared = re.search(r"(\d+) bytes smem", rest)
        yield Kernel(target, name, int(registers), int(stack) + int(spilled), int(shared[1]) if shared else 0)


def hipcc_command(tool, arch):
    return [
        tool,
        *setup_native.HIPFLAGS,
        f"--offload-arch={arch}",
        "-x",
        "hip",
        "-Rpass-analysis=kernel-resource-usage",
    ]


def hipcc_kernels(target, said):
    """Scalar registers may be kept in vector lanes; scratch memory and vector spills are what costs."""
    for block in said.split("Function Name: ")[1:]:
        number = {key: int(re.search(rf"{re.escape(key)}: (\d+)", block)[1]) for key in HIP_KEYS}
        vector, scratch, spilled, shared = number.values()
        yield Kernel(target, block.split()[0], vector, scratch + spilled, shared)


HIP_KEYS = (" VGPRs", "ScratchSize [bytes/lane]", "VGPRs Spill", "LDS Size [bytes/block]")
COMPILERS = {"_C_cuda": ("nvcc", nvcc_command, nvcc_kernels), "_C_hip": ("hipcc", hipcc_command, hipcc_kernels)}


def gate(module, target, folder, sources=None):
    """Compiles every .cu for one target: the kernels found in the compiler's remarks, and the errors."""
    program, command, parse = COMPILERS[module]
    tool = setup_native.find_gpu_compiler(module)
    if tool is None:
        return [], [f"{target}: {program} was not found"]
    kernels, errors = [], []
    for source in sources or sorted((ROOT / "csrc" / "gpu").glob("*.cu")):
        line = [*command(tool, target), *setup_native.INCLUDE, "-c", str(source), "-o", str(folder / "gate.o")]
        done = subprocess.run(line, capture_output=True, text=True, env=setup_native.ENV)
        if done.returncode:
            errors.append(f"{target}: {source.name} does not compile:\n{done.stderr[-3000:]}")
            continue
        kernels += parse(target, done.stderr)
    if not kernels:
        errors.append(f"{target}: the compiler named no kernel")
    errors += [f"{k.target}: {k.name} spills {k.spilled} bytes" for k in kernels if k.spilled]
    return kernels, errors


def readable(names):
    """Mangled names -> short readable ones, as well as the tools at hand allow."""
    tool = shutil.which("c++filt")
    if tool is None:
        return dict(zip(names, names, strict=True))
    said = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True).stdout.splitlines()
    short = [re.sub(r"\(anonymous namespace\)::|void |sk::gpu::|sk::|\([^(]*\)$", "", line) for line in said]
    return dict(zip(names, short, strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", default="90", help="comma-separated list, like 80,90 (default: 90)")
    parser.add_argument("--hip", default="gfx90a", help="comma-separated list, like gfx90a,gfx1030 (default: gfx90a)")
    parser.add_argument("--allow-missing", action="store_true", help="a compiler that is not installed is no failure")
    options = parser.parse_args()
    kernels, errors = [], []
    with tempfile.TemporaryDirectory() as folder:
        for module, targets in (("_C_cuda", options.cuda), ("_C_hip", options.hip)):
            for target in filter(None, targets.split(",")):
                name = f"sm_{target}" if module == "_C_cuda" else target
                if options.allow_missing and setup_native.find_gpu_compiler(module) is None:
                    print(f"{name}: not checked, {COMPILERS[module][0]} was not found")
                    continue
                found, wrong = gate(module, target, Path(folder))
                kernels += [kernel._replace(target=name) for kernel in found]
                errors += wrong
    short = readable(sorted({kernel.name for kernel in kernels}))
    print(f"{'target':10}{'registers':>10}{'spilled':>9}{'shared':>8}  kernel")
    for kernel in kernels:
        print(f"{kernel.target:10}{kernel.registers:10}{kernel.spilled:9}{kernel.shared:8}  {short[kernel.name]}")
    for error in errors:
        print(error, file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
