"""Public bug reports about int8 elsewhere, and the tests that hold their inputs with the right answer here.

Number in our list (A: public reports; B: faults found by running or reading other projects; C: inputs that any
implementation should see); what it is; tests. A case without a test says why it needs none.
"""

import pytest

import reports

QUANT, MEMORY, NORMS, GATES = (f"test_quantize{x}.py" for x in ("", "_memory", "_norms", "_gates"))
LINEAR, PRODUCTS, LINEAR_EMU = "test_linear.py", "test_linear_cases.py", "test_linear_emulator.py"
WRITES, FORMS = "test_attention_writes.py", "test_attention_forms.py"
EMULATOR, BUILD, REGISTRY = "test_emulator.py", "test_build.py", "test_registry.py"

TIES = [(file, "test_ties_round_to_even") for file in (QUANT, NORMS, GATES)]
LENGTHS = [(file, "test_every_length_between_guard_pages") for file in (MEMORY, NORMS, GATES)]
COUNTS = [(file, "test_every_number_of_rows") for file in (MEMORY, NORMS, GATES)]
STRIDES = [(file, "test_rows_any_distance_apart") for file in (MEMORY, NORMS, GATES)]
FAR_ROWS = [(file, "test_offsets_need_64_bits") for file in (MEMORY, NORMS, GATES)]
ALONE = [(file, "test_a_row_depends_on_nothing_else") for file in (MEMORY, NORMS, GATES)]
SPECIAL = [(file, "test_zero_rows_and_bad_values_stay_in_their_row") for file in (NORMS, GATES)]

