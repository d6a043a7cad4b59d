"""Ahead-of-time compilers of the GPU kernels, one job per target and source, and what each says about a kernel.

Only device code is compiled, to machine code: a virtual architecture would hide spills. nvcc reports through ptxas -v,
hipcc through its resource remarks, Triton through triton_aot.py.
"""

import functools
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# registers: per thread, of all vector register files; shared: static, bytes per block; spilled: bytes per thread in
# local memory, for whatever reason (register arrays, too).
Kernel = namedtuple("Kernel", "compiler target name registers shared spilled version")


@functools.cache
def setup_native():
    """The build's own tools, found without putting the source folder on sys.path."""
    spec = importlib.util.spec_from_file_location("setup_native", ROOT / "setup_native.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(line, **options):
    options = {"env": setup_native().ENV, **options}
    return subprocess.run(line, capture_output=True, text=True, errors="replace", **options)


class Native:
    """A compiler of the .cu files: one job per source."""

    def installed(self):
        return self.tool is not None

    def sources(self):
        return sorted((ROOT / "csrc" / "gpu").glob("*.cu"))

    def compile(self, target, source):
        """The kernels of one source for one target, and the errors."""
        with tempfile.TemporaryDirectory() as folder:
            line = [self.tool, *self.command(target), *setup_native().INCLUDE, str(source)]
            done = run([*line, "-o", str(Path(folder, "code"))])
        if done.returncode:
            return [], [f"{self.name} {target}: {source.name} does not compile:\n{done.stderr[-3000:]}"]
        found = list(self.parse(done.stderr))
        short = readable([name for name, *_ in found])
        return [Kernel(self.name, target, short[name], *rest, self.version) for name, *rest in found], []


class Nvcc(Native):
    name, default = "nvcc", ("sm_90",)
    targets = tuple(f"sm_{arch}" for arch in setup_native().CUDA_ARCHS)
    tool = setup_native().find_gpu_compiler("_C_cuda")

    @functools.cached_property
    def version(self):
        return setup_native().ask([self.tool, "--version"], r", V([\d.]+)")

    def command(self, target):
        arch = target.removeprefix("sm_")
        verbose = "-Xptxas=-v,--warn-on-spills,--warn-on-local-memory-usage"
        return [*setup_native().NVCCFLAGS, f"-gencode=arch=compute_{arch},code=sm_{arch}", verbose, "-cubin"]

    def parse(self, said):
        """A stack frame counts as spilled, since it is local memory, too; it holds what was spilled."""
        pattern = r"function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores.*?Used (\d+) registers(.*)"
        for block in said.split("ptxas info    : Compiling")[1:]:
            name, stack, spilled, registers, rest = re.search(pattern, block, re.S).groups()
            shared = re.search(r"(\d+) bytes smem", rest)
            yield name, int(registers), int(shared[1]) if shared else 0, max(int(stack), int(spilled))


class Hipcc(Native):
    name, default = "hipcc", ("gfx90a",)
    targets = ("gfx90a", "gfx1030")  # waves of 64 and of 32 lanes; hipcc 5.2 knows no newer chip well
    tool = setup_native().find_gpu_compiler("_C_hip")

    @functools.cached_property
    def version(self):
        said = run([self.tool, "--version"]).stdout
        return " clang ".join(re.findall(r"(?:HIP version: |clang version )([\d.]+)", said)) or "unknown"

    def command(self, target):
        remarks = "-Rpass-analysis=kernel-resource-usage"
        return [*setup_native().HIPFLAGS, f"--offload-arch={target}", "-x", "hip", "--cuda-device-only", remarks, "-c"]

    def parse(self, said):
        """Scalar registers may be kept in vector lanes; scratch memory and vector spills are what costs."""
        for block in said.split("Function Name: ")[1:]:
            number = {
                key: int(value) for key, value in re.findall(r" (\w[\w ]*)(?: \[[^]]*\])?: (\d+) \[-Rpass", block)
            }
            scratch = max(number["ScratchSize"], 4 * number["VGPRs Spill"])
            yield block.split()[0], number["VGPRs"] + number.get("AGPRs", 0), number["LDS Size"], scratch


class Triton:
    """One job per target, in a process of its own: this one may be in interpreter mode, and compiles other targets."""

    name, default = "triton", ("sm_90", "gfx90a")
    targets = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100")

    def installed(self):
        return importlib.util.find_spec("triton") is not None

    def sources(self):
        return [ROOT / "tests" / "triton_aot.py"]

    def compile(self, target, source):
        code = "import json, sys, triton_aot; print(json.dumps(triton_aot.compile_all(sys.argv[1:])))"
        with tempfile.TemporaryDirectory() as cache:
            env = {**setup_native().ENV, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
            done = run([sys.executable, "-c", code, target], cwd=source.parent, env=env)
        if done.returncode:
            return [], [f"{self.name} {target}: {source.name} fails:\n{done.stderr[-3000:]}"]
        return [Kernel(*row) for row in json.loads(done.stdout.splitlines()[-1])], []


def readable(names):
    """Mangled names -> demangled ones without namespaces and arguments, the same by every demangler."""
    tool = next(filter(None, map(shutil.which, ("c++filt", "llvm-cxxfilt", "cu++filt"))), None)
    if tool is None:
        raise SystemExit("the gates need c++filt (binutils) to name the kernels")
    said = run([tool], input="\n".join(names)).stdout.splitlines()
    return {name: shorten(line) for name, line in zip(names, said, strict=True)}


def shorten(text):
    """``void sk::gpu::scale<float, (bool)1>(float*)`` -> ``scale<float, true>``."""
    text = re.sub(r"\(anonymous namespace\)::|\bsk::(gpu::)?|^void ", "", text)
    text = re.sub(r"> (?=>)", ">", text.replace("(bool)1", "true").replace("(bool)0", "false"))
    depth = 0
    for i, char in enumerate(text):  # the argument list opens at the first parenthesis outside of the template's
        depth += (char == "<") - (char == ">")
        if char == "(" and depth == 0:
            return text[:i]
    return text


COMPILERS = (Nvcc(), Hipcc(), Triton())
