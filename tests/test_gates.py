"""The compile gates: what the table holds, what counts as a failure, and that a spill is found."""

import json
import re
import sys

import pytest

import gates
import gpu_compilers
import resource_table
from gpu_compilers import COMPILERS, ROOT, Kernel

KERNEL = Kernel("nvcc", "sm_90", "scale<float>", 40, 96, 0, "13.0")


def judged(*found, table=(KERNEL,)):
    return resource_table.compare(found, table)


# ---- the committed table -----------------------------------------------------------------------------------------


def test_the_table_is_sorted_and_spills_nothing():
    table = resource_table.read()
    assert table and table == sorted(set(table))
    assert not [k for k in table if k.spilled]


@pytest.mark.parametrize("compiler", COMPILERS, ids=lambda c: c.name)
def test_the_table_has_every_target_with_the_same_kernels(compiler):
    mine = [k for k in resource_table.read() if k.compiler == compiler.name]
    names = {target: {k.name for k in mine if k.target == target} for target in compiler.targets}
    assert {k.target for k in mine} == set(compiler.targets)
    assert all(found == names[compiler.default[0]] for found in names.values())
    assert len({k.version for k in mine}) == 1, "regenerate the table with one version of the compiler"


@pytest.mark.parametrize("name", ["nvcc", "hipcc"])
def test_the_table_names_every_kernel_of_the_source(name):
    """Without compiling: a kernel that was added, renamed or removed shows before the gates run."""
    sources = [*(ROOT / "csrc").glob("gpu/*.cu"), *(ROOT / "csrc" / "include" / "sk" / "gpu").glob("*.cuh")]
    text = "".join(re.sub(r"//.*", "", path.read_text()) for path in sources)
    written = set(re.findall(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(", text))
    listed = {k.name.partition("<")[0] for k in resource_table.read() if k.compiler == name}
    assert written == listed, resource_table.REGENERATE


def test_the_table_names_every_triton_kernel():
    if not COMPILERS[2].installed():
        pytest.skip("triton is not installed")
    code = "import json, triton_aot; print(json.dumps([form.name for form in triton_aot.forms()]))"
    done = gpu_compilers.run([sys.executable, "-c", code], cwd=ROOT / "tests")
    assert done.returncode == 0, done.stderr
    listed = {k.name for k in resource_table.read() if k.compiler == "triton"}
    assert set(json.loads(done.stdout)) == listed, resource_table.REGENERATE


# ---- comparing ---------------------------------------------------------------------------------------------------


def test_equal_fewer_and_a_tenth_more_registers_pass():
    for registers in (40, 12, 44):
        assert judged(KERNEL._replace(registers=registers)) == ([], [])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"registers": 45}, "45 registers, 40 in the table"),
        ({"shared": 100}, "100 bytes of shared memory, 96 in the table"),
        ({"shared": 0}, "0 bytes of shared memory, 96 in the table"),
    ],
)
def test_more_is_an_error_with_the_same_compiler_and_a_remark_with_another(change, said):
    errors, remarks = judged(KERNEL._replace(**change))
    assert len(errors) == 1 and said in errors[0] and "gates.py --write" in errors[0] and not remarks
    errors, remarks = judged(KERNEL._replace(**change, version="14.1"))
    assert not errors and len(remarks) == 1 and said in remarks[0] and "14.1" in remarks[0]


@pytest.mark.parametrize("version", ["13.0", "14.1"])
@pytest.mark.parametrize("table", [(KERNEL,), ()])
def test_a_spill_is_always_an_error(version, table):
    errors, _ = judged(KERNEL._replace(spilled=8, version=version), table=table)
    assert errors == ["nvcc sm_90: scale<float> spills 8 bytes"]


def test_new_and_gone_kernels_are_errors():
    errors, _ = judged(KERNEL._replace(name="scale<double>", version="14.1"))
    assert [e.partition(";")[0] for e in errors] == [
        "nvcc sm_90: scale<double> is not in the table",
        "nvcc sm_90: scale<float> is gone",
    ]
    assert all("gates.py --write" in e for e in errors)