REPORTS = {
    # Zero rows, equal rows, tiny rows
    "A1": (
        "ROCm/aiter 4288: zero rows, memory behind the row",
        (QUANT, "test_zero_rows"),
        (QUANT, "test_memory_behind_the_row_does_not_matter"),
    ),
    "A2": ("kernels-community 681", (QUANT, "test_zero_group_among_others")),
    "A3": (
        "flashinfer 5031: only in the fast-math build",
        (QUANT, "test_zero_rows"),
        (QUANT, "test_no_build_may_change_the_arithmetic"),
    ),
    "A5": (
        "openvino 28326",
        (QUANT, "test_asymmetric"),
        (QUANT, "test_asymmetric_constant_row_keeps_its_value"),
    ),
    "A6": ("tpu-inference 1694", (PRODUCTS, "test_a_zero_row_gives_the_bias_and_changes_nothing_else")),
    # Offsets beyond 32 bits
    "A7": ("vllm 9391, 9425", (MEMORY, "test_offsets_need_64_bits"), (EMULATOR, "test_offsets_beyond_32_bits")),
    "A8": ("vllm 53390", (GATES, "test_offsets_need_64_bits")),
    "A9": ("vllm 42860, 42862, 43390", (NORMS, "test_offsets_need_64_bits"), (GATES, "test_offsets_need_64_bits")),
    # Rounding
    "A10": (
        "vllm 45361",
        (QUANT, "test_rounds_and_does_not_truncate"),
        (WRITES, "test_codes_are_rounded_and_not_cut"),
    ),
    "A11": ("sglang 4396", (MEMORY, "test_equals_the_reference"), (QUANT, "test_one_division_and_no_reciprocal")),
    "A12": ("sglang-jax 1598, pytorch 105109, vllm-ascend 7492", (QUANT, "test_rounds_and_does_not_truncate")),
    "A13": ("ROCm/aiter 4637", (QUANT, "test_saturates")),
    "A15": ("onnxruntime 25045, torch-xpu-ops 5349, tt-metal 56525", *TIES),
    # Strides, alignment, lengths
    "A16": ("vllm 19452, 31637, 19630, 21961", *STRIDES),
    "A17": (
        "FBGEMM 2919: a strided last dimension is refused",
        (MEMORY, "test_strided_last_dimension_is_refused"),
        (MEMORY, "test_leading_dimensions"),
    ),
    "A19": ("vllm 45466", (MEMORY, "test_any_alignment"), (MEMORY, "test_rows_any_distance_apart")),
    "A20": ("sglang 8543, 12883, 35593, 7448", *LENGTHS),
    "A21": ("vllm-xpu-kernels 609", *((file, "test_nothing_to_do") for file in (MEMORY, NORMS, GATES))),
    "A23": (
        "mlxcel 648: a grid is at most 2^20 blocks, which walk over the rows; no product of sizes is one",
        (EMULATOR, "test_offsets_beyond_32_bits"),
        *COUNTS,
    ),
    # Products
    "A24": (
        "pytorch 136746, optimum-quanto 319, oneDNN 717",
        (PRODUCTS, "test_largest_products"),
        (PRODUCTS, "test_integer_sums_are_exact_at_every_length"),
        (LINEAR, "test_extreme_codes"),
    ),
    "A25": (
        "onnxruntime 6004, rten 1046",
        (PRODUCTS, "test_largest_products"),
        (PRODUCTS, "test_one_row_is_a_row_of_many"),
    ),
    "A26": ("ggml 1393", (PRODUCTS, "test_largest_products")),
    "A27": ("ik_llama.cpp 427", (PRODUCTS, "test_largest_products")),
    "A28": ("pytorch 158341", (LINEAR, "test_rows_far_apart")),
    "A30": (
        "llama.cpp 25221",
        (QUANT, "test_tiny_and_huge_rows"),
        (PRODUCTS, "test_tiny_rows_are_zero_and_not_infinite"),
    ),
    "A31": ("bitsandbytes 1868, accelerate 1104", (PRODUCTS, "test_sums_beyond_half_precision")),
    "A32": ("pytorch/ao 1662", (PRODUCTS, "test_sums_beyond_half_precision")),
    "A33": ("pytorch/ao 3664, 3819, 4326, 4362, 4534", (QUANT, "test_small_bf16_rows_use_the_whole_range")),
    "A34": (
        "comfy-kitchen 60",
        (QUANT, "test_subnormal_values_keep_their_ratio"),
        (QUANT, "test_stochastic_keeps_integers_and_the_mean"),
    ),
    "A35": ("comfy-kitchen 100", (QUANT, "test_stochastic_chunks_equal_the_whole")),
    "A37": (
        "pytorch/ao 1317, 4160: a symmetric call with a zero point is refused; zeros change nothing",
        (QUANT, "test_a_zero_point_belongs_to_a_given_asymmetric_scale"),
    ),
    "A39": ("bitsandbytes 1885, 2059, sglang 3702, vllm 39513", (QUANT, "test_neighbouring_groups_do_not_mix")),
    "A40": (
        "bitsandbytes 1934, 2018: no hipBLASLt here",
        (PRODUCTS, "test_many_rows_few_channels"),
        (PRODUCTS, "test_any_number_of_channels"),
        (PRODUCTS, "test_integer_sums_are_exact_at_every_length"),
    ),
    "A41": (
        "pytorch/ao 2376, pytorch 178469, keras 19207",
        (PRODUCTS, "test_any_number_of_rows"),
        (PRODUCTS, "test_any_number_of_channels"),
        (PRODUCTS, "test_no_rows_and_no_channels"),
    ),
    "A42": (
        "vllm 54311, 54316, 28856: a module says for itself what it can run on",
        (BUILD, "test_a_gpu_module_is_usable_or_says_why_not"),
        (BUILD, "test_cuda_architectures"),
        (REGISTRY, "test_every_backend_says_whether_it_is_built_usable_and_why_not"),
    ),
    "A43": ("vllm 56924, llm-compressor 2549: about time; bench/bench_int8.py measures rows 1 to 16 side by side",),
    "A44": (
        "vllm 42379, 44694, 48324, 48330, 48391",
        (NORMS, "test_fused_equals_unfused"),
        (NORMS, "test_weight_multiplies_the_rounded_value"),
        (NORMS, "test_a_row_depends_on_nothing_else"),
        (NORMS, "test_refusals"),
    ),
    "A45": ("TensorRT-LLM 133, 254, 644, 967, 1303", (WRITES, "test_keys_and_values_have_scales_of_their_own")),
    "A48": (
        "onnxruntime 29849: documented in quantize_int8; smaller groups and rotated weights help",
        (QUANT, "test_massive_activation"),
        (LINEAR, "test_rotation_spreads_an_outlier"),
    ),
    "A49": ("oneDNN 5557", (PRODUCTS, "test_the_bias_is_added_and_not_truncated")),
    "A50": (
        "vllm 24763",
        (BUILD, "test_no_compiler_costs_speed_only"),
        (LINEAR, "test_same_bits_on_every_instruction_set"),
    ),
    "A51": (
        "llama.cpp 25493, 25557: symmetric codes are -127..127; products take -128, too",
        (QUANT, "test_saturates"),
        (LINEAR, "test_extreme_codes"),
    ),
    "A52": (
        "neural-speed 174, pytorch 148494: about time; the benches sweep buffers larger than the last-level cache",
    ),
    # Found in other projects
    "B1": ("torch _weight_int8pack_mm: K % 8", (PRODUCTS, "test_integer_sums_are_exact_at_every_length")),
    "B2": ("torch _weight_int8pack_mm: alignment", (PRODUCTS, "test_rows_that_start_anywhere")),
    "B3": ("torch onednn.qlinear_pointwise", (PRODUCTS, "test_largest_products")),
    "B4": ("torch linear_dynamic(reduce_range=False)", (PRODUCTS, "test_largest_products")),
    "B5": (
        "torch quantize_per_tensor",
        (QUANT, "test_zero_point_is_added_after_rounding"),
        (QUANT, "test_saturates"),
    ),
    "B6": ("vLLM: azp on GPU and CPU", (QUANT, "test_zero_point_is_added_after_rounding")),
    "B8": ("vLLM CPU: zero rows", (QUANT, "test_zero_rows")),
    "B9": ("vLLM CPU: reads behind the last row", *LENGTHS),
    "B10": (
        "vLLM CPU: one long row on one thread. 16,384 values take 2 us here, less than to wake a second one",
        *ALONE,
    ),
    "B11": ("vLLM GPU: constant rows", (QUANT, "test_asymmetric_constant_row_keeps_its_value")),
    "B12": ("vLLM: a zero row's scale", (QUANT, "test_zero_rows"), *SPECIAL),
    "B13": ("vLLM: NaN disappears", (QUANT, "test_nan_and_inf_stay_visible_and_in_their_row"), *SPECIAL),
    "B14": ("vLLM and SGLang Triton: row * stride", *FAR_ROWS),
    "B16": ("vLLM CUTLASS: merges the zero points of several matrices. Nothing here merges any",),
    "B17": ("lmdeploy", (WRITES, "test_special_heads"), *SPECIAL, *STRIDES),
    "B18": ("lightllm", (WRITES, "test_codes_are_rounded_and_not_cut"), (WRITES, "test_special_heads")),
    "B19": ("bitsandbytes int8_mm_dequant", (PRODUCTS, "test_a_product_of_ones_is_one")),
    "B20": ("bitsandbytes int8_linear_matmul", (PRODUCTS, "test_large_codes_do_not_pass_through_floats")),
    "B21": (
        "bitsandbytes int8_vectorwise_quant",
        (MEMORY, "test_leading_dimensions"),
        (MEMORY, "test_inputs_are_not_modified"),
    ),
    "B22": ("torchao Int8Tensor.from_hp", (MEMORY, "test_nothing_to_do")),
    "B24": ("SGLang CPU quantize_row_int8", *TIES, *LENGTHS),
    "B25": ("TensorRT-LLM perTokenQuantization", *FAR_ROWS, *LENGTHS),
    "B27": ("ggml q8_0: the stored scale is the one that was used, in f32", (QUANT, "test_tiny_and_huge_rows")),
    "B28": ("CTranslate2: scale is what codes are multiplied by", (QUANT, "test_round_trip")),
    "B29": ("aiter HIP", (QUANT, "test_zero_rows"), (QUANT, "test_saturates")),
    # Inputs for any implementation
    "C1": ("ties", *TIES, (WRITES, "test_ties_go_to_the_even_code")),
    "C2": ("zero rows anywhere, -0, a zero group", (QUANT, "test_zero_rows"), (QUANT, "test_zero_group_among_others")),
    "C3": ("from 1e-45 to FLT_MAX", (QUANT, "test_tiny_and_huge_rows")),
    "C4": (
        "NaN and Inf in any lane",
        (QUANT, "test_nan_and_inf_stay_visible_and_in_their_row"),
        (QUANT, "test_nan_wins_over_inf_and_stays_in_its_group"),
        *SPECIAL,
    ),
    "C5": ("lengths, numbers of rows, guard pages", *LENGTHS, *COUNTS),
    "C6": (
        "offsets and strides",
        *((file, "test_any_alignment") for file in (MEMORY, NORMS, GATES)),
        *STRIDES,
        (MEMORY, "test_strided_last_dimension_is_refused"),
    ),
    "C7": (
        "given scales and zero points",
        (QUANT, "test_bad_scale_is_refused"),
        (QUANT, "test_saturates"),
        (QUANT, "test_zero_point_is_added_after_rounding"),
        (QUANT, "test_range_far_from_zero"),
    ),
    "C8": ("round trip", (QUANT, "test_round_trip")),
    "C9": (
        "products of every length; one whose sum could leave int32 is refused",
        (PRODUCTS, "test_integer_sums_are_exact_at_every_length"),
        (PRODUCTS, "test_largest_products"),
        (LINEAR, "test_alternating_signs_cancel"),
        (LINEAR, "test_a_sum_that_might_not_be_exact_is_refused"),
    ),
    "C10": (
        "a row of a product alone",
        (PRODUCTS, "test_one_row_is_a_row_of_many"),
        (LINEAR, "test_a_row_depends_on_that_row_alone"),
        (LINEAR_EMU, "test_a_row_depends_on_that_row_alone"),
    ),
    "C11": (
        "stochastic rounding",
        (QUANT, "test_stochastic_chunks_equal_the_whole"),
        (QUANT, "test_stochastic_keeps_integers_and_the_mean"),
    ),
    "C12": (
        "cache writes",
        (WRITES, "test_slots"),
        (FORMS, "test_head_sizes"),
        (FORMS, "test_strides_of_the_cache_change_no_bit"),
    ),
    "C13": ("asymmetric", (QUANT, "test_asymmetric"), (QUANT, "test_asymmetric_constant_row_keeps_its_value")),
}


@pytest.mark.parametrize("number", REPORTS)
def test_the_tests_exist(number):
    what, *where = REPORTS[number]
    reports.check(what, where)
