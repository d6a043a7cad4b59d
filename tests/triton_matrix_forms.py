"""The forms of the matrix product and of attention that triton_aot.py compiles."""

import torch


def matrix_forms(form):
    return [*linear_forms(form), *attention_forms(form)]


def linear_forms(form):
    """Groups of 64 and one scale per row; float rows quantised in the prologue and rows of codes."""
    from specdec_kernels.triton_kernels.linear import int8_dots, linear_kernel, rows_together, sum_kernel
    from specdec_kernels.triton_kernels.rotation import rotate_quantize_kernel

    types = {
        "codes": "*u8", "w_scale": "*fp32", "x_scale": "*fp32", "bias": "*bf16", "out": "*bf16", "q": "*i8",
        "scale": "*fp32", "parts": None, "part_scale": None,
        "S": 4, "K": 64, "LONG": False, "STAGES": 0, "INT8": int8_dots,
        **dict.fromkeys(("x_stride", "out_stride", "stride", "n", "group", "steps"), "i32:16"),
    }  # fmt: skip
    prologue = {**types, "x": "*bf16", "x_scale": None}
    pair = {**types, "x": "*i8", "ROWS": 16}
    split = {**types, "parts": "*i32", "part_scale": "*fp32", "LONG": True}
    return [
        form("linear 1 row", linear_kernel, 128, **prologue, ROWS=1),
        form("linear 1 row rotated", linear_kernel, 128, **prologue | {"STAGES": 6}, ROWS=1),
        form("linear 4 rows f32", linear_kernel, 128, **prologue | {"x": "*fp32", "out": "*fp32"}, ROWS=4),
        form("linear 16 rows of codes", linear_kernel, 128, **pair),
        form(
            "linear many rows of codes",
            linear_kernel,
            128,
            **pair | {"ROWS": lambda t: rows_together(99, int8_dots(t))},
        ),
        form("linear 1 row split", linear_kernel, 128, **split | {"x": "*bf16", "x_scale": None}, ROWS=1),
        form("linear 16 rows of codes split", linear_kernel, 128, **split | pair | {"LONG": True}),
        form("linear sum of splits", sum_kernel, 128, **types | {"parts": "*i32", "C": 256}),
        form(
            "rotate and quantize", rotate_quantize_kernel, 128, **types | {"x": "*bf16", "B": 16, "L": 64, "STAGES": 6}
        ),
    ]


def attention_forms(form):
    """Heads of 64 and 128; int8, 16-bit and float32 caches."""
    from specdec_kernels.triton_kernels.attention import attend_kernel, combine_kernel, tile, types

    names = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "i8"}

    def case(rows, cache, dim, **more):
        strides = (f"{t}_{of}" for t in ("k", "v") for of in ("page", "slot", "head"))
        given = {
            "q": f"*{names[rows]}", "out": f"*{names[rows]}", "k_cache": f"*{names[cache]}",
            "v_cache": f"*{names[cache]}", "k_scale": "*fp32", "v_scale": "*fp32", "page_table": "*i32",
            "lengths": "*i32", "mask": None, "scale": "fp32", "values": "*fp32", "sums": "*fp32",
            **dict.fromkeys(("q_batch", "q_row", "page_size", *strides), "i32:16"),
            "D": dim, "DV": dim, "WIDE": dim, "WIDE_V": dim,
        }  # fmt: skip
        if cache is not torch.int8:
            given |= {"k_scale": None, "v_scale": None}
        for i, name in enumerate(("HALF", "HALF_V", "LIKE")):
            given[name] = lambda target, i=i: types(rows, cache, target)[i]
        given["TILE"] = lambda target: tile(types(rows, cache, target)[0], target)
        return given | more

    bf16, f16, f32, i8 = torch.bfloat16, torch.float16, torch.float32, torch.int8
    alone = {"values": None, "sums": None}
    return [
        form("attend bf16 int8 64", attend_kernel, 256, **case(bf16, i8, 64)),
        form("attend bf16 int8 128", attend_kernel, 256, **case(bf16, i8, 128)),
        form("attend f16 int8 128 one part with mask", attend_kernel, 256, **case(f16, i8, 128, mask="*i1", **alone)),
        form("attend bf16 128", attend_kernel, 256, **case(bf16, bf16, 128)),
        form("attend f32 int8 128", attend_kernel, 256, **case(f32, i8, 128)),
        form("attend f32 64 one part", attend_kernel, 256, **case(f32, f32, 64, **alone)),
        form("attend combine", combine_kernel, 128, **case(bf16, i8, 128, TOGETHER=8)),
    ]
