"""Builds the compiled modules that this machine can build; a missing compiler costs speed, never the install.

Three modules: _C_cpu (any C++17 compiler), _C_cuda (nvcc) and _C_hip (hipcc). SPECDEC_WITH_CPU, _CUDA and _HIP say for
each: unset = try and carry on, 1 = must succeed, 0 = don't. torch plays no part in the build, so one build serves every
torch version and build isolation works. What was built, and why the rest was not, goes into _build_info.py.
"""

import os
import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
import setup_native as native  # noqa: E402

PACKAGE = "specdec_kernels"
KINDS = {"_C_cpu": "CPU", "_C_cuda": "CUDA", "_C_hip": "HIP"}


def wish(name):
    """What SPECDEC_WITH_<kind> asks for: None (try), True (must) or False (don't)."""
    variable = f"SPECDEC_WITH_{KINDS[name]}"
    value = os.environ.get(variable, "").strip()
    if value not in ("", "0", "1"):
        sys.exit(f"{variable}: expected 1 (must), 0 (don't) or nothing (try), got {value!r}")
    return bool(int(value)) if value else None


def plan():
    """Which modules to try, what was asked for, and why the rest is left out."""
    wishes = {name: wish(name) for name in KINDS}
    off = [name for name in KINDS if wishes[name] is False]
    reasons = {name: f"SPECDEC_WITH_{KINDS[name]}=0 when this was built" for name in off}
    if wishes["_C_hip"] and wishes["_C_cuda"] is None:
        reasons["_C_cuda"] = "SPECDEC_WITH_HIP=1 chose HIP when this was built"
    elif wishes["_C_hip"] is None and "_C_cuda" not in reasons and native.find_gpu_compiler("_C_cuda"):
        reasons["_C_hip"] = "nvcc was found and CUDA goes first (SPECDEC_WITH_HIP=1 chooses HIP)"
    return [name for name in KINDS if name not in reasons], wishes, reasons


def record(folder, built):
    """Writes _build_info.py and removes compiled modules that this build did not make."""
    reasons = {name: REASONS.get(name, "was not built") for name in KINDS if name not in built}
    versions = {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
    text = ['"""Written by setup.py: what was built, and why the rest was not."""', ""]
    text += [f"BUILT = {built!r}", f"REASONS = {reasons!r}", f"VERSIONS = {versions!r}"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "_build_info.py").write_text("\n".join(text) + "\n")
    for name in reasons:
        (folder / (name + native.SUFFIX)).unlink(missing_ok=True)


class BuildPy(build_py):
    def run(self):
        super().run()
        record(ROOT / PACKAGE if self.editable_mode else Path(self.build_lib, PACKAGE), {})


class BuildExt(build_ext):
    def run(self):
        self.built = {}
        super().run()
        record(ROOT / PACKAGE if self.inplace else Path(self.build_lib, PACKAGE), self.built)

    def build_extensions(self):
        for ext in self.extensions:
            self.build_module(ext.name.rpartition(".")[2], Path(self.get_ext_fullpath(ext.name)))

    def build_module(self, name, target):
        target.unlink(missing_ok=True)
        try:
            module, note, said = native.build(name, Path(self.build_temp, name).resolve())
        except native.CantBuild as error:
            if WISHES[name]:
                sys.exit(f"SPECDEC_WITH_{KINDS[name]}=1, but {name} can't be built: {error}")
            REASONS[name] = str(error)
            print(f"{PACKAGE}: going on without {name}: {error}", flush=True)
            return
        if self.verbose and said:
            print(said, flush=True)
        self.built[name] = note
        target.parent.mkdir(parents=True, exist_ok=True)
        self.copy_file(str(module), str(target))


NAMES, WISHES, REASONS = plan()
setup(
    ext_modules=[Extension(f"{PACKAGE}.{name}", [], optional=True) for name in NAMES],
    cmdclass={"build_py": BuildPy, "build_ext": BuildExt},
)
