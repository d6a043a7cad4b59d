"""What triton_aot.py compiles of the int8 operations on rows: quantise, norms, gates, rotary writes, lookups."""

# Types of arguments by their names, before those of triton_aot.py; "i32:16" is divisible by 16.
TYPES = {
    "q": "*i8", "scale": "*fp32", "zero_point": "*i32", "sums": "*i32", "seed": "i64", "offset": "i64", "eps": "i64",
    **dict.fromkeys(("x_stride", "q_stride", "residual_stride", "residual_out_stride", "out_stride", "stride",
                     "scale_stride", "sums_stride", "group", "groups", "cols", "k_stride", "v_stride", "k_page",
                     "k_place", "k_head", "v_page", "v_place", "v_head", "dim", "values", "cos_stride", "sin_stride",
                     "steps"), "i32:16"),
    "LONG": False, "SYMMETRIC": True, "STATIC": False, "RANDOM": False, "ALIGNED": False, "B": 1, "SOURCE": "plain",
}  # fmt: skip
POINTERS = {"fp32": "*fp32", "fp16": "*fp16", "bf16": "*bf16"}


def row_forms(form):
    """``form``: triton_aot.form."""
    from specdec_kernels.triton_kernels import rope, tiles
    from specdec_kernels.triton_kernels.expansion import PIECE, expand_kernel
    from specdec_kernels.triton_kernels.gates import gate_kernel
    from specdec_kernels.triton_kernels.norms import norm_kernel
    from specdec_kernels.triton_kernels.quantize import dequantize_kernel, quantize_kernel
    from specdec_kernels.triton_kernels.rows import rows_kernel

    def tile(length, *longest):
        return dict(zip(("B", "L", "threads"), tiles.tile(length, *longest), strict=True))

    def int8_form(name, kernel, threads, **given):
        return form(name, kernel, threads, **{**TYPES, **given})

    plain = {"zero_point": None, "sums": None}
    asymmetric = {"SYMMETRIC": False, "sums": None, "x": "*bf16"}
    norm = {"residual": "*bf16", "residual_out": "*bf16", "weight": "*bf16", "x": "*bf16", "CENTRED": False}
    quantising = {**norm, "bias": None, "out": "*i8", "sums": None}
    plain_norm = {**norm, "out": "*bf16", "scale": None, "sums": None, "GROUP": 0}
    heads = dict(zip(("HEADS", "HALF", "VALUES"), rope.tile(128, 128), strict=True))
    write = {
        **heads, **dict.fromkeys("qkv", "*bf16"), "cos": "*fp32", "sin": "*fp32", "slots": "*i64", "last": None,
        "tokens": "i32", "SCAN": 256, "Q_FACTOR": 0.125, "K_FACTOR": 0.0625, "STAGES": 0,
        "k_cache": "*i8", "v_cache": "*i8", "k_scale": "*fp32", "v_scale": "*fp32",
    }  # fmt: skip
    floats = {"k_cache": "*bf16", "v_cache": "*bf16", "k_scale": None, "v_scale": None}
    row = {"ids": "*i64", "codes": "*u8", "out": "*fp32", "PANEL": 16, "STEP": 4}
    half = {**row, "out": "*bf16"}
    return [
        *(int8_form(f"quantize {t} groups", quantize_kernel, **tile(64), **plain, x=p) for t, p in POINTERS.items()),
        int8_form("quantize row", quantize_kernel, **tile(4096), **plain, x="*bf16"),
        int8_form("quantize longest row", quantize_kernel, **tile(1 << 14), **plain, x="*bf16"),
        int8_form("quantize long row", quantize_kernel, **tile(1 << 15), **plain, x="*bf16", LONG=True),
        int8_form("quantize odd rows", quantize_kernel, **tile(46), **plain, x="*bf16", x_stride="i32", group="i32"),
        int8_form("quantize asymmetric", quantize_kernel, **tile(64), **asymmetric),
        int8_form("quantize asymmetric sums", quantize_kernel, **tile(64), **{**asymmetric, "sums": "*i32"}),
        int8_form("quantize static asymmetric", quantize_kernel, **tile(64), **asymmetric, STATIC=True),
        int8_form("quantize stochastic", quantize_kernel, **tile(64), **plain, x="*bf16", RANDOM=True, ALIGNED=True),
        int8_form("quantize stochastic offset", quantize_kernel, **tile(64), **plain, x="*bf16", RANDOM=True),
        int8_form("dequantize", dequantize_kernel, **tile(64), zero_point=None, out="*bf16"),
        int8_form("dequantize asymmetric", dequantize_kernel, **tile(64), out="*bf16"),
        *(int8_form(f"{kind}_mul", gate_kernel, **tile(1024), gate_up="*bf16", out="*bf16", SOURCE=kind)
          for kind in ("silu", "gelu", "gelu_tanh")),
        *(int8_form(f"{kind}_mul quantize", quantize_kernel, **tile(4096), **plain, x="*bf16", SOURCE=kind)
          for kind in ("silu", "gelu", "gelu_tanh")),
        int8_form("rms_norm", norm_kernel, **tile(4096), **plain_norm, bias=None),
        int8_form("rms_norm long", norm_kernel, **tile(1 << 15), **plain_norm, bias=None, LONG=True),
        int8_form("rms_norm quantize row", norm_kernel, **tile(4096), **quantising, GROUP=4096),
        int8_form("rms_norm quantize groups", norm_kernel, **tile(4096), **quantising, GROUP=64),
        int8_form("rms_norm quantize short", norm_kernel, **tile(64), **quantising, GROUP=64),
        int8_form("rms_norm quantize longest", norm_kernel, **tile(1 << 14), **quantising, GROUP=1 << 14),
        int8_form("layer_norm quantize", norm_kernel, **tile(4096), **{**quantising, "bias": "*bf16", "CENTRED": True},
                  GROUP=64),
        int8_form("rope write int8", rope.rope_kernel, 128, **write),
        int8_form("rope write int8 hadamard", rope.rope_kernel, 128, **{**write, "STAGES": 7}),
        int8_form("rope write bf16", rope.rope_kernel, 128, **{**write, **floats}),
        int8_form("rope write int8, many tokens", rope.rope_kernel, 128, **{**write, "last": "*i32"}),
        int8_form("rope last tokens", rope.last_kernel, 128, **{**write, "last": "*i32"}, FIRST=False, N=256),
        int8_form("rows", rows_kernel, **tile(64), **row, STAGES=0),
        int8_form("rows rotated", rows_kernel, **tile(64), **row, STAGES=6),
        int8_form("rows rotated in long groups", rows_kernel, **tile(4096), **row, STAGES=12),
        int8_form("expand f32", expand_kernel, **tile(64, PIECE), **row, STAGES=0),
        int8_form("expand", expand_kernel, **tile(64, PIECE), **half, STAGES=0),
        int8_form("expand odd groups", expand_kernel, **tile(46, PIECE), **half, STAGES=0, group="i32", steps="i32"),
        int8_form("expand rotated", expand_kernel, **tile(64), **half, STAGES=6),
        int8_form("expand rotated in long groups", expand_kernel, **tile(4096), **half, STAGES=12),
    ]  # fmt: skip
