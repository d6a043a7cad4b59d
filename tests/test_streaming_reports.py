"""Public bug reports about streaming, loading and swapping weights elsewhere, and the tests that hold them here.

Number in our list (A ordering, B ties and types, C files, D memory, E processes, F swaps, G speculation); what it is;
tests. A case without a test says why it needs none.
"""

import pytest

import reports

STREAM, FAULTS, MEMORY, SLOTS = (f"test_{x}.py" for x in ("weight_stream", "stream_faults", "stream_memory", "slots"))
UPLOADS, PINNED, TORCH, ON_DEVICE = (f"test_{x}.py" for x in ("uploads", "pinned", "torch_device", "device_stream"))
SAFETENSORS, SHARDS, PACK, WRITER, MAPPING = (
    f"test_{x}.py" for x in ("safetensors", "shards", "pack", "pack_writer", "mapping")
)
READER, READER_ORDER, URING, PLAN = (f"test_{x}.py" for x in ("reader", "reader_order", "uring", "plan"))
FOLDER, MODEL, IN_PLACE = "test_huggingface.py", "test_streamed_model.py", "test_streamed_folder.py"
SWAP, SWAP_STREAMED, PRESSURE, KILLED = (f"test_{x}.py" for x in ("swap", "swap_streamed", "pressure", "killed"))
DRAFT = "test_model_draft.py"

EVERY_SOURCE = [
    (STREAM, "test_report_4_the_same_bits_whatever_reads_them"),
    (UPLOADS, "test_every_kind_of_host_memory"),
]

