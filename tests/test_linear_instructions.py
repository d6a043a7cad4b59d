"""The instructions that linear_int8 was written for are in the compiled code, and no product is fused with a sum."""

import re

import pytest

from gpu_compilers import COMPILERS, ROOT, readable, run, setup_native

NVCC, HIPCC = COMPILERS[:2]
SOURCE = ROOT / "csrc" / "gpu" / "linear_int8.cu"
MMA = r"mma\.sync\.aligned\.m16n8k32\.row\.col\.s32\.s8\.s8\.s32"
MATRIX, DOT, ROW = "linear_kernel<MatrixUnit", "linear_kernel<DotUnit", "linear_row_kernel"


def ptx(arch):
    """{kernel: its text}"""
    tools = setup_native()
    line = [NVCC.tool, *tools.NVCCFLAGS, *tools.INCLUDE, f"-arch=compute_{arch}", "-ptx", str(SOURCE), "-o", "-"]
    return split(line, r"\.entry (\w+)")


def assembly(target):
    tools = setup_native()
    line = [HIPCC.tool, *tools.HIPFLAGS, *tools.INCLUDE, f"--offload-arch={target}", "-x", "hip"]
    return split([*line, "--cuda-device-only", "-S", str(SOURCE), "-o", "-"], r"-- Begin function (\w+)")


def split(line, start):
    done = run(line)
    assert done.returncode == 0, done.stderr[-2000:]
    parts = re.split(start, done.stdout)[1:]
    texts = dict(zip(parts[::2], parts[1::2], strict=True))
    return {name: texts[mangled] for mangled, name in readable(list(texts)).items()}


def with_prefix(kernels, prefix):
    found = [text for name, text in kernels.items() if name.startswith(prefix)]
    assert found
    return found


def needs(compiler):
    return pytest.mark.skipif(not compiler.installed(), reason=f"{compiler.name} is not installed")


@needs(NVCC)
def test_nvidia():
    kernels = ptx(80)
    assert all(re.search(MMA, text) for text in with_prefix(kernels, MATRIX))
    for prefix in (DOT, ROW):
        assert all("dp4a.s32.s32" in text for text in with_prefix(kernels, prefix))
    weights = r"ld\.global[.\w]*\.v4\.(?:b32|u32)"  # 16 bytes at a time
    assert all(re.search(weights, text) for text in with_prefix(kernels, ROW))
    assert not any("fma." in text for text in kernels.values())


@needs(NVCC)
def test_before_the_matrix_unit():
    kernels = ptx(75)
    assert not any("mma." in text for text in kernels.values())
    assert all(len(text) < 2000 for text in with_prefix(kernels, MATRIX))  # empty, and never launched
    assert all("dp4a.s32.s32" in text for text in with_prefix(kernels, DOT))


@needs(HIPCC)
@pytest.mark.parametrize("target", HIPCC.targets)
def test_amd(target):
    kernels = assembly(target)
    for prefix in (DOT, ROW):
        assert all(re.search(r"v_dot4c?_i32_i8", text) for text in with_prefix(kernels, prefix))
    matrix = [bool(re.search(r"v_mfma_i32_16x16x16_?i8", text)) for text in with_prefix(kernels, MATRIX)]
    assert all(matrix) if target.startswith("gfx9") else not any(matrix)
