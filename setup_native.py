"""Finds compilers, chooses architectures, runs compile steps. For setup.py and the compile gates; no torch.

CXX, CXXFLAGS and LDFLAGS are honoured (an ASan build is made with them), as are MAX_JOBS and NVCC_THREADS.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CSRC = Path(__file__).resolve().parent / "csrc"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
ENV = {**os.environ, "HIP_PLATFORM": "amd"}  # with nvcc on PATH hipcc would compile for NVIDIA
INCLUDE = [f"-I{CSRC}", f"-I{CSRC / 'include'}"]

# Code for one chip also runs on later ones of its major version; PTX of the newest covers what comes next.
CUDA_ARCHS = ("75", "80", "90", "100", "120")
HIP_ARCHS = ("gfx90a", "gfx942", "gfx1100")
# Every multiplication and addition is rounded on its own, on every device: results are part of the contract.
HIPFLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"]
# Nobody reads the exception flags; without -fno-trapping-math gcc does not turn `x > low ? x : low` into vector code.
CXXFLAGS = [*HIPFLAGS, "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra"]
NVCCFLAGS = ["-O3", "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden", "-fmad=false", "-cudart=static"]


class CantBuild(Exception):
    """A module can't be built here; the text says why."""


def words(variable):
    return shlex.split(os.environ.get(variable, ""))


def find_cxx():
    asked = words("CXX")
    if asked and not shutil.which(asked[0]):
        raise CantBuild(f"CXX={os.environ['CXX']}: no such program")
    found = asked or [path for path in map(shutil.which, ("g++", "c++", "clang++")) if path][:1]
    if not found:
        raise CantBuild("no C++ compiler was found (CXX is not set; no g++, c++ or clang++ on PATH)")
    return found


def find_gpu_compiler(name):
    """nvcc or hipcc: of the toolkit that a variable names, on PATH, or in the usual folder; else None."""
    if name == "_C_cuda":
        program, homes, usual = "nvcc", ("CUDA_HOME", "CUDA_PATH"), "/usr/local/cuda/bin"
    else:
        program, homes, usual = "hipcc", ("ROCM_PATH", "ROCM_HOME", "HIP_PATH"), "/opt/rocm/bin"
    named = [str(Path(os.environ[home], "bin")) for home in homes if os.environ.get(home)]
    return shutil.which(program, path=os.pathsep.join([*named, os.environ.get("PATH", ""), usual]))


def ask(command, pattern=r"(.+)"):
    """The first match of ``pattern`` in what a compiler says about itself."""
    try:
        said = subprocess.run(command, capture_output=True, text=True, env=ENV, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        said = ""
    found = re.search(pattern, said)
    return found[1] if found else "unknown"


def asked_archs(variables, default):
    """The architectures and the name of the variable that they come from."""
    for variable in variables:
        listed = re.split(r"[;,\s]+", os.environ.get(variable, "").strip("; ,"))
        if listed != [""]:
            return listed, variable
    return list(default), "default"


def cuda_archs(nvcc):
    """nvcc's options, the list, where it comes from. "8.0;9.0+PTX" and "80;90+PTX" mean the same."""
    known = re.findall(r"sm_(\w+)", ask([nvcc, "--list-gpu-code"], r"(?s)(.*)"))
    listed, origin = asked_archs(("SPECDEC_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST"), CUDA_ARCHS)
    if origin == "default":
        listed = [arch for arch in listed if arch in known] or known[-1:] or listed
        listed[-1] += "+PTX"
    options, archs = [], []
    for item in listed:
        form = re.fullmatch(r"(\d{1,2}\.\d|\d{2,3})([af]?)(\+PTX)?", item)
        number = form and form[1].replace(".", "")
        if not form or (known and number not in known):
            raise CantBuild(f"{origin}: expected some of {', '.join(known)} (9.0, 90, 90+PTX), got {item!r}")
        arch = number + form[2]
        kinds = ("sm", "compute") if form[3] else ("sm",)
        options += [f"-gencode=arch=compute_{arch},code={kind}_{arch}" for kind in kinds]
        archs.append(arch + (form[3] or ""))
    return options, archs, origin


def hip_archs(hipcc):
    """hipcc's options, the list, where it comes from."""
    listed, origin = asked_archs(("SPECDEC_HIP_ARCHS", "PYTORCH_ROCM_ARCH"), HIP_ARCHS)
    if origin == "default":  # an older hipcc doesn't know the newer chips: try each on an empty file
        listed, why = [], ""
        for arch in HIP_ARCHS:
            try:
                run([hipcc, "-x", "hip", f"--offload-arch={arch}", "-c", os.devnull, "-o", os.devnull])
                listed.append(arch)
            except CantBuild as error:
                why = error
        if not listed:
            raise CantBuild(f"hipcc compiles for none of {', '.join(HIP_ARCHS)}: {why}")
    return [f"--offload-arch={arch}" for arch in listed], listed, origin


def gpu_tools(name):
    """The compile command, the link command's two halves (objects go between), what to note about them."""
    tool = find_gpu_compiler(name)
    if tool is None:
        raise CantBuild(f"{'nvcc' if name == '_C_cuda' else 'hipcc'} was not found")
    toolkit = Path(tool).name + " " + ask([tool, "--version"], r"(?:release|HIP version:) *([\w.]+)")
    options, archs, origin = cuda_archs(tool) if name == "_C_cuda" else hip_archs(tool)
    print(f"specdec_kernels: {toolkit} compiles for {' '.join(archs)} ({origin})", flush=True)
    if name == "_C_cuda":
        host = [f"-ccbin={words('CXX')[-1]}"] if words("CXX") else []
        threads = os.environ.get("NVCC_THREADS") or str(job_limit())
        compile_ = [tool, *NVCCFLAGS, *host, f"--threads={threads}", *options]
        given = [*words("CXXFLAGS"), *words("LDFLAGS")]
        passed = ["-Xcompiler=" + flag.replace(",", "\\,") for flag in given]
        link = [tool, "-shared", *NVCCFLAGS, *host, *options], passed
    else:
        compile_ = [tool, *HIPFLAGS, *options, "-x", "hip"]
        link = [tool, "-shared"], words("LDFLAGS")
    return [*compile_, *INCLUDE], link, {"toolkit": toolkit, "archs": archs, "archs_from": origin}


def steps_of(name, build):
    """The steps (result, inputs, command) of a module, the link step last, and what to note about it."""
    import pybind11

    cxx = find_cxx()
    python = ["-isystem", pybind11.get_include(), "-isystem", sysconfig.get_paths()["include"]]
    host = [*cxx, *CXXFLAGS, *INCLUDE, *python, *words("CXXFLAGS")]
    note = {"compiler": ask([*cxx, "--version"])}
    if name == "_C_cpu":
        bindings, sources, device = sorted((CSRC / "bind").glob("cpu*.cpp")), (CSRC / "cpu").glob("*.cpp"), host
        loose = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
        link = [*cxx, "-shared", *words("CXXFLAGS")], [*words("LDFLAGS"), "-lpthread", "-ldl", *loose]
    else:
        device, link, more = gpu_tools(name)
        note |= more
        bindings, sources = sorted((CSRC / "bind").glob("gpu*.cpp")), (CSRC / "gpu").glob("*.cu")
        host += [f"-DSK_MODULE={name}", f'-DSK_ARCHS="{";".join(note["archs"])}"']
    steps = []
    for source in [*bindings, *sorted(sources)]:
        command = host if source in bindings else device
        result = build / f"{source.parent.name}_{source.stem}.o"
        line = [*command, "-MMD", "-MF", f"{result}.d", "-c", str(source), "-o", str(result)]
        steps.append((result, [source], line))
    objects = [result for result, _, _ in steps]
    module = build / (name + SUFFIX)
    steps.append((module, objects, [*link[0], *map(str, objects), "-o", str(module), *link[1]]))
    return steps, note


def job_limit():
    """MAX_JOBS, or as many as there are cores and 2 GB of free memory each."""
    wish = os.environ.get("MAX_JOBS")
    if wish:
        if not wish.isdecimal() or int(wish) < 1:
            raise SystemExit(f"MAX_JOBS: expected an integer of at least 1, got {wish!r}")
        return int(wish)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        room = int(re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())[1]) // (2 << 20)
    except (OSError, TypeError):
        room = cores
    return max(1, min(cores, room))


