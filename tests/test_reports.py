"""Public bug reports about verification elsewhere, and the tests that hold their inputs with the right answer here.

Number in our list; the report; tests. A report without a test says why it needs none.
"""

import pytest

import reports

CASES, FILTERS, LAYOUT = "test_verify_cases.py", "test_verify_filters.py", "test_verify_layout.py"
RULES, TREES, MEMORY = "test_verify_rules.py", "test_verify_trees.py", "test_verify_memory.py"
ERRORS, TREE_ERRORS, SAMPLE = "test_verify_errors.py", "test_verify_tree_errors.py", "test_sample.py"
CHAIN, TREE, ROUNDS, SEQUENCES = (f"test_law_{x}.py" for x in ("chain", "tree", "rounds", "sequences"))
DECODE = "test_decode.py"

REPORTS = {
    # NaN, inf, masked rows
    1: ("vllm 45060", (CASES, "test_all_nan_row_emits_nothing")),
    2: ("vllm 53029, 42261", (CASES, "test_nan_row_touches_no_other_request")),
    3: ("vllm 50183", (CASES, "test_nan_in_one_block_lets_finite_entries_win")),
    4: ("vllm 41834", (CASES, "test_nan_draft_row_refuses_and_draws_from_p")),
    6: ("flashinfer 2402", (SAMPLE, "test_no_candidate")),
    8: ("vllm 22261", (CASES, "test_mask_and_greedy_beside_random")),
    10: (
        "flashinfer, SGLang, vLLM: an empty residual",
        (CASES, "test_empty_residual_draws_from_p"),
        (CASES, "test_equal_distributions_are_always_accepted"),
        (TREES, "test_an_empty_residual_leaves_p"),
    ),
    # Ends of the random numbers
    11: (
        "sglang 35771",
        (CASES, "test_coin_zero_does_not_accept_probability_zero"),
        (CASES, "test_coin_equal_to_the_probability_refuses"),
        (TREES, "test_coin_equal_to_the_probability_refuses"),
    ),
    12: ("pytorch 16706", (CASES, "test_coin_zero_does_not_accept_probability_zero")),
    14: (
        "FlashInfer 0.7.4, a coin of 1",
        (CASES, "test_equal_distributions_are_always_accepted"),
        (RULES, "test_equal_distributions_are_accepted_whole"),
    ),
    16: ("vllm-ascend 13730", (CASES, "test_acceptance_is_p_over_q")),
    17: ("vllm 13196", (CASES, "test_greedy_does_not_depend_on_the_seed")),
    # Placeholders, ragged rows
    18: ("vllm 46533", (CASES, "test_placeholder_ends_the_request_with_a_draw_from_p")),
    19: ("vllm 50939", (RULES, "test_a_block_ends_before_a_placeholder")),
    20: ("local-inference-lab/vllm 476", (CASES, "test_refused_placeholder_ignores_q")),
    21: (
        "vllm 54137",
        (CASES, "test_refused_placeholder_ignores_q"),
        (CHAIN, "test_placeholder_that_subtracts_its_row"),
    ),
    23: ("vllm 29274", (CASES, "test_bonus_of_id_zero_is_no_match")),
    24: ("vllm-ascend 13608", (CASES, "test_leading_placeholder_and_no_draft_draw_as_sample_does")),
    25: ("1Cat-vLLM 625", (CASES, "test_unused_slots_hold_minus_one")),
    27: ("lattice 243", (CASES, "test_first_draft_is_verified")),
    28: (
        "TensorRT-LLM 12588",
        (CASES, "test_rows_belong_to_their_requests"),
        (TREES, "test_rows_belong_to_their_nodes"),
    ),
    29: ("vllm 35398", (ERRORS, "test_bad_values")),
    # Greedy beside random, temperature
    30: ("vllm 27077", (FILTERS, "test_mixed_batch_keeps_greedy_exact")),
    32: ("vllm-ascend 16430", (FILTERS, "test_mixed_batch_keeps_greedy_exact")),
    33: ("FreeToken 471", (FILTERS, "test_greedy_ties_go_to_the_lowest_id")),
    34: ("NeMo Automodel 3627", (FILTERS, "test_tiny_temperature_does_not_overflow")),
    35: ("sglang 28153", (ERRORS, "test_bad_values")),
    37: ("RL-Kernel 86", (FILTERS, "test_temperature_is_applied_once")),
    38: ("sglang 31214", (FILTERS, "test_a_draw_is_no_argmax")),
    39: ("omlx 1330", (CASES, "test_greedy_does_not_depend_on_the_seed")),
    # Filters
    41: ("flashinfer 3774", (FILTERS, "test_top_k_keeps_exactly_k_of_the_tied")),
    42: ("transformers 18976", (FILTERS, "test_top_p_is_the_shortest_prefix")),
    43: ("sglang 36173", (FILTERS, "test_top_p_counts_the_mass_of_the_top_k_set")),
    44: ("vllm 42744", (FILTERS, "test_min_p_applies_to_verified_rows")),
    45: ("mlc-llm 2940", (FILTERS, "test_filtered_draft_is_never_emitted")),
    46: ("vllm 44470", (FILTERS, "test_nucleus_of_a_large_vocabulary")),
    49: ("top_p = 0 and top_k = 0", (FILTERS, "test_extremes_of_the_filters"), (FILTERS, "test_top_k_off")),
    50: ("vllm 56724: drafts outside of the filters are refused; true, and why verify filters draft_logits as well",),
    # q is not what the draft was sampled from
    51: ("transformers 47932", (CHAIN, "test_drafts_drawn_from_another_distribution_than_reported")),
    53: (
        "xllm 2175",
        (CASES, "test_residual_subtracts_the_whole_row"),
        (CHAIN, "test_residual_that_subtracts_q_at_the_draft_alone"),
    ),
    54: (
        "rtp-llm 1311, 1295, 521",
        (CASES, "test_cut_vocabulary_is_scattered"),
        (CHAIN, "test_two_chances_for_a_draft"),
        (CASES, "test_first_draft_is_verified"),
    ),
    55: ("vllm 40149", (CASES, "test_point_mass_and_dense_drafts_accept_differently"), (ERRORS, "test_bad_values")),
    56: ("ml-recurrent-drafter 6", (CHAIN, "test_chosen_drafts_judged_as_if_drawn")),
    58: ("transformers 28508", (CASES, "test_probability_zero_in_the_middle_stops_there")),
    59: (
        "EAGLE 47, 50",
        (CASES, "test_all_accepted_bonus_comes_from_the_last_row"),
        (TREES, "test_bonus_comes_from_the_row_of_the_leaf"),
        (TREE, "test_bonus_from_the_row_of_the_parent"),
    ),
    # Random numbers
    61: (
        "vllm 54282",
        (ROUNDS, "test_other_keys_are_noticed"),
        (SEQUENCES, "test_whole_sequences"),
        (SEQUENCES, "test_coins_of_block_verification"),
    ),
    63: ("flashinfer 4861", (LAYOUT, "test_same_seed_same_tokens_other_seed_other_tokens")),
    64: ("vllm 6038", (LAYOUT, "test_slots_can_be_permuted")),
    65: ("TensorRT-LLM 17599: there is no default seed", (ERRORS, "test_bad_values")),
    66: ("vllm 17498", (LAYOUT, "test_threads_change_no_bit_and_instruction_sets_no_token")),
    68: ("pegainfer 534", (LAYOUT, "test_a_request_alone_equals_itself_in_a_batch")),
    # Addresses, memory
    69: ("vllm 46560, 48055", (LAYOUT, "test_rows_more_than_two_to_the_31_elements_apart")),
    70: ("vllm 42684", (LAYOUT, "test_any_row_stride_and_alignment"), (ERRORS, "test_bad_values")),
    71: ("vllm 48630", (MEMORY, "test_a_large_call_needs_little_memory")),
    72: ("vllm 41258", (MEMORY, "test_rows_behind_the_refusal_are_not_read")),
    73: ("sglang 36201", (TREE_ERRORS, "test_bad_values")),
    74: ("flashinfer, copies of counters", (CASES, "test_dtypes_and_shapes_of_the_verdict")),
    # Variants of the algorithm
    75: (
        "vllm-ascend 7807",
        (CHAIN, "test_block_with_products_of_uniforms"),
        (RULES, "test_block_has_the_right_law_where_a_product_of_uniforms_has_not"),
    ),
    76: (
        "vllm-ascend 11985",
        (CHAIN, "test_block_judges_every_prefix"),
        (CHAIN, "test_block_that_stops_at_the_first_refusal"),
        (RULES, "test_block_can_accept_what_token_refuses"),
    ),
    78: ("EAGLE 93", (CHAIN, "test_wider_reports_lower_the_acceptance_not_the_law")),
    # Grammar, logprobs, stops, ties
    80: ("vllm 54442", (CASES, "test_a_mask_holds_behind_a_placeholder")),
    81: ("vllm 30846", (CASES, "test_logprobs_are_those_of_the_raw_row")),
    83: (
        "transformers 47912",
        (CASES, "test_end_tokens_inside_the_prefix_are_the_callers_business"),
        (DECODE, "test_eos_inside_an_accepted_block_ends_the_text"),
    ),
    84: ("lattice 280", (FILTERS, "test_greedy_ties_go_to_the_lowest_id")),
    85: ("mlx-lm 1470: of the model, not of the verifier", (DECODE, "test_greedy_text_is_that_of_plain_decoding")),
    86: ("sglang 11555", (FILTERS, "test_bias_and_masks_reach_the_verified_rows")),
    87: ("an empty set of allowed tokens", (CASES, "test_nothing_allowed_emits_nothing")),
}


@pytest.mark.parametrize("number", REPORTS)
def test_the_tests_exist(number):
    what, *where = REPORTS[number]
    reports.check(what, where)
