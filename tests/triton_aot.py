"""Every Triton kernel compiled ahead of time for GPUs that need not be there.

    python tests/triton_aot.py                    # one NVIDIA and one AMD target
    python tests/triton_aot.py sm_75,sm_90,gfx942      # others

``compile_all(targets)`` returns rows of gpu_compilers.py. The process must not be
in interpreter mode. ``forms()`` is the list of what is compiled: every kernel in every form whose code differs much.
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
from gpu_compilers import Kernel  # noqa: E402
from triton_matrix_forms import matrix_forms  # noqa: E402
from triton_row_forms import row_forms  # noqa: E402

TARGETS = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100")


class Form(NamedTuple):
    """A kernel and, by argument name, the type of each argument, or its value where it is a constant or None.

    Pointers are multiples of 16, as torch's are; integers of type "i32:16", too. A constant may be a
    function of the target.
    """

    name: str
    kernel: object
    arguments: dict
    threads: int


# Types of the kernels' arguments by their names; others are integers.
TYPES = {
    "target_stats": "*fp32", "draft_stats": "*fp32", "stats": "*fp32", "logprobs": "*fp32",
    "target_settled": "*fp64", "draft_settled": "*fp64", "settled": "*fp64",
    "target_listed": "*i32", "draft_listed": "*i32", "draft_kind": "*i1", "draft_ids": "*i32", "cu_drafts": "*i32",
    "draft_tokens": "*i64", "tokens": "*i64", "num_accepted": "*i32", "all_flags": "*i32",
    "seeds": "*i64", "positions": "*i64", "indices": "*i32",
    "temperature": "fp32", "top_p": "fp32", "min_p": "fp32", "theta": "fp32", "eps": "fp32", "delta": "fp32",
    "temperatures": "*fp32", "thetas": "*fp32", "top_ks": "*i32", "top_ps": "*fp32", "min_ps": "*fp32",
    "tree_tokens": "*i64", "parents": "*i32", "cu_nodes": "*i32", "bounds": "*i32", "path": "*i32",
    "links": "*i32", "state": "*fp64",
    "target_stride": "i64", "draft_stride": "i64", "stride": "i64",
}  # fmt: skip
CONSTANTS = {
    "G": 4096, "DRAFT_G": 4096, "WIDTH": 8, "TILE": 64,  # rows of 152k ids, up to 7 drafts
    "FIELDS": 3, "PROBS": False, "ALL": False, "ENTROPY": False, "RULE": "token",
}  # fmt: skip
NO_DRAFTS = dict.fromkeys(("drafts", "draft_stats", "draft_settled", "draft_listed", "draft_kind", "draft_ids"))
NO_FILTERS = dict.fromkeys(("target_settled", "draft_settled", "settled"))


def form(name, kernel, threads, **given):
    known = {**TYPES, **CONSTANTS, **given}
    return Form(name, kernel, {argument: known.get(argument, "i32") for argument in kernel.arg_names}, threads)


def forms():
    from specdec_kernels.triton_kernels.chain import verify_kernel
    from specdec_kernels.triton_kernels.plain import sample_kernel
    from specdec_kernels.triton_kernels.settle import settle_kernel
    from specdec_kernels.triton_kernels.survey import survey_kernel
    from specdec_kernels.triton_kernels.tree import verify_tree_kernel
    from specdec_kernels.verify import RULES
    from specdec_kernels.verify_tree import RULES as TREE_RULES

    probs = {"target": "*bf16", "drafts": "*fp32", "PROBS": True, "draft_settled": None}
    points = {"target": "*bf16", **NO_DRAFTS, **NO_FILTERS, "FIELDS": 2}
    logits = {"target": "*fp16", "drafts": "*fp16"}
    rows = {dtype: {"target": f"*{dtype}", "drafts": f"*{dtype}"} for dtype in ("fp32", "fp16", "bf16")}
    return [
        *(form(f"survey {dtype}", survey_kernel, 128, **rows[dtype]) for dtype in rows),
        form("survey draft_probs", survey_kernel, 128, **probs),
        form("settle", settle_kernel, 512, **logits),
        form("settle typical", settle_kernel, 512, **points | {"target_settled": "*fp64"}, ENTROPY=True),
        form("verify draft_logits", verify_kernel, 512, **logits),
        *(form(f"verify {rule} draft_probs", verify_kernel, 512, **probs, RULE=rule) for rule in RULES),
        form("verify points", verify_kernel, 512, **points),
        form("verify greedy", verify_kernel, 512, **points, seeds=None, positions=None),
        *(form(f"verify_tree {rule} draft_probs", verify_tree_kernel, 512, **probs, RULE=rule) for rule in TREE_RULES),
        form("verify_tree points", verify_tree_kernel, 512, **points),
        form("sample", sample_kernel, 512, logits="*bf16"),
        form("sample unfiltered", sample_kernel, 512, logits="*bf16", **NO_FILTERS),
        *matrix_forms(form),
        *row_forms(form),
    ]


def compile_form(form, target):
    """Triton's compiled kernel of one form for one target, "sm_90" or "gfx942"."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from specdec_kernels.triton_kernels.launch import compiler_options

    if target.startswith("gfx"):
        gpu = GPUTarget("hip", target, 32 if target.startswith("gfx1") else 64)
    else:
        gpu = GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    arguments = {name: kind(gpu) if callable(kind) else kind for name, kind in form.arguments.items()}
    constants = {name: kind for name, kind in arguments.items() if name.isupper() or kind is None}
    signature = {name: "constexpr" if name in constants else kind for name, kind in arguments.items()}
    places = (i for i, kind in enumerate(signature.values()) if kind.startswith("*") or kind.endswith(":16"))
    aligned = {(i,): [["tt.divisibility", 16]] for i in places}
    signature = {name: kind.removesuffix(":16") for name, kind in signature.items()}
    options = compiler_options(form.kernel, form.threads, gpu, form.arguments.get("RULE"))
    source = ASTSource(form.kernel, signature, constants, aligned)
    return triton.compile(source, target=gpu, options=options)


