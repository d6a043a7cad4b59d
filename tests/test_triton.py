"""The triton backend without a GPU: interpreted in a process of its own, and what is said where it can't run."""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import specdec_kernels as sk
from specdec_kernels import registry, triton_kernels

TESTS = Path(__file__).resolve().parent
CASES = [TESTS / f"test_verify_{name}.py" for name in ("cases", "filters", "rules", "trees")]
CASES += [TESTS / f"test_quantize{name}.py" for name in ("", "_norms", "_gates")]


def interpreted(folder, *options, tests=(TESTS / "interpret", TESTS / "test_device_attention.py")):
    """Runs tests, as a rule tests/interpret, on the package that is tested here."""
    line = [sys.executable, "-m", "pytest", *map(str, tests), "-c", str(TESTS.parent / "pyproject.toml")]
    line += ["--rootdir", str(TESTS.parent), "-p", "no:cacheprovider", *options]
    package = Path(sk.__file__).resolve().parent.parent
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(package)}
    return subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True)


def need_triton():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    version = importlib.metadata.version("triton")
    if tuple(map(int, version.split(".")[:2])) >= (3, 9):
        pytest.skip(f"the interpreter of Triton {version} makes integers of masks that mix a scalar and a block")


def test_interpreted_kernels(tmp_path):
    need_triton()
    done = interpreted(tmp_path)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_interpreted_kernels_at_length(tmp_path):
    need_triton()
    done = interpreted(tmp_path, "-m", "slow")
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_interpreted_kernels_on_the_public_cases(tmp_path):
    """Half an hour: every interpreted program costs milliseconds."""
    need_triton()
    done = interpreted(tmp_path, tests=CASES)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


UNITS = {
    "sm_80": {
        "linear": r"mma\.sync\.aligned\.m16n8k32\.\S*s32\.s8\.s8\.s32",
        "attend": r"mma\.sync\S*\.bf16\.bf16\.f32",
    },
    "gfx90a": {"linear": "v_mfma_i32_16x16x16i8", "attend": "v_mfma_f32_16x16x16bf16"},
}


def ahead_of_time(target, names, cache):
    """Machine code (PTX, AMD's assembly) of forms of triton_aot.py, compiled in a process that does not interpret."""
    need_triton()
    code = """if True:
        import json, sys, triton_aot
        found = {f.name: triton_aot.compile_form(f, sys.argv[1]).asm for f in triton_aot.forms() if f.name in sys.argv}
        print(json.dumps({name: asm.get("ptx") or asm["amdgcn"] for name, asm in found.items()}))
    """
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    line = [sys.executable, "-c", code, target, *names]
    done = subprocess.run(line, cwd=TESTS, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("target", UNITS)
def test_products_run_on_the_matrix_units(target, tmp_path):
    for name, code in ahead_of_time(target, ("linear 16 rows of codes", "attend bf16 int8 64"), tmp_path).items():
        assert re.search(UNITS[target][name.split()[0]], code), name


IEEE = {  # what has to be in the code of a kernel that makes codes, and what not
    "sm_80": (r"div\.rn\.f32", r"\.ftz|div\.(full|approx)|rcp\.|fma\.rn\.f(32|64)"),
    "gfx90a": (r"v_div_fixup_f32[\s\S]*float_denorm_mode_32 3\s[\s\S]*float_denorm_mode_16_64 3\s", "s_denorm_mode"),
}


@pytest.mark.parametrize("target", IEEE)
def test_quantisation_is_compiled_to_ieee_arithmetic(target, tmp_path):
    """True divisions, no flush to zero, no contraction: what interpreted kernels cannot show."""
    wanted = "quantize row", "quantize asymmetric", "quantize static asymmetric", "rms_norm quantize row"
    compiled = ahead_of_time(target, wanted, tmp_path)
    assert compiled.keys() == set(wanted)
    for name, code in compiled.items():
        assert re.search(IEEE[target][0], code) and not re.search(IEEE[target][1], code), name


def test_importing_the_package_does_not_import_triton():
    code = "import sys, specdec_kernels as sk; sk.backends(); assert 'triton' not in sys.modules"
    package = Path(sk.__file__).resolve().parent.parent
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(package)})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_why(monkeypatch):
    monkeypatch.setattr(registry, "_modules", {})
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    status = sk.backends()["triton"]
    assert not status["usable"] and ("no GPU" in status["reason"] or "not installed" in status["reason"])
    with pytest.raises(sk.BackendUnavailable, match=r"^triton: "), sk.use_backend("triton"):
        pass


def test_without_triton_it_says_so(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "triton is not installed" in triton_kernels.unusable()


def test_cpu_tensors_are_declined_outside_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(registry.Unsupported, match="TRITON_INTERPRET=1"):
        triton_kernels.sample(torch.zeros(1, 4))