REPORTS = {
    # A. Order and waiting
    "A1": (
        "vllm 54975: numbers of blocks that slots do not divide",
        (STREAM, "test_report_1_every_number_of_blocks_and_slots"),
        (SLOTS, "test_report_1_every_block_is_read_once_whatever_the_remainder"),
        (UPLOADS, "test_a_streamed_pass_sees_what_a_resident_one_sees"),
    ),
    "A2": (
        "diffusers 11041, 11094, 11097",
        (STREAM, "test_report_2_orders_that_nobody_foresaw"),
        (STREAM, "test_report_2_a_model_that_skips_a_block_on_odd_passes"),
        (UPLOADS, "test_other_orders"),
    ),
    "A3": (
        "diffusers 12673, 12721",
        (STREAM, "test_report_3_a_slot_is_filled_again_only_after_its_block_was_used"),
        (STREAM, "test_report_3_a_block_that_was_kept_too_long_is_known"),
        (UPLOADS, "test_a_missing_wait_shows"),
    ),
    "A4": ("diffusers 14657", *EVERY_SOURCE, (UPLOADS, "test_a_missing_wait_shows")),
    "A5": (
        "diffusers 13502",
        (STREAM, "test_report_5_slow_reads_change_nothing_but_the_time"),
        (UPLOADS, "test_a_slow_reader_and_passes_that_end_early"),
    ),
    "A7": (
        "ComfyUI 10501",
        (STREAM, "test_report_7_tensors_outlive_the_stream"),
        (UPLOADS, "test_memory_outlives_the_tensors_of_a_block"),
    ),
    "A8": ("ComfyUI 10697", (UPLOADS, "test_conversions_come_behind_the_copy")),
    "A9": (
        "cache-dit 1111",
        (STREAM, "test_report_9_a_tied_matrix_is_read_once"),
        (UPLOADS, "test_a_tied_matrix_that_is_used_first_and_last"),
    ),
    "A10": ("llama.cpp 28414", (UPLOADS, "test_two_devices_and_budgets_around_the_size_of_a_slot")),
    "A11": (
        "vllm 37699: memory that is not page-locked goes by way of the ring",
        (UPLOADS, "test_every_kind_of_host_memory"),
        (UPLOADS, "test_shrinking_while_work_is_queued"),
    ),
    # B. Ties, buffers, types
    "B13": (
        "accelerate 2330",
        (STREAM, "test_report_9_a_tied_matrix_is_read_once"),
        (MODEL, "test_a_pass_reads_every_streamed_byte_once_whatever_its_rows"),
    ),
    "B14": ("accelerate 4083: weights are known by file and place, never by an address of a tensor",),
    "B15": ("transformers 46749", (FOLDER, "test_b15_ties"), (FOLDER, "test_b15_equal_heads_give_the_same_logits")),
    "B16": ("accelerate 1941, OpenRLHF 723", (FOLDER, "test_b16_buffers_that_are_computed")),
    "B17": (
        "compressed-tensors 731: whatever a block holds counts, in its own type",
        (WRITER, "test_c19_every_dtype_comes_back"),
        (PLAN, "test_a_budget_is_kept_and_the_smallest_one_is_exact"),
    ),
    "B19": (
        "accelerate 454, 460, 461, 4151",
        (WRITER, "test_c19_every_dtype_comes_back"),
        (FOLDER, "test_b19_weights_of_every_float"),
        (FOLDER, "test_b19_other_types_are_refused"),
    ),
    "B20": ("vllm prefetch", (WRITER, "test_c19_every_dtype_comes_back")),
    "B23": ("diffusers 13276: a block is bytes; an Int8Weight is two views of them, a tensor subclass is refused",),
    # C. Files
    "C24": (
        "vmlx-swift 217",
        (PACK, "test_truncated_packs"),
        (FOLDER, "test_c24_truncated"),
    ),
    "C25": (
        "TensorRT-LLM 17368",
        (FAULTS, "test_report_25_a_file_that_is_cut_while_it_is_read"),
        (MAPPING, "test_a_file_that_is_cut"),
        (READER, "test_c25_a_file_that_was_cut"),
    ),
    "C26": ("safetensors 762, 764", (WRITER, "test_c26_saving_onto_an_open_pack")),
    "C27": ("burn 5479", (WRITER, "test_a_new_file_or_none"), (WRITER, "test_a_disk_that_fills_up")),
    "C28": (
        "a file that changes under a stream",
        (FAULTS, "test_report_28_a_file_that_is_replaced_or_deleted_stays_readable"),
        (FAULTS, "test_report_28_a_file_that_is_rewritten_stops_the_next_pass"),
        (FAULTS, "test_report_28_a_file_that_is_rewritten_within_a_pass_ends_it_with_an_error"),
        (FAULTS, "test_report_28_a_file_that_grows"),
        (FOLDER, "test_c28_files_that_change_while_they_are_read"),
        (IN_PLACE, "test_a_shard_that_changes_is_noticed"),
        (MODEL, "test_a_changed_file_ends_the_text_with_an_error"),
    ),
    "C29": ("lattice 752, h3.c 48", (SAFETENSORS, "test_c29_ranges")),
    "C30": ("safetensors 401, openasr 73", (SAFETENSORS, "test_c30_headers")),
    "C32": ("mlx 3363, 3364, stable-diffusion.cpp 1754", (SAFETENSORS, "test_c32_shapes")),
    "C34": ("sglang 32279", (SHARDS, "test_c34_missing_shards"), (FOLDER, "test_c34_missing_shards")),
    "C35": ("huggingface_hub 4725, 4728", (SHARDS, "test_c35_a_wrong_index"), (FOLDER, "test_c35_a_lying_index")),
    "C37": (
        "llama.cpp 18504, 18012",
        (READER, "test_c37_short_reads_and_interrupted_ones"),
        (READER, "test_c37_the_end_of_the_file_is_an_error"),
        (READER, "test_c37_ranges_above_2_gib_are_cut"),
        (URING, "test_c37_reads_that_come_back_short"),
        (FAULTS, "test_report_37_short_and_interrupted_reads"),
    ),
    "C38": (
        "llama.cpp 18766, lmstudio 1378",
        (READER, "test_c38_direct_reading_that_is_refused"),
        (READER, "test_c38_no_direct_opening"),
    ),
    "C40": ("DeepSpeed 3506", (PLAN, "test_report_40_a_matrix_larger_than_the_slots")),
    "C41": ("fastsafetensors", (READER, "test_c41_bytes_that_mean_something_to_text")),
    # D. Memory
    "D42": (
        "pytorch 95823, 150517, vllm 56410, sglang 39021",
        (PINNED, "test_exactly_what_was_booked_is_locked"),
        (MEMORY, "test_report_42_booked_is_allocated"),
    ),
    "D43": ("AnimaLoraStudio 511", (UPLOADS, "test_refused_page_locks_are_said_once_and_the_ring_has_to_do")),
    "D44": (
        "vllm 37672, 37699",
        (UPLOADS, "test_memory_that_device_and_host_share_is_not_locked"),
        (UPLOADS, "test_every_kind_of_host_memory"),
    ),
    "D46": (
        "accelerate 4016, 3374",
        (MEMORY, "test_report_46_51_memory_stays_under_the_budget"),
        (WRITER, "test_memory_of_one_block"),
    ),
    "D47": ("hipfire 128, nntrainer 4213, ds4 795", (READER, "test_c47_what_was_read_is_not_in_the_page_cache")),
    "D48": ("nntrainer 4213: streamed parts are never mapped, and what is mapped gets no advice that slows it down",),
    "D49": (
        "safetensors 528, transformers 48285, ComfyUI 8065",
        (MAPPING, "test_d49_no_room_for_a_mapping"),
        (URING, "test_c49_files_larger_than_the_address_space"),
    ),
    "D50": (
        "mlx 3186, llama.cpp 8424: nothing is locked in memory on a CPU",
        (MEMORY, "test_report_50_no_right_to_lock_memory_is_needed"),
    ),
    "D51": ("kubernetes 116895", (MEMORY, "test_report_51_kinds_of_memory_are_told_apart")),
    "D52": ("vllm 50672, 51462", (STREAM, "test_report_52_streaming_that_was_asked_for_happens")),
    "D53": (
        "llama.cpp 6149, 6206, vllm-omni 6240, InstantTensor 19, maru 65",
        (PINNED, "test_registration_that_fails_at_piece_k_is_undone"),
        (TORCH, "test_report_53_a_refused_segment_is_undone_and_its_error_cleared"),
    ),
    # E. Processes
    "E55": (
        "sglang 40723, 28089, vllm 51579, 51317, 54002",
        (WRITER, "test_e55_killed_while_saving"),
        (MAPPING, "test_sealed_memory"),
        (MAPPING, "test_no_room_for_sealed_memory"),
    ),
    "E56": (
        "pytorch 40403",
        (FAULTS, "test_report_56_a_forked_child_is_told_at_once"),
        (READER_ORDER, "test_c56_after_a_fork"),
    ),
    "E58": ("liburing 1078, moby 46762, modio-sdk 17", (URING, "test_c58_machines_that_forbid_io_uring")),
    "E59": ("vllm 8803, 8933: shared memory has no name that anybody could unlink", (MAPPING, "test_sealed_memory")),
    # F. Swaps
    "F60": (
        "sparkinfer 148",
        (MEMORY, "test_report_60_64_opening_and_closing_leaves_nothing"),
        (SWAP_STREAMED, "test_many_swaps_leave_nothing_behind"),
        (UPLOADS, "test_addresses_stay"),
        (ON_DEVICE, "test_work_on_a_block_is_captured_once_per_slot"),
    ),
    "F61": ("vllm 32718", (SWAP_STREAMED, "test_a_reload_reads_the_file_again")),
    "F62": (
        "vllm 54477, 48312",
        (STREAM, "test_report_62_padding_is_the_files"),
        (UPLOADS, "test_addresses_stay"),
    ),
    "F63": ("lmdeploy 4917", (SWAP, "test_requests_after_a_swap_are_those_of_a_fresh_load")),
    "F64": (
        "textgen 6250",
        (SWAP, "test_old_weights_go_at_once"),
        (SWAP, "test_close_after_an_exception_in_a_request"),
        (MEMORY, "test_report_60_64_opening_and_closing_leaves_nothing"),
    ),
    # G. Speculation
    "G66": (
        "ds4 495: a pass reads the blocks that it names, each once; no model here has experts",
        (STREAM, "test_report_66_67_a_pass_reads_what_it_uses_and_that_once"),
    ),
    "G67": ("fak 4355", (MODEL, "test_a_pass_reads_every_streamed_byte_once_whatever_its_rows")),
    "G68": (
        "lmstudio 458: a draft that is a model is resident, and has its room before any block of the target",
        (PLAN, "test_report_68_what_is_reserved_comes_first"),
    ),
    "G69": (
        "vllm 48919, 52735, 55503: a draft of another shape has a cache of its own",
        (DRAFT, "test_text_is_that_of_plain_decoding"),
        (SWAP_STREAMED, "test_a_draft_makes_its_room"),
    ),
    "G70": ("llama.cpp: costs of passes are measured, up to 16 rows for a target that streams, and K follows them",),
    "G72": (
        "the rejected tail",
        (STREAM, "test_report_72_a_pass_after_a_rejected_one_sees_the_same_blocks"),
        (DRAFT, "test_refused_positions_leave_nothing_behind"),
    ),
}


@pytest.mark.parametrize("number", REPORTS)
def test_the_tests_exist(number):
    what, *where = REPORTS[number]
    reports.check(what, where)
