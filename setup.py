"""Builds the compiled modules that this machine can build; a missing compiler costs speed, never the install."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
CXXFLAGS = [
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
]


class BuildExt(build_ext):
    def build_extension(self, ext):
        import pybind11

        cxx = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
        out = Path(self.get_ext_fullpath(ext.name))
        build = Path(self.build_temp).resolve()
        build.mkdir(parents=True, exist_ok=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        include = [
            f"-I{ROOT / 'csrc'}",
            f"-I{ROOT / 'csrc' / 'include'}",
            f"-isystem{pybind11.get_include()}",
            f"-isystem{sysconfig.get_paths()['include']}",
        ]
        flags = CXXFLAGS + os.environ.get("CXXFLAGS", "").split()
        lines = [
            f"cxx = {cxx}",
            f"flags = {' '.join(flags + include)}",
            "rule cc",
            "  command = $cxx $flags -MMD -MF $out.d -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "rule link",
            f"  command = $cxx -shared $in -o $out {os.environ.get('LDFLAGS', '')} -lpthread",
        ]
        objects = []
        for source in ext.sources:
            obj = build / (source.replace("/", "_") + ".o")
            objects.append(str(obj))
            lines.append(f"build {obj}: cc {ROOT / source}")
        lines.append(f"build {out.resolve()}: link {' '.join(objects)}")
        (build / "build.ninja").write_text("\n".join(lines) + "\n")
        subprocess.check_call(["ninja", "-f", str(build / "build.ninja")])


sources = ["csrc/bind/cpu.cpp", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc" / "cpu").glob("*.cpp"))]
setup(ext_modules=[Extension("specdec_kernels._C_cpu", sources)], cmdclass={"build_ext": BuildExt})