def test_only_what_was_compiled_is_compared():
    other = KERNEL._replace(target="sm_80"), KERNEL._replace(compiler="hipcc", target="gfx90a")
    assert judged(KERNEL, table=(KERNEL, *other)) == ([], [])
    errors, remarks = judged(KERNEL, table=other)
    assert not errors and remarks == ["nvcc sm_90: not in the table, only spills were checked"]


def test_writing_replaces_what_was_compiled(tmp_path):
    path = tmp_path / "resources.csv"
    kept, old = KERNEL._replace(target="sm_80", name='odd, "quoted"'), KERNEL._replace(name="old")
    resource_table.write(gates.update([kept, old], [KERNEL]), path)
    assert resource_table.read(path) == [kept, KERNEL]
    assert [p.name for p in tmp_path.iterdir()] == ["resources.csv"]


# ---- compilers ---------------------------------------------------------------------------------------------------


def test_names_are_short_and_whole():
    for long, short in (
        ("void sk::gpu::f<float, sk::gpu::T<256> >(sk::gpu::A)", "f<float, T<256>>"),
        ("void sk::gpu::(anonymous namespace)::f<(sk::gpu::Rule)2, (bool)1>(float*)", "f<(Rule)2, true>"),
        ("sk::gpu::(anonymous namespace)::nothing()", "nothing"),
        ("judge_kernel", "judge_kernel"),
    ):
        assert gpu_compilers.shorten(long) == short


SPILLS = """__global__ void __launch_bounds__(1024) spills(float* x) {
  float v[128];
  for (int i = 0; i < 128; ++i) v[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
  for (int i = 0; i < 128; ++i) x[i * 1024 + threadIdx.x] = v[127 - i] * v[i];
}
"""


@pytest.mark.parametrize("compiler", COMPILERS[:2], ids=lambda c: c.name)
def test_a_spill_and_a_mistake_are_found(compiler, tmp_path):
    if not compiler.installed():
        pytest.skip(f"{compiler.name} is not installed")
    source = tmp_path / "spills.cu"
    source.write_text(("#include <hip/hip_runtime.h>\n" if compiler.name == "hipcc" else "") + SPILLS)
    (kernel,), errors = compiler.compile(compiler.default[0], source)
    assert kernel.name == "spills" and kernel.spilled > 0 and not errors
    source.write_text("__global__ void broken( {}")
    kernels, errors = compiler.compile(compiler.default[0], source)
    assert not kernels and "spills.cu does not compile" in errors[0]


def test_a_triton_target_that_fails_is_an_error():
    triton = COMPILERS[2]
    if not triton.installed():
        pytest.skip("triton is not installed")
    kernels, errors = triton.compile("sm_nonsense", *triton.sources())
    assert not kernels and "triton sm_nonsense: triton_aot.py fails" in errors[0]


def test_what_is_compiled(monkeypatch):
    def targets(*arguments):
        return {c.name: t for c, t in gates.chosen(gates.parse(arguments))[0]}

    for compiler in COMPILERS:
        monkeypatch.setattr(type(compiler), "installed", lambda self: True)
    assert targets() == {c.name: c.default for c in COMPILERS}
    assert targets("--all") == targets("--write") == {c.name: c.targets for c in COMPILERS}
    assert targets("--nvcc", "sm_75,sm_80", "--write") == {"nvcc": ("sm_75", "sm_80")}
    assert targets("--nvcc", "", "--hipcc", "") == {"triton": COMPILERS[2].default}
    assert targets("--hipcc", "gfx90a", "--nvcc", "sm_90") == {"nvcc": ("sm_90",), "hipcc": ("gfx90a",)}


def test_a_missing_compiler_fails_unless_that_is_allowed(monkeypatch, capsys):
    monkeypatch.setattr(type(COMPILERS[0]), "installed", lambda self: False)
    assert gates.main(["--nvcc", "sm_90"]) == 1
    assert "nvcc: not checked, it is not installed" in capsys.readouterr().err
    assert gates.main(["--nvcc", "sm_90", "--allow-missing"]) == 0
    assert "nvcc: not checked, it is not installed" in capsys.readouterr().out


@pytest.mark.slow
def test_the_kernels_need_what_the_table_says():
    assert gates.main(["--allow-missing"]) == 0
