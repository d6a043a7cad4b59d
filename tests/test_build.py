"""The build: what it makes with and without each compiler, what it says when it can't, and that torch plays no part.

Most tests build a wheel of a copy of the source with the build backend itself, with torch blocked. Those that compile a
whole module are slow ones (CI runs them).
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
import torch

import emulator
import specdec_kernels
from specdec_kernels import native

ROOT = Path(__file__).resolve().parent.parent
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
BUILT = ("_C_cpu", "_C_cuda", "_C_hip")
tools = emulator.setup_native()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what belongs to the source, nothing built in it."""
    copy = tmp_path_factory.mktemp("source") / "tree"
    leave = shutil.ignore_patterns("build", "dist", "*.so", "_build_info.py", "__pycache__", "*.egg-info", ".*")
    for name in ("csrc", "specdec_kernels", "python"):
        shutil.copytree(ROOT / name, copy / name, ignore=leave)
    for name in ("setup.py", "setup_native.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture
def no_programs(tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def program(folder, name, script):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def environment(tmp_path, **variables):
    """The build's environment: no settings of ours or of compilers, and a torch that must not be imported."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SPECDEC_", "CXX", "LDFLAGS", "TORCH_", "CUDA_"))}
    blocked = tmp_path / "blocked"
    blocked.mkdir(exist_ok=True)
    (blocked / "torch.py").write_text("raise ImportError('the build must not import torch')\n")
    return {**clean, "PYTHONPATH": str(blocked), **{name: str(value) for name, value in variables.items()}}


def backend(hook, source, out, env):
    """Runs a hook of the build backend (build_wheel, build_sdist) and returns the file that it made, or its output."""
    out.mkdir(exist_ok=True)
    code = f"import setuptools.build_meta as b; b.{hook}({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, env=env, capture_output=True, text=True)
    if done.returncode:
        return None, done.stdout + done.stderr
    (made,) = out.iterdir()
    return made, done.stdout + done.stderr


def wheel(source, tmp_path, **variables):
    """Builds a wheel and unpacks it: the folder to import from."""
    shutil.rmtree(source / "build", ignore_errors=True)
    made, said = backend("build_wheel", source, tmp_path / "wheel", environment(tmp_path, **variables))
    assert made, said
    zipfile.ZipFile(made).extractall(tmp_path / "site")
    return tmp_path / "site"


def python(site, code, *arguments):
    env = {**os.environ, "PYTHONPATH": str(site)}
    line = [sys.executable, *(("-c", code) if code else ()), *arguments]
    return subprocess.run(line, env=env, capture_output=True, text=True, cwd=site)


USE = """
import torch, specdec_kernels as sk
q, scale = sk.quantize_int8(torch.randn(3, 64))
y = sk.linear_int8(torch.randn(2, 64), sk.pack_int8(torch.randn(8, 64)))
v = sk.verify(torch.randn(4, 32), torch.tensor([1, 2, 3]), torch.tensor([0, 3], dtype=torch.int32), temperature=0)
print(q.dtype, y.shape[1], int(v.num_accepted[0]) <= 3, sk.backends()["cpu"]["reason"])
"""


@pytest.fixture(scope="module")
def pure(source, tmp_path_factory):
    """An installation that was built where there is no compiler."""
    folder = tmp_path_factory.mktemp("pure")
    (folder / "empty").mkdir()
    return wheel(source, folder, PATH=folder / "empty", ROCM_PATH="/nowhere")


def test_no_compiler_costs_speed_only(pure):
    assert not list(pure.glob("**/*.so"))
    done = python(pure, USE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torch.int8 8 True no C++ compiler was found (CXX is not set;")


def test_diagnostics_name_the_reason(pure):
    facts = json.loads(python(pure, None, "-m", "specdec_kernels", "--json").stdout)
    cpu = facts["backends"]["cpu"]
    assert (cpu["built"], cpu["usable"]) == (False, False) and "no C++ compiler" in cpu["reason"]
    assert facts["operations"]["verify"]["cpu"]["serves"] == "reference"
    assert "no C++ compiler" in facts["operations"]["verify"]["cpu"]["others"]["cpu"]
    assert "no C++ compiler" in python(pure, None, "-m", "specdec_kernels").stdout


@pytest.mark.parametrize("content", [b"", b"not a shared object", b"\x7fELF\x02\x01\x01" + bytes(4000)])
def test_a_corrupted_module_does_not_break_the_import(pure, content, tmp_path):
    site = tmp_path / "site"
    shutil.copytree(pure, site)
    (site / "specdec_kernels" / f"_C_cpu{SUFFIX}").write_bytes(content)
    done = python(site, USE)
    assert done.returncode == 0, done.stderr
    assert "_C_cpu did not load: ImportError: " in done.stdout


def test_a_truncated_module_does_not_break_the_import(pure, tmp_path):
    if native.cpu is None:
        pytest.skip(f"needs the CPU module: {native.cpu_reason}")
    site = tmp_path / "site"
    shutil.copytree(pure, site)
    target, whole = site / "specdec_kernels" / f"_C_cpu{SUFFIX}", Path(native.cpu.__file__).read_bytes()
    for length in (64, 1000, len(whole) - 1, len(whole) // 2):
        target.write_bytes(whole[:length])
        assert native._cut_short(target)
    assert not native._cut_short(native.cpu.__file__)
    done = python(site, USE)
    assert done.returncode == 0, done.stderr
    assert "_C_cpu did not load: ImportError: " in done.stdout and "cut short" in done.stdout


def test_a_failing_compiler_is_the_reason(source, tmp_path, no_programs):
    cxx = program(no_programs, "badcxx", "echo 'kernel.cpp:7: error: the flux is inverted' >&2; exit 1")
    site = wheel(source, tmp_path, CXX=cxx, SPECDEC_WITH_CUDA=0, SPECDEC_WITH_HIP=0)
    info = {}
    exec((site / "specdec_kernels" / "_build_info.py").read_text(), info)
    assert info["BUILT"] == {} and info["REASONS"]["_C_cpu"].endswith("error: the flux is inverted")
    assert info["REASONS"]["_C_cuda"] == "SPECDEC_WITH_CUDA=0 when this was built"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SPECDEC_WITH_CPU": "1", "CXX": "/no/such/compiler"}, "SPECDEC_WITH_CPU=1, but _C_cpu can't be built: CXX="),
        ({"SPECDEC_WITH_HIP": "1", "SPECDEC_HIP_ARCHS": "gfx0"}, "SPECDEC_WITH_HIP=1, but _C_hip can't be built: "),
        ({"SPECDEC_WITH_CPU": "yes"}, "SPECDEC_WITH_CPU: expected 1 (must), 0 (don't) or nothing (try), got 'yes'"),
    ],
)
def test_what_must_be_built_fails_the_install(source, tmp_path, no_programs, variables, said):
    bad = program(no_programs, "badcxx", "exit 1")
    others = {"CXX": bad, "SPECDEC_WITH_CPU": "0", "SPECDEC_WITH_CUDA": "0"}
    made, output = backend("build_wheel", source, tmp_path / "wheel", environment(tmp_path, **{**others, **variables}))
    assert made is None and said in output


def test_cuda_goes_before_hip(source, tmp_path, no_programs):
    for name in ("nvcc", "hipcc"):
        program(no_programs, name, "exit 1")
    site = wheel(source, tmp_path, PATH=no_programs, SPECDEC_WITH_CPU=0)
    info = {}
    exec((site / "specdec_kernels" / "_build_info.py").read_text(), info)
    assert info["REASONS"]["_C_hip"] == "nvcc was found and CUDA goes first (SPECDEC_WITH_HIP=1 chooses HIP)"


def test_sdist_holds_what_the_build_needs(source, tmp_path):
    made, said = backend("build_sdist", source, tmp_path / "sdist", environment(tmp_path))
    assert made, said
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("csrc", "specdec_kernels", "python"):
        files = [p.relative_to(source).as_posix() for p in (source / folder).rglob("*") if p.is_file()]
        missing = [n for n in files if n not in names and "__pycache__" not in n and ".egg-info" not in n]
        assert files and not missing
    assert "setup_native.py" in names and "specdec_kernels/_build_info.py" not in names


# ---- choices -----------------------------------------------------------------------------------------------------


@pytest.fixture
def nvcc(no_programs):
    return str(program(no_programs, "nvcc", "for a in 80 86 90 100 120; do echo sm_$a; done"))


@pytest.mark.parametrize(
    ("variables", "archs", "origin"),
    [
        ({}, ["80", "90", "100", "120+PTX"], "default"),
        ({"TORCH_CUDA_ARCH_LIST": "8.0;9.0+PTX"}, ["80", "90+PTX"], "TORCH_CUDA_ARCH_LIST"),
        ({"TORCH_CUDA_ARCH_LIST": "8.6 12.0"}, ["86", "120"], "TORCH_CUDA_ARCH_LIST"),
        ({"SPECDEC_CUDA_ARCHS": "80;90+PTX", "TORCH_CUDA_ARCH_LIST": "8.6"}, ["80", "90+PTX"], "SPECDEC_CUDA_ARCHS"),
        ({"SPECDEC_CUDA_ARCHS": "90a"}, ["90a"], "SPECDEC_CUDA_ARCHS"),
    ],
)
def test_cuda_architectures(nvcc, monkeypatch, variables, archs, origin):
    _only(monkeypatch, ("SPECDEC_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST"), variables)
    options, got, source_of = tools.cuda_archs(nvcc)
    assert (got, source_of) == (archs, origin)
    codes = [option.rpartition("code=")[2] for option in options]
    want = [f"{kind}_{a.removesuffix('+PTX')}" for a in archs for kind in ("sm", "compute")[: 1 + a.endswith("+PTX")]]
    assert codes == want


@pytest.mark.parametrize("value", ["75", "9", "sm_90", "Hopper", "90+ptx"])
def test_an_unknown_architecture_is_named(nvcc, monkeypatch, value):
    _only(monkeypatch, ("SPECDEC_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST"), {"SPECDEC_CUDA_ARCHS": value})
    with pytest.raises(tools.CantBuild) as error:
        tools.cuda_archs(nvcc)
    said = f"SPECDEC_CUDA_ARCHS: expected some of 80, 86, 90, 100, 120 (9.0, 90, 90+PTX), got {value!r}"
    assert str(error.value) == said


def test_hip_architectures(no_programs, monkeypatch):
    only_gfx90a = 'case "$*" in *gfx90a*) exit 0;; *) echo "unknown chip" >&2; exit 1;; esac'
    hipcc = str(program(no_programs, "hipcc", only_gfx90a))
    _only(monkeypatch, ("SPECDEC_HIP_ARCHS", "PYTORCH_ROCM_ARCH"), {})
    assert tools.hip_archs(hipcc) == (["--offload-arch=gfx90a"], ["gfx90a"], "default")
    monkeypatch.setenv("PYTORCH_ROCM_ARCH", "gfx906;gfx942")
    assert tools.hip_archs(hipcc)[1:] == (["gfx906", "gfx942"], "PYTORCH_ROCM_ARCH")


def test_job_limit(monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "3")
    assert tools.job_limit() == 3
    monkeypatch.delenv("MAX_JOBS")
    assert 1 <= tools.job_limit() <= os.cpu_count()


def _only(monkeypatch, names, variables):
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


# ---- compile steps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runner", ["ninja", "pool"])
def test_only_what_changed_is_compiled_again(tmp_path, monkeypatch, runner):
    if runner == "pool":
        real = shutil.which
        monkeypatch.setattr(tools.shutil, "which", lambda name, **k: None if name == "ninja" else real(name, **k))
    elif shutil.which("ninja") is None:
        pytest.skip("ninja is not installed")
    folder = tmp_path / "a folder"  # a blank in the path must not matter
    folder.mkdir()
    header, library = folder / "value.h", folder / "out.so"
    for name in ("one", "two"):
        (folder / f"{name}.c").write_text(f'#include "{header if name == "two" else "stddef.h"}"\nint {name}(void);')
    header.write_text("enum { kValue = 1 };")

    def compile_all(*flags):
        steps = []
        for name in ("one", "two"):
            result = folder / f"{name}.o"
            line = [*cc, *flags, "-MMD", "-MF", f"{result}.d", "-c", str(folder / f"{name}.c"), "-o", str(result)]
            steps.append((result, [folder / f"{name}.c"], line))
        objects = [step[0] for step in steps]
        steps.append((library, objects, [*cc, "-shared", *map(str, objects), "-o", str(library)]))
        before = {path: path.stat().st_mtime_ns if path.exists() else 0 for path in (*objects, library)}
        tools.make(steps, folder)
        return {path.name for path, when in before.items() if path.stat().st_mtime_ns != when}

    try:
        cc = [*tools.find_cxx(), "-fPIC"]
    except tools.CantBuild as reason:
        pytest.skip(str(reason))
    assert compile_all() == {"one.o", "two.o", "out.so"}
    assert compile_all() == set()
    time.sleep(0.02)
    header.write_text("enum { kValue = 2 };")
    assert compile_all() == {"two.o", "out.so"}
    assert compile_all("-DNEW") == {"one.o", "two.o", "out.so"}
    (folder / "one.c").write_text("#error broken on purpose")
    with pytest.raises(tools.CantBuild, match="broken on purpose"):
        compile_all("-DNEW")


# ---- what is installed here --------------------------------------------------------------------------------------


def test_diagnostics_in_a_source_folder_say_so(source):
    said = python(source, None, "-m", "specdec_kernels").stdout
    assert f"not built in the source folder {source}" in said


def test_the_installed_package_is_what_is_tested():
    """Not the folder specdec_kernels/ of the source, which may hold other builds or none."""
    if any(Path(entry or ".").resolve() == ROOT for entry in sys.path):
        pytest.skip("the source tree is on sys.path: PYTHONPATH=. python -m pytest tests what lies there on purpose")
    editable = importlib.metadata.distribution("specdec-kernels").read_text("direct_url.json") or ""
    if '"editable": true' in editable:
        pytest.skip("an editable installation is the source tree")
    assert Path(specdec_kernels.__file__).resolve().parent != ROOT / "specdec_kernels"


@pytest.mark.parametrize("name", BUILT)
def test_no_foreign_library_is_needed(name):
    module, reason = native.load_compiled(name)
    if module is None:
        pytest.skip(reason)
    needed = _needed(module.__file__)
    assert needed and not [lib for lib in needed if lib.startswith(("libtorch", "libc10", "libcuda", "libpython"))]


def test_a_gpu_module_is_usable_or_says_why_not():
    for backend_name in ("cuda", "hip"):
        module, reason = native.load_compiled(f"_C_{backend_name}")
        status = specdec_kernels.backends()[backend_name]
        if module is None:
            assert (status["usable"], status["reason"], status["operations"]) == (False, reason, [])
        elif not status["usable"]:
            assert f"_C_{backend_name} is built (for {module.archs}) but can't run here: " in status["reason"]
            assert module.probe() in (None, status["reason"].partition("can't run here: ")[2])
        else:
            assert torch.cuda.is_available() and "quantize_int8" in status["operations"]


def _needed(path):
    said = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True).stdout
    return [line.partition("[")[2].rstrip("]") for line in said.splitlines() if "(NEEDED)" in line]


# ---- whole builds ------------------------------------------------------------------------------------------------


def _require(module):
    if tools.find_gpu_compiler(module) is None:
        pytest.skip("its compiler is not installed")


@pytest.mark.slow
def test_install_with_build_isolation_and_without_torch(source, tmp_path):
    """pip install . in an environment that has no torch: pip fetches setuptools and pybind11, and nothing else."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    env = {k: v for k, v in os.environ.items() if not k.startswith("SPECDEC_") and k != "PYTHONPATH"}
    env |= {"SPECDEC_WITH_CPU": "1", "SPECDEC_CUDA_ARCHS": "90", "CXXFLAGS": "-O1"}
    shutil.rmtree(source / "build", ignore_errors=True)
    line = [str(venv / "bin" / "python"), "-m", "pip", "install", "--no-deps", str(source)]
    done = subprocess.run(line, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning:" not in done.stdout + done.stderr
    site = next(venv.glob("lib/python*/site-packages"))
    assert not (site / "torch").exists()
    done = python(site, USE)
    assert done.returncode == 0 and done.stdout.endswith("True None\n"), done.stdout + done.stderr
    if tools.find_gpu_compiler("_C_cuda"):
        _imports_and_names_its_error(site, "cuda", ("cudaErrorInsufficientDriver", "cudaErrorNoDevice"))


@pytest.mark.slow
def test_hip_module(source, tmp_path):
    _require("_C_hip")
    variables = {"SPECDEC_WITH_HIP": 1, "SPECDEC_WITH_CPU": 0, "SPECDEC_HIP_ARCHS": "gfx90a"}
    site = wheel(source, tmp_path, **variables)
    _imports_and_names_its_error(site, "hip", ("hipErrorNoDevice", "hipErrorInvalidDevice"))


def _imports_and_names_its_error(site, backend_name, errors):
    (module,) = (site / "specdec_kernels").glob(f"_C_{backend_name}*")
    assert not [lib for lib in _needed(module) if lib.startswith(("libcudart", "libcuda.", "libtorch", "libc10"))]
    facts = json.loads(python(site, None, "-m", "specdec_kernels", "--json").stdout)["backends"][backend_name]
    assert facts["built"]
    if not facts["usable"]:
        assert any(f"can't run here: {error}: " in facts["reason"] for error in errors), facts


@pytest.mark.slow
def test_install_from_sdist(source, tmp_path):
    made, said = backend("build_sdist", source, tmp_path / "sdist", environment(tmp_path))
    assert made, said
    careful = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.2 has none
    with tarfile.open(made) as archive:
        archive.extractall(tmp_path, **careful)
    tree = next(path for path in tmp_path.glob("specdec_kernels-*") if path.is_dir())
    flags = {"CXXFLAGS": "-O1", "SPECDEC_WITH_CUDA": 0, "SPECDEC_WITH_HIP": 0, "SPECDEC_WITH_CPU": 1}
    site = wheel(tree, tmp_path, **flags)
    done = python(site, USE)
    assert done.returncode == 0 and done.stdout.endswith("True None\n"), done.stdout + done.stderr