def resources(name, target, compiled):
    """A row of the table: registers per thread, bytes spilled, bytes of shared memory."""
    shared = compiled.metadata.shared
    if target.startswith("gfx"):
        number = {
            key: int(re.search(rf"\.{key}:\s+(\d+)", compiled.asm["amdgcn"])[1])
            for key in ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size")
        }
        spilled = 4 * number["vgpr_spill_count"] + number["private_segment_fixed_size"]
        return _row(target, name, number["vgpr_count"], shared, spilled)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        said = subprocess.run(
            [_cuobjdump(), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    usage = dict(re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", said.stdout))
    return _row(target, name, int(usage["REG"]), shared, int(usage["STACK"]) + int(usage["LOCAL"]))


def _row(*facts):
    import triton

    return Kernel("triton", *facts, triton.__version__)


def _cuobjdump():
    from triton import knobs

    return knobs.nvidia.cuobjdump.path


def compile_each(targets):
    assert os.environ.get("TRITON_INTERPRET") != "1", "an interpreted kernel can't be compiled"
    for target in targets:
        for each in forms():
            yield resources(each.name, target, compile_form(each, target))


def compile_all(targets=TARGETS):
    """The resources of every form for every target."""
    return list(compile_each(targets))


def main():
    targets = sys.argv[1].split(",") if len(sys.argv) > 1 else ("sm_90", "gfx942")
    print(f"{'target':10}{'registers':>10}{'spilled':>9}{'shared':>8}  kernel")
    for k in compile_each(targets):
        print(f"{k.target:10}{k.registers:10}{k.spilled:9}{k.shared:8}  {k.name}", flush=True)


if __name__ == "__main__":
    main()
