"""Public bug reports about speculative decoders elsewhere, and the tests that hold them here.

Number in our list (A law, B caches, C ends, D options, E lookups, F vocabularies, G speed, H batches, I life cycle);
what it is; tests. A case without a test says why it needs none. Every case also runs with drafts that are right, wrong,
flaky and failing, with any K, temperature, batch and cache, shown at once or token by token: ``EVERYWHERE``.
"""

import pytest

import reports

CASES, DECODE, BATCH, LOOPS, API = (
    f"test_{x}.py" for x in ("decoding_cases", "decode", "batch", "loops", "generate_api")
)
COSTS = "test_costs.py"
CONSTRAINED, GRAMMAR, PROCESSORS, CONTROLLER, STATS = (
    f"test_{x}.py" for x in ("constrained", "grammar", "processors", "controller", "stats")
)
DRAFT, LOOKUP, VOCABULARY, LOADING, SWAP = (
    f"test_{x}.py" for x in ("model_draft", "lookup", "vocabulary_map", "pair_loading", "swap")
)
LAW, CHAIN, TREE, SEQUENCES = (f"test_{x}.py" for x in ("decode_law", "law_chain", "law_tree", "law_sequences"))
TREES, LAYOUT, RULES = "test_verify_trees.py", "test_verify_layout.py", "test_verify_rules.py"
LLAMA, ATTENTION, LINEAR, ROLLBACK = (f"test_{x}.py" for x in ("llama", "attention_rows", "linear", "kv_rollback"))
POOL, RAGGED, PATHS = (f"test_{x}.py" for x in ("pool", "ragged_pass", "tree_pass"))
CLI, PLAN, SOAK, GGUF, REAL = (f"test_{x}.py" for x in ("cli", "plan", "soak_batches", "models_gguf", "smollm2"))
PROPOSALS, FAULTS, DRAFT_TREES = (f"test_{x}.py" for x in ("proposals", "draft_faults", "draft_trees"))

EVERYWHERE = [(LOOPS, "test_settings"), (LOOPS, "test_all_settings")]

