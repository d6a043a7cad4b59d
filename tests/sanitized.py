"""A build of the CPU module under the address and undefined-behaviour sanitizers, and Python processes that load it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = "-O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"


class CantSanitize(Exception):
    """There is no compiler with these sanitizers here; the text says what is missing."""


def runtime_libraries():
    """What must be in the process before anything else: ASan, and the C++ library whose exceptions it intercepts."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise CantSanitize("needs g++")
    found = []
    for name in ("libasan.so", "libstdc++.so"):
        path = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        if not os.path.isabs(path):
            raise CantSanitize(f"needs g++'s {name}")
        found.append(os.path.realpath(path))
    return found


def sanitized_build(folder):
    """Builds into ``folder`` and returns run(arguments, **options): Python with the sanitized module on its path.

    A memory error or undefined behaviour in the module ends such a process with a report and status 99.
    """
    preload = ":".join(runtime_libraries())
    build = {"CXX": "g++", "CXXFLAGS": FLAGS, "LDFLAGS": "-fsanitize=address,undefined", "SPECDEC_WITH_CPU": "1"}
    build |= {"SPECDEC_WITH_CUDA": "0", "SPECDEC_WITH_HIP": "0"}
    lib = Path(folder, "lib")
    for name, source in (("specdec_kernels", ROOT), ("specloop", ROOT / "python")):
        shutil.copytree(source / name, lib / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    command = [sys.executable, "setup.py", "-q", "build_ext", f"--build-lib={lib}", f"--build-temp={folder}/objects"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    environment = os.environ | {
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": "detect_leaks=0:exitcode=99:quarantine_size_mb=16:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:exitcode=99",
        "PYTHONMALLOC": "malloc",  # so that small Python buffers have red zones, too
        "PYTHONPATH": os.pathsep.join([str(lib), str(ROOT / "tests")]),
    }
    environment.pop("SPECDEC_BACKEND", None)

    def run(arguments, **options):
        options = {"capture_output": True, "text": True, "timeout": 600} | options
        return subprocess.run([sys.executable, *map(str, arguments)], env=environment, cwd=folder, **options)

    return run
