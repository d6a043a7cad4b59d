"""Every Triton kernel compiled ahead of time for GPUs that need not be there.

    python tests/triton_aot.py                    # one NVIDIA and one AMD target
    python tests/triton_aot.py 75,90,gfx942       # others

``compile_all(targets)`` returns rows (target, name, registers, spilled, shared) as in gates.py. The process must not be
in interpreter mode. ``KERNELS`` is the list of what is compiled: every kernel in every form whose code differs.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from gates import Kernel  # noqa: E402

TARGETS = ("75", "80", "90", "100", "120", "gfx90a", "gfx942", "gfx950", "gfx1100")
LIMITS = {"gfx": 64 * 1024, "sm": 48 * 1024}  # bytes of shared memory that every launch may have


class Form(NamedTuple):
    """A kernel with the types of its arguments; None = the argument is None, an int or bool = a constant."""

    name: str
    kernel: object
    types: dict
    warps: int


def _types(kernel, **given):
    """The type of every argument of the kernel, by its name where it is not given."""
    types = {}
    for name in kernel.arg_names:
        if name in given:
            types[name] = given[name]
        elif name in POINTERS:
            types[name] = POINTERS[name]
        elif name in ("temperature", "top_p", "min_p"):
            types[name] = "fp32"
        elif name.endswith("stride"):
            types[name] = "i64"
        else:
            types[name] = "i32"
    return types


POINTERS = {
    "target_stats": "*fp32", "draft_stats": "*fp32", "stats": "*fp32", "logprobs": "*fp32",
    "target_settled": "*fp64", "draft_settled": "*fp64", "settled": "*fp64",
    "target_listed": "*i32", "draft_listed": "*i32", "draft_kind": "*i1", "draft_ids": "*i32", "cu_drafts": "*i32",
    "draft_tokens": "*i64", "tokens": "*i64", "num_accepted": "*i32", "all_flags": "*i32",
    "seeds": "*i64", "positions": "*i64", "indices": "*i32",
    "temperatures": "*fp32", "top_ks": "*i32", "top_ps": "*fp32", "min_ps": "*fp32",
}  # fmt: skip
NO_DRAFTS = dict.fromkeys(
    ("drafts", "draft_stats", "draft_settled", "draft_listed", "draft_kind", "draft_ids")
)
NO_FILTERS = {"target_settled": None, "draft_settled": None, "settled": None}


def forms():
    """Every form that is compiled. 152k ids: 4096 padded groups."""
    from specdec_kernels.triton_kernels import chain, plain, settle, survey

    big = dict(G=4096, DRAFT_G=4096, WIDTH=8, TILE=64)
    found = []

    def add(name, kernel, warps, **given):
        found.append(Form(name, kernel, _types(kernel, **given), warps))

    for dtype in ("*fp32", "*fp16", "*bf16"):
        tail = dtype.removeprefix("*")
        add(f"survey.{tail}", survey.survey_kernel, 4, target=dtype, drafts=dtype, DRAFT_PROBS=False, LOGPROBS=True, TILE=64)
        add(f"settle.{tail}", settle.settle_kernel, 8, target=dtype, drafts=dtype, LOGPROBS=True, **_for(settle.settle_kernel, big))
        add(f"verify.logits.{tail}", chain.verify_kernel, 8, target=dtype, drafts=dtype, DRAFT_PROBS=False, **_for(chain.verify_kernel, big))
    add("survey.probs", survey.survey_kernel, 4, target="*bf16", drafts="*fp32", DRAFT_PROBS=True, LOGPROBS=False, TILE=64)
    add("verify.probs", chain.verify_kernel, 8, **{**_for(chain.verify_kernel, big), **NO_FILTERS, "target": "*bf16", "drafts": "*fp32", "DRAFT_PROBS": True})
    add("verify.points", chain.verify_kernel, 8, **{**_for(chain.verify_kernel, big), **NO_DRAFTS, **NO_FILTERS, "target": "*bf16", "DRAFT_PROBS": True})
    add("sample", plain.sample_kernel, 8, logits="*bf16", G=4096, settled=None)
    add("sample.filtered", plain.sample_kernel, 8, logits="*bf16", G=4096)
    return found


def _for(kernel, constants):
    return {name: value for name, value in constants.items() if name in kernel.arg_names}


def compile_form(form, target):
    """Triton's compiled kernel of one form for one target, "90" or "gfx942"."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if target.startswith("gfx"):
        gpu = GPUTarget("hip", target, 32 if target.startswith("gfx1") else 64)
    else:
        gpu = GPUTarget("cuda", int(target), 32)
    signature = {name: kind if isinstance(kind, str) else "constexpr" for name, kind in form.types.items()}
    constants = {name: kind for name, kind in form.types.items() if not isinstance(kind, str)}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(form.types.values()) if str(kind).startswith("*")}
    source = ASTSource(form.kernel, signature, constants, aligned)
    return triton.compile(source, target=gpu, options={"num_warps": form.warps, "enable_fp_fusion": False})


def resources(name, target, compiled):
    """A row of the table: registers per thread, bytes spilled, bytes of shared memory."""
    label = target if target.startswith("gfx") else f"sm_{target}"
    shared = compiled.metadata.shared
    if target.startswith("gfx"):
        number = {
            key: int(re.search(rf"\.{key}:\s+(\d+)", compiled.asm["amdgcn"])[1])
            for key in ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size")
        }
        spilled = 4 * number["vgpr_spill_count"] + number["private_segment_fixed_size"]
        return Kernel(label, name, number["vgpr_count"], spilled, shared)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        said = subprocess.run([_cuobjdump(), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    usage = dict(re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", said.stdout))
    return Kernel(label, name, int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"]), shared)


def _cuobjdump():
    from triton import knobs

    return knobs.nvidia.cuobjdump.path


def compile_all(targets=TARGETS):
    """The resources of every form for every target."""
    assert os.environ.get("TRITON_INTERPRET") != "1", "an interpreted kernel can't be compiled"
    return [resources(form.name, target, compile_form(form, target)) for target in targets for form in forms()]


def main():
    targets = sys.argv[1].split(",") if len(sys.argv) > 1 else ("90", "gfx942")
    print(f"{'target':10}{'registers':>10}{'spilled':>9}{'shared':>8}  kernel")
    for kernel in compile_all(targets):
        print(f"{kernel.target:10}{kernel.registers:10}{kernel.spilled:9}{kernel.shared:8}  {kernel.name}")


if __name__ == "__main__":
    main()