REPORTS = {
    # A. Wrong text, wrong law
    "A1": (
        "transformers 30042, 30413: positions",
        (DECODE, "test_greedy_text_is_that_of_plain_decoding"),
        (DECODE, "test_a_flaky_draft_is_accepted_exactly_where_it_is_right"),
        *EVERYWHERE,
    ),
    "A2": (
        "transformers 30778, 33534; speculative-sampling 3, 9",
        (CASES, "test_a2_a_draft_that_is_chosen_and_not_drawn"),
        (CHAIN, "test_chosen_drafts_judged_as_if_drawn"),
        (PROPOSALS, "test_the_likeliest_instead_of_a_drawn_one"),
    ),
    "A3": (
        "transformers 47932, dflash 74, DeepSpec 31",
        (CASES, "test_a3_the_distribution_that_was_drawn_from"),
        (CASES, "test_a3_drafts_rounded_before_the_draw"),
        (CHAIN, "test_drafts_drawn_from_another_distribution_than_reported"),
        (PROPOSALS, "test_drawn_at_another_temperature_than_judged"),
        (PROPOSALS, "test_temperatures_and_filters"),
    ),
    "A4": (
        "mlx-swift-lm 459, mlxcel 902",
        (CASES, "test_a4_the_token_after_a_refusal"),
        (LAW, "test_texts_have_the_law_of_plain_sampling"),
        (PROPOSALS, "test_the_redraw_from_p"),
    ),
    "A6": (
        "EAGLE 301, 183; fms-extras 12",
        (TREES, "test_greedy_follows_the_argmax"),
        (TREE, "test_likeliest_siblings_judged_as_drawn"),
        (TREE, "test_siblings_judged_without_removal"),
        (DRAFT_TREES, "test_greedy_text_is_that_of_plain_decoding"),
        (DRAFT_TREES, "test_texts_have_the_law_of_plain_sampling"),
    ),
    "A7": (
        "mlx-lm 1423, 1109; llama.cpp 25618; vllm 7627",
        (LLAMA, "test_rows_are_bit_equal_alone_and_together"),
        (RAGGED, "test_rows_are_those_of_requests_alone"),
        (PATHS, "test_nodes_have_the_bits_of_their_paths"),
        (ATTENTION, "test_a_row_does_not_depend_on_its_neighbours"),
        (REAL, "test_speculation_changes_no_token"),
    ),
    "A8": (
        "vllm 6038, 13196",
        (DECODE, "test_a_seed_repeats_and_another_differs"),
        (CONSTRAINED, "test_seeds"),
        (BATCH, "test_each_text_is_what_it_is_alone"),
        (PROPOSALS, "test_requests_with_drawn_chains_in_a_batch_are_what_they_are_alone"),
    ),
    "A9": (
        "onnxruntime-genai 2528",
        (CASES, "test_a9_random_numbers_belong_to_what_was_emitted"),
        (CONSTRAINED, "test_random_numbers_belong_to_emitted_ids_alone"),
    ),
    "A11": (
        "llama.cpp 3919",
        (CASES, "test_a11_acceptance_that_means_nothing_is_called_so"),
        (STATS, "test_plain_rounds_say_nothing_about_acceptance"),
    ),
    "A12": (
        "llama.cpp 3812, speculators 994",
        (CASES, "test_a12_nan_in_the_second_of_four_drafts"),
        (DECODE, "test_a_fault_costs_one_rounds_drafts"),
        (FAULTS, "test_a_chain_ends_before_the_step_that_is_nan"),
        (FAULTS, "test_after_three_such_chains_drafting_pauses"),
    ),
    # B. Caches, memory
    "B1": (
        "mlxcel 994, 1002",
        (DRAFT, "test_no_position_is_computed_twice"),
        (LOOPS, "test_kinds_are_what_they_say"),
        (PROPOSALS, "test_the_draft_recovers_from_refusals"),
        (PROPOSALS, "test_whatever_was_committed_a_proposal_is_that_of_a_fresh_draft"),
    ),
    "B2": (
        "mlx-examples 149",
        (DECODE, "test_an_oracle_is_always_accepted"),
        (DRAFT, "test_text_is_that_of_plain_decoding"),
        (DRAFT, "test_no_position_is_computed_twice"),
        (PROPOSALS, "test_a_draft_that_is_the_target_is_always_accepted"),
    ),
    "B4": (
        "mlx-lm 846, 1109, 1446, 1455; ik_llama.cpp 1645: a model whose cache can't be cut is refused when it is "
        "loaded, as every kind of model is that the loop has not",
        ("test_huggingface.py", "test_configurations_that_can_not_be_served"),
        (LLAMA, "test_metadata_that_can_not_be_served"),
    ),
    "B6": ("mlx-swift-lm 173", (ROLLBACK, "test_kept_bytes_stay_and_rejected_ones_leave_no_trace")),
    "B7": ("aprender 2014", (DECODE, "test_a_cache_that_forgets_instead_of_rolling_back_would_show")),
    "B8": (
        "exllamav3 b2dd4ea",
        (BATCH, "test_rows_advance_at_their_own_pace"),
        (RAGGED, "test_rows_are_those_of_requests_alone"),
        *EVERYWHERE,
    ),
    "B10": (
        "Rapid-MLX 2739, llama.cpp 28049",
        (CASES, "test_b10_the_next_request_with_the_same_beginning_starts_cold"),
        (DECODE, "test_eos_inside_an_accepted_block_ends_the_text"),
    ),
    "B11": (
        "vllm 24505, 55557, 41559, 42692",
        (ROLLBACK, "test_a_rejected_outlier_changes_no_scale"),
        (LLAMA, "test_rollback_leaves_no_trace"),
    ),
    "B12": (
        "vllm 9995, TensorRT-LLM 12188, 9279",
        (PLAN, "test_report_68_what_is_reserved_comes_first"),
        (LOADING, "test_the_draft_counts_in_the_budget"),
        (POOL, "test_b12_room_is_the_budget_over_what_a_request_takes_with_its_draft"),
        (POOL, "test_a_drafts_cache_has_to_fit_the_budget"),
    ),
    "B13": (
        "llama.cpp 27155",
        (POOL, "test_b13_two_hundred_short_requests_leave_nothing_behind"),
        (SOAK, "test_memory_stays_flat"),
    ),
    "B14": (
        "openvino.genai 3394, llama.cpp 26968",
        (LOADING, "test_the_draft_counts_in_the_budget"),
        (LOADING, "test_a_draft_by_its_path"),
    ),
    "B15": (
        "exllamav2 274",
        (DECODE, "test_the_context_is_used_to_its_end_and_not_beyond"),
        (DRAFT, "test_a_text_longer_than_the_drafts_context"),
        (PATHS, "test_the_end_of_the_cache"),
    ),
    # C. Ends
    "C1": (
        "koboldcpp 1276, transformers 47912, openvino.genai 1951",
        (DECODE, "test_eos_inside_an_accepted_block_ends_the_text"),
    ),
    "C2": ("openvino.genai 3293", (DECODE, "test_drafting_stops_at_the_drafts_own_eos_and_the_text_goes_on")),
    "C3": (
        "sglang 39826, vllm 56101",
        (DECODE, "test_counts_end_with_the_text"),
        (STATS, "test_the_sums_of_a_text"),
    ),
    "C4": (
        "ArcticInference 161, sglang 23802, openvino.genai 1719",
        (API, "test_stop_strings"),
        (CLI, "test_stop_strings"),
        ("test_request_options.py", "test_a_stop_string_deep_in_an_accepted_block"),
    ),
    "C5": ("vllm 47616", (CASES, "test_c5_text_ids_and_log_probabilities_end_together")),
    "C9": (
        "transformers 46993, 47195",
        (DECODE, "test_the_limit_is_exact"),
        (CONSTRAINED, "test_max_new_tokens_is_exact_though_the_lookup_has_more"),
    ),
    "C10": ("sglang 33643", (CONSTRAINED, "test_min_new_tokens_counts_tokens_and_not_rounds")),
    # D. Options
    "D1": (
        "vllm 19482, 31982, 42744, 38202; sglang 26330; TensorRT-LLM 17701",
        (CONSTRAINED, "test_a_forbidden_id_never_comes_though_draft_and_target_want_it"),
        (CONSTRAINED, "test_every_option_changes_the_text"),
        (API, "test_unknown_options_are_not_swallowed"),
    ),
    "D2": (
        "vllm 6718, 33251; sglang 33643; vmlx-swift 361",
        (CONSTRAINED, "test_ids_are_those_of_plain_decoding"),
        (CONSTRAINED, "test_such_faults_would_be_found"),
        (PROCESSORS, "test_refused_drafts_leave_no_trace"),
    ),
    "D4": (
        "openvino.genai 4081, vllm 36138, lmdeploy 4551, ollama 18105",
        (CONSTRAINED, "test_a_grammar_is_followed_and_never_asked_after_its_end"),
        (GRAMMAR, "test_three_digits_and_the_end"),
    ),
    "D5": ("llama.cpp 27972, vllm 47616", (CONSTRAINED, "test_log_probabilities_are_those_of_plain_decoding")),
    "D6": (
        "transformers 40976: a draft is drawn at the request's own temperature, at which it is judged, and has none",
        (DRAFT, "test_sampled_text_depends_on_the_seed_alone"),
        ("test_request_options.py", "test_bad_options_name_themselves"),
    ),
    # E. Lookups
    "E1": ("llama.cpp 27852", (LOOKUP, "test_nothing_is_left_of_the_last_request")),
    "E2": ("sglang 24175, AISVS 210, vllm 16016: nothing is shared", (LOOKUP, "test_requests_do_not_share")),
    "E4": ("exllamav3 188d073", (BATCH, "test_a_row_without_a_draft_does_not_stop_the_others")),
    "E6": (
        "mlx-lm 1297",
        (CASES, "test_e6_every_flag_of_drafting_has_an_effect"),
        (API, "test_every_sampling_option_has_an_effect"),
        ("test_cli_flags.py", "test_a_flag_changes_what_it_says"),
        (CLI, "test_load_options_arrive"),
    ),
    # F. Vocabularies
    "F1": (
        "llama.cpp 3812, openvino.genai 1137, pocketpal-ai 876, koboldcpp 2325",
        (VOCABULARY, "test_the_error_names_the_first_id_that_differs"),
        (VOCABULARY, "test_two_ids_swapped_are_refused_when_loaded"),
        (DRAFT, "test_vocabularies_are_compared_by_content"),
    ),
    "F2": (
        "verl-SpeCo 67, 66; Automodel 2447; SpecForge 534; vllm 53458",
        (VOCABULARY, "test_a_wrong_map_is_refused"),
        (VOCABULARY, "test_proposals_are_the_targets_ids"),
        (VOCABULARY, "test_a_map_of_everything_says_nothing"),
        (VOCABULARY, "test_files_that_do_not_fit_their_map"),
        (VOCABULARY, "test_rows_are_those_of_the_whole_model"),
    ),
    "F3": (
        "an end that a cut vocabulary has not: it is the target's own",
        (VOCABULARY, "test_proposals_are_the_targets_ids"),
        (VOCABULARY, "test_a_draft_that_says_fewer_ids"),
    ),
    # G. Speed
    "G1": (
        "llama.cpp 10664, 10594, 3649, 12968; tensai 113",
        (CONTROLLER, "test_none_accepted_costs_less_than_three_percent"),
        (CONTROLLER, "test_speed_with_good_and_bad_drafts"),
        (CLI, "test_stats_compare_with_plain_decoding"),
    ),
    "G2": (
        "llama.cpp 4624",
        (COSTS, "test_costs_are_measured_within_the_budget"),
        (CONTROLLER, "test_a_step_in_the_cost_is_no_trap"),
    ),
    "G3": (
        "llama.cpp 11933, 19744; sglang 9319, 21599; vllm 26504, 17984; mlc-llm 2906",
        (CONTROLLER, "test_k_follows_the_text_within_ten_rounds"),
    ),
    "G4": (
        "vllm 52258, 54691, 58080, 5342, 24662; ik_llama.cpp 732; lmstudio 499",
        (CASES, "test_g4_one_request_beyond_its_length_and_the_others_draft_on"),
        (BATCH, "test_beyond_a_length_a_request_decodes_plainly"),
        (DRAFT, "test_a_text_longer_than_the_drafts_context"),
        (PROPOSALS, "test_beyond_the_drafts_context_there_are_no_proposals"),
    ),
    "G5": ("llama.cpp 12968", (CASES, "test_g5_the_command_line_and_python_count_alike")),
    # H. Batches
    "H1": ("transformers 29769, 32189; Spec-Bench 17", (BATCH, "test_rows_advance_at_their_own_pace")),
    "H2": (
        "vllm-fork 823, 1780; vllm 26498, 52500",
        (BATCH, "test_each_text_is_what_it_is_alone"),
        (CONSTRAINED, "test_requests_with_options_of_their_own_share_rounds"),
        *EVERYWHERE,
    ),
    "H3": ("openvino.genai 1056", (BATCH, "test_fifty_requests_and_room_for_three")),
    # I. Life cycle, streams, reports
    "I1": (
        "mlx-engine 280, llama.cpp 173, 26968",
        (LOADING, "test_a_draft_that_cannot_be_read_leaves_the_target_alone"),
        (LOADING, "test_a_draft_that_is_required_is_an_error_when_it_cannot_be_read"),
    ),
    "I2": (
        "a draft that dies, is late or has no memory",
        (CASES, "test_i2_a_draft_that_dies_in_round_seven"),
        (DECODE, "test_after_three_faults_drafting_is_off_and_says_why"),
        (DECODE, "test_a_slow_draft_is_a_fault"),
        (SOAK, "test_some_requests"),
        (FAULTS, "test_a_pairs_draft_that_fails_for_a_while"),
        (FAULTS, "test_a_call_that_hangs_is_left_behind"),
        (FAULTS, "test_pauses_double_up_to_their_longest"),
    ),
    "I3": (
        "sglang 12963, exo 1188, vllm 52487, lmstudio 489",
        (SWAP, "test_a_stream_goes_on_with_the_new_version"),
        (SWAP, "test_no_exchange_of_a_draft_changes_a_token"),
    ),
    "I4": (
        "llama.cpp 20, Rapid-MLX 1246, pegainfer 215",
        (DECODE, "test_cancel_during_any_step_ends_within_the_round"),
        (DECODE, "test_a_caller_who_leaves_mid_block_cancels"),
        (API, "test_cancel_does_not_lose_text"),
        (BATCH, "test_cancel_ends_all_of_them_with_what_they_have"),
        (FAULTS, "test_cancel_while_the_draft_hangs"),
    ),
    "I6": (
        "vllm 26027, 45678; vmlx-swift 148; tensai 110; exo 1691",
        (API, "test_half_a_character_is_not_shown"),
        (API, "test_the_held_back_tail_is_not_lost_at_the_length_limit"),
        (API, "test_stream_and_generate_agree"),
        *EVERYWHERE,
    ),
    "I7": (
        "openvino.genai 1767, 2044; vllm 42690; llama.cpp 12603; sglang 11144; mlc-llm 2789",
        (CASES, "test_i7_statistics_of_requests_that_do_next_to_nothing"),
        (CASES, "test_i7_which_tokens_came_from_which_draft"),
        (STATS, "test_nothing_done_is_none_and_no_division"),
        (API, "test_unknown_is_null_and_never_zero"),
    ),
    "I9": ("ik_llama.cpp 1760", (CASES, "test_i9_the_examples_run")),
}


@pytest.mark.parametrize("number", REPORTS)
def test_the_tests_exist(number):
    what, *where = REPORTS[number]
    reports.check(what, where)