def build(name, folder):
    """A compiled module: its path, what to note about it, what the compilers said."""
    steps, note = steps_of(name, folder)
    return steps[-1][0], note, make(steps, folder)


def make(steps, folder):
    """Runs the steps (result, inputs, command) that are out of date, the last one after all others; what they said."""
    folder.mkdir(parents=True, exist_ok=True)
    ninja = shutil.which("ninja")
    if ninja and ask([ninja, "--version"]) != "unknown":
        return run_ninja(ninja, steps, folder)
    with ThreadPoolExecutor(job_limit()) as pool:
        said = list(pool.map(lambda step: run_if_old(*step), steps[:-1]))
    return "".join([*said, run_if_old(*steps[-1])])


def run_ninja(ninja, steps, folder):
    def text(value):
        return str(value).replace("$", "$$")

    def path(value):
        return text(value).replace(" ", "$ ").replace(":", "$:")

    lines = [f"builddir = {path(folder)}", "rule link", "  command = $line"]
    lines += ["rule compile", "  command = $line", "  depfile = $out.d", "  deps = gcc"]
    for result, inputs, command in steps:
        rule = "link" if result is steps[-1][0] else "compile"
        lines.append(f"build {path(result)}: {rule} {' '.join(map(path, inputs))}")
        lines.append(f"  line = {text(shlex.join(command))}")
    script = folder / f"{steps[-1][0].name}.ninja"
    script.write_text("\n".join(lines) + "\n")
    said = run([ninja, "-j", str(job_limit()), "-f", str(script)])
    return "\n".join(line for line in said.splitlines() if not NINJA.match(line))


def run_if_old(result, inputs, command):
    """ninja's rule without ninja: run if the command changed or what it read is newer than its result."""
    line, noted, listed = shlex.join(command), Path(f"{result}.cmd"), Path(f"{result}.d")
    try:
        if listed.exists():
            inputs = shlex.split(listed.read_text().partition(": ")[2].replace("\\\n", " "))
        made = result.stat().st_mtime_ns
        if noted.read_text() == line and all(os.stat(path).st_mtime_ns <= made for path in inputs):
            return ""
    except OSError:
        pass  # never made, or a file that it read is gone
    noted.unlink(missing_ok=True)
    said = run(command)
    noted.write_text(line)
    return said


def run(command):
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=ENV)
    said = done.stdout + done.stderr
    if done.returncode:
        raise CantBuild(f"{Path(command[0]).name} failed: {tail(said)}")
    return said


NINJA = re.compile(r"\[\d+/\d+\]|FAILED:|ninja: (?!error)|\S+ .* -MMD -MF ")


def tail(text, count=12):
    return "\n".join([line for line in text.strip().splitlines() if not NINJA.match(line)][-count:])
