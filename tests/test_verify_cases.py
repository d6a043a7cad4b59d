"""Inputs on which other verifiers went wrong, each with its right answer, on every backend."""

import itertools
import math

import pytest
import torch

import specdec_kernels as sk
from specdec_kernels.reference.philox import COIN, PLAIN, uniform
from verify_cases import FEW_BACKENDS, MANY, bounds, emitted, judge, keys, logits_of, near, repeated, running, share

NAN, INF = math.nan, math.inf
HARD, EMPTY, BAD_DRAFT = 1, 2, 8


@pytest.fixture(params=FEW_BACKENDS, autouse=True)
def backend(request):
    torch.manual_seed(0)
    with running(request.param):
        yield request.param


# ---- NaN, inf, masked rows


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_all_nan_row_emits_nothing(temperature):
    rows = torch.randn(3, 5000)
    rows[0] = NAN
    verdict = judge([rows], [[3, 4]], temperature=temperature)
    assert emitted(verdict) == [] and verdict.flags.item() == HARD | EMPTY and verdict.num_accepted.item() == 0


def test_nan_row_touches_no_other_request():
    rows = [torch.randn(3, 24_579) for _ in range(3)]
    options = {"temperature": 0.8, "top_p": 0.95}
    drafts = [[1, 2], [int(rows[1][0].argmax()), 5], [3, 4]]
    without = judge(rows, drafts, **options)
    rows[1][1] = NAN
    verdict = judge(rows, drafts, **options)
    for b in (0, 2):
        assert torch.equal(verdict.tokens[b], without.tokens[b]) and verdict.flags[b] == 0
    assert ((verdict.tokens >= -1) & (verdict.tokens < 24_579)).all()


@pytest.mark.parametrize("temperature", [0, 1e-4])
def test_nan_in_one_block_lets_finite_entries_win(temperature):
    rows = torch.zeros(1, 4 * 2048 + 100)
    rows[0, 2048:4096] = NAN
    rows[0, 8192 + 50] = 3.0
    verdict = judge([rows], [[]], temperature=temperature)
    assert emitted(verdict) == [8242] and verdict.flags.item() == HARD


def test_plus_inf_is_a_point_mass_on_the_first():
    rows = torch.randn(2, 300)
    rows[0, [70, 200]] = INF
    for temperature in (0, 1.0):
        verdict = judge([rows], [[200]], temperature=temperature, return_logprobs=True)
        assert emitted(verdict) == [70] and verdict.flags.item() == HARD and verdict.logprobs[0, 0] == 0
        verdict = judge([rows], [[70]], temperature=temperature)
        assert verdict.num_accepted.item() == 1 and verdict.flags.item() == HARD


def test_rows_after_the_refusal_are_not_examined():
    rows = torch.zeros(3, 8)
    rows[0, 1] = 20.0
    rows[1:] = NAN
    for temperature in (0, 0.5):
        verdict = judge([rows], [[3, 4]], temperature=temperature)
        assert emitted(verdict) == [1] and verdict.flags.item() == 0


def test_last_row_without_candidate_keeps_the_accepted_drafts():
    rows = torch.zeros(3, 8)
    rows[0, 1] = rows[1, 2] = 50.0
    rows[2] = -INF
    for temperature in (0, 0.5):
        verdict = judge([rows], [[1, 2]], temperature=temperature, return_logprobs=True)
        assert emitted(verdict) == [1, 2] and verdict.num_accepted.item() == 2 and verdict.flags.item() == EMPTY
        assert verdict.logprobs[0, 2].isnan()


def test_nan_draft_row_refuses_and_draws_from_p():
    p = [1e-22, 0.03 / 6, 0.03 / 6, 0.03 / 6, 0.03 / 6, 0.97, 0.03 / 6, 0.03 / 6]
    verdict = repeated(200, [logits_of(p).tolist()] * 2, [0], draft_probs=[[NAN] * 8])
    assert (verdict.flags == BAD_DRAFT).all() and (verdict.num_accepted == 0).all()
    assert share(verdict.tokens[:, 0], 0) == 0 and share(verdict.tokens[:, 0], 5) > 0.8


@pytest.mark.parametrize("bad", [-0.25, INF, NAN])
def test_unusable_probabilities(bad):
    q = [0.5, 0.5, 0.0, bad]
    verdict = repeated(50, torch.zeros(2, 4), [0], draft_probs=[q])
    assert (verdict.flags == BAD_DRAFT).all() and (verdict.num_accepted == 0).all()


def test_drafted_token_with_q_zero_is_refused():
    verdict = repeated(50, [[5.0, 0.0, 0.0], [0.0] * 3], [0], draft_probs=[[0.0, 1.0, 0.0]])
    assert (verdict.flags == BAD_DRAFT).all() and (verdict.num_accepted == 0).all()
    assert share(verdict.tokens[:, 0], 0) > 0.8  # p itself, not p without the draft


def test_greedy_requests_do_not_read_draft_rows():
    rows = [[0.0, 5.0], [1.0, 0.0]]
    verdict = judge([rows], [[1]], temperature=0, draft_logits=torch.full((1, 2), NAN))
    assert emitted(verdict) == [1, 0] and verdict.flags.item() == 0


def test_mask_and_greedy_beside_random():
    rows = [[-INF, 1.0, 2.0, -INF], [0.0, -INF, -INF, -INF]]
    verdict = judge([rows, rows], [[2], [2]], temperature=torch.tensor([0.0, 0.7]))
    assert emitted(verdict, 0) == [2, 0] and (verdict.flags == 0).all()
    assert emitted(verdict, 1) in ([2, 0], [1])


def test_empty_residual_draws_from_p():
    p, q = logits_of([0.5, 0.5, 0.0, 0.0]).tolist(), [0.9, 0.9, 0.0, 0.0]  # q need not be normalised
    verdict = repeated(100, [p, p], [0], draft_probs=[q])
    first = verdict.tokens[:, 0]
    assert (verdict.num_accepted == 0).any() and ((first == 0) | (first == 1)).all()
    refused = first[verdict.num_accepted == 0]
    assert (refused == 0).any() and (refused == 1).any()


def test_residual_of_negligible_weights_is_still_drawn_from(backend):
    """q takes all of the likely id; what remains has probabilities near 1e-14, in other groups of 64."""
    row = torch.full((1, 300), -INF)
    row[0, 3], row[0, 100:260] = 0.0, -32.0
    q = torch.zeros(1, 300)
    q[0, 3] = 1.5
    n = MANY.get(backend, 2000)
    verdict = repeated(n, row.repeat(2, 1), [3], draft_probs=q)
    refused = verdict.tokens[verdict.num_accepted == 0, 0]
    assert len(refused) > n // 5 and ((refused >= 100) & (refused < 260)).all() and len(refused.unique()) > n // 20


# ---- the coin


def test_probability_zero_is_never_accepted():
    verdict = repeated(300, [logits_of([0.0, 1.0]).tolist()] * 2, [0])
    assert (verdict.tokens[:, 0] == 1).all() and (verdict.num_accepted == 0).all()


# Seeds whose first coin at position 0 is as small, exactly a quarter, and as large as it can be.
ZERO, QUARTER, ALMOST_ONE = 60039404, 1673268599, 1997841943


def test_the_seeds_are_what_they_are_for():
    coins = [uniform(seed, 0, COIN, 0) for seed in (ZERO, QUARTER, ALMOST_ONE)]
    assert coins == [0.0, 0.25, 1 - 2.0**-32]


def test_coin_zero_does_not_accept_probability_zero():
    for options in ({}, {"draft_probs": torch.tensor([[1.0, 0.0]])}):
        verdict = judge([[[-INF, 0.0]] * 2], [[0]], **keys(1, ZERO), **options)
        assert emitted(verdict) == [1] and verdict.num_accepted.item() == 0


def test_coin_equal_to_the_probability_refuses():
    """p = 1/4 exactly, u = 1/4: u < p is false."""
    verdict = judge([torch.zeros(2, 4)], [[2]], **keys(1, QUARTER))
    assert verdict.num_accepted.item() == 0 and verdict.tokens[0, 0] != 2
    q = torch.zeros(1, 4)
    q[0, 2] = 0.5  # u*q = 1/8
    assert judge([torch.zeros(2, 4)], [[2]], draft_probs=q, **keys(1, QUARTER)).num_accepted.item() == 1


def test_equal_distributions_are_always_accepted():
    """Also by the largest coin, which float32 would round to 1."""
    rows, q = torch.full((2, 8), -INF), torch.zeros(1, 8)
    rows[0, 5] = rows[1, 2] = 0.0
    q[0, 5] = 1.0
    for seed in (ALMOST_ONE, *range(20)):
        for options in ({}, {"draft_probs": q}, {"draft_logits": q.log()}):
            assert emitted(judge([rows], [[5]], **{**keys(1, seed), **options})) == [5, 2]
        row = torch.randn(1, 100)
        x = int(row.argmax())
        assert judge([row.repeat(2, 1)], [[x]], draft_logits=row, **keys(1, seed)).num_accepted.item() == 1


# The same for the two numbers of a plain draw at position 0: the race of group 0, and the pick inside it.
RACE_ZERO, RACE_ALMOST_ONE, PICK_QUARTER, PICK_ALMOST_ONE = 236775153, 1640079016, 1643888967, 623787358


def test_ends_of_the_numbers_of_a_draw():
    assert [uniform(s, 0, PLAIN, 0, g) for s, g in ((RACE_ZERO, 0), (PICK_QUARTER, 2**31))] == [0.0, 0.25]
    assert uniform(RACE_ALMOST_ONE, 0, PLAIN, 0) == uniform(PICK_ALMOST_ONE, 0, PLAIN, 0, 2**31) == 1 - 2.0**-32
    far = torch.zeros(1, 128)
    far[0, :64] = -60.0
    assert emitted(judge([far], [[]], **keys(1, RACE_ZERO)))[0] < 64  # time 0 wins, however small the mass
    far[0, :64] = -INF
    assert emitted(judge([far], [[]], **keys(1, RACE_ZERO)))[0] >= 64  # but not without any
    assert emitted(judge([torch.zeros(1, 128)], [[]], **keys(1, RACE_ALMOST_ONE)))[0] >= 64
    assert emitted(judge([torch.zeros(1, 4)], [[]], **keys(1, PICK_QUARTER))) == [1]  # 1 > 1/4 * 4 is false
    row = torch.full((1, 64), -INF)
    row[0, [3, 9, 40]] = 0.0
    assert emitted(judge([row], [[]], **keys(1, PICK_ALMOST_ONE))) == [40]


def test_acceptance_is_p_over_q(backend):
    n = MANY.get(backend, 20_000)
    verdict = repeated(n, [logits_of([0.1, 0.9]).tolist()] * 2, [0], draft_probs=[[0.9, 0.1]])
    assert near(verdict.num_accepted.double().mean().item(), 1 / 9, n)


def test_point_mass_and_dense_drafts_accept_differently(backend):
    """q = p: a dense draft is always accepted, a point mass with p(x). Both kinds in one batch."""
    n = MANY.get(backend, 20_000)
    row, kind = logits_of([0.25, 0.75]).tolist(), torch.arange(n) % 2 == 0
    verdict = repeated(n, [row, row], [0], draft_logits=[row], draft_kind=kind)
    assert (verdict.num_accepted[~kind] == 1).all()
    assert near(verdict.num_accepted[kind].double().mean().item(), 0.25, n // 2)


def test_greedy_does_not_depend_on_the_seed():
    rows = torch.randn(3, 50)
    drafts = [rows.argmax(1).tolist()[:2]]
    results = {tuple(emitted(judge([rows], drafts, temperature=0.0, **keys(1, seed)))) for seed in range(20)}
    assert results == {tuple(rows.argmax(1).tolist())}
    assert emitted(judge([rows], drafts, temperature=0, seed=None, position=None)) == rows.argmax(1).tolist()


# ---- placeholders, ragged requests


def test_placeholder_ends_the_request_with_a_draw_from_p(backend):
    row, flat = logits_of([0.0] * 7 + [1.0] + [0.0] * 8).tolist(), [0.0] * 16
    n = MANY.get(backend, 2000)
    verdict = repeated(n, [row, flat, flat, flat], [7, -1, -1])
    assert (verdict.num_accepted == 1).all() and (verdict.tokens[:, 0] == 7).all()
    assert (verdict.tokens[:, 2:] == -1).all() and len(verdict.tokens[:, 1].unique()) >= min(16, n // 3)


def test_placeholder_ignores_what_follows():
    rows = torch.randn(4, 9)
    for temperature in (0, 1.0):
        a = judge([rows], [[-1, 3, 4]], temperature=temperature)
        b = judge([rows], [[-1, 10**6, -7]], temperature=temperature)
        assert torch.equal(a.tokens, b.tokens) and a.num_accepted.item() == 0


def test_a_mask_holds_behind_a_placeholder():
    """Row 0 allows id 1 alone, row 1 everything: the draft behind the -1 must not come through."""
    rows = torch.zeros(3, 5)
    rows[0] = -INF
    rows[0, 1] = 0.0
    for temperature in (0, 1.0):
        verdict = judge([rows], [[-1, 3]], temperature=temperature)
        assert emitted(verdict) == [1] and verdict.num_accepted.item() == 0


def test_nothing_allowed_emits_nothing():
    for temperature, drafts in itertools.product((0, 1.0), ([], [2], [-1])):
        verdict = judge([torch.full((len(drafts) + 1, 5), -INF)], [drafts], temperature=temperature)
        assert emitted(verdict) == [] and verdict.flags.item() == EMPTY and verdict.num_accepted.item() == 0


def test_refused_placeholder_ignores_q(backend):
    n, row = MANY.get(backend, 20_000), [0.0, 0.0]
    verdict = repeated(n, [row, row], [-1], draft_probs=[[1.0, 0.0]])
    assert near(share(verdict.tokens[:, 0], 0), 0.5, n) and (verdict.flags == 0).all()


def test_leading_placeholder_and_no_draft_draw_as_sample_does():
    rows = torch.randn(3, 500)
    plain = sk.sample(rows[:1], **keys(1, seed=5, position=9)).tolist()
    options = keys(1, seed=5, position=9)
    assert emitted(judge([rows[:1]], [[]], **options)) == plain
    assert emitted(judge([rows], [[-1, 4]], **options)) == plain
    greedy = sk.sample(rows, temperature=0).tolist()
    assert emitted(judge([rows[:1]], [[]], temperature=0)) == greedy[:1]


def test_bonus_of_id_zero_is_no_match():
    assert emitted(judge([[[0.0, 9.0], [9.0, 0.0]]], [[1]], temperature=0)) == [1, 0]


def test_unused_slots_hold_minus_one():
    verdict = judge([[[9.0, 0.0]] * 4, [[0.0, 9.0]]], [[1, 1, 1], []], temperature=0, max_drafts=5)
    assert verdict.tokens.tolist() == [[0, -1, -1, -1, -1, -1], [1, -1, -1, -1, -1, -1]]
    assert verdict.num_accepted.tolist() == [0, 0]


def test_first_draft_is_verified():
    row = [0.0] * 12
    row[4] = 1.0
    assert emitted(judge([[row, row]], [[9]], temperature=0)) == [4]


def test_rows_belong_to_their_requests():
    counts, vocabulary = [5, 0, 1], 40
    rows = torch.full((9, vocabulary), -INF)
    rows[torch.arange(9), torch.arange(9) * 3] = 0.0
    q = torch.full((6, vocabulary), -INF)
    own = [0, 1, 2, 3, 4, 7]
    q[torch.arange(6), torch.tensor(own) * 3] = 0.0
    verdict = sk.verify(rows, torch.tensor(own) * 3, bounds(counts), draft_logits=q, **keys(3))
    assert verdict.num_accepted.tolist() == counts
    assert [emitted(verdict, b) for b in range(3)] == [[0, 3, 6, 9, 12, 15], [18], [21, 24]]


def test_all_accepted_bonus_comes_from_the_last_row():
    rows = torch.full((3, 9), -INF)
    rows[0, 2] = rows[1, 2] = rows[2, 7] = 0.0
    assert emitted(judge([rows], [[2, 2]])) == [2, 2, 7]


def test_probability_zero_in_the_middle_stops_there():
    rows = torch.full((4, 5), -INF)
    rows[:, 1] = 0.0
    verdict = judge([rows], [[1, 0, 1]])
    assert emitted(verdict) == [1, 1] and verdict.num_accepted.item() == 1


def test_end_tokens_inside_the_prefix_are_the_callers_business():
    rows = torch.zeros(4, 8)
    rows[0, 4] = rows[1, 2] = rows[2, 6] = rows[3, 1] = 9.0
    assert emitted(judge([rows], [[4, 2, 6]], temperature=0)) == [4, 2, 6, 1]


# ---- draft distributions


def test_cut_vocabulary_is_scattered(backend):
    """d2t = [0, 2]: the second column is target id 2. q(0) = 0.7, p(0) = 0.2."""
    n = MANY.get(backend, 20_000)
    row, ids = logits_of([0.2, 0.3, 0.5]).tolist(), torch.tensor([0, 2], dtype=torch.int32)
    verdict = repeated(n, [row, row], [0], draft_probs=[[0.7, 0.3]], draft_ids=ids)
    accepted = verdict.num_accepted == 1
    assert near(accepted.double().mean().item(), 2 / 7, n)
    refused = verdict.tokens[~accepted, 0]  # residual: (0, 0.3, 0.2)
    assert near(share(refused, 1), 0.6, len(refused)) and share(refused, 0) == 0


def test_draft_outside_the_cut_vocabulary_is_unusable():
    verdict = repeated(20, torch.zeros(2, 3), [1], draft_probs=[[0.5, 0.5]], draft_ids=torch.tensor([0, 2]).int())
    assert (verdict.flags == BAD_DRAFT).all() and (verdict.num_accepted == 0).all()


def test_residual_subtracts_the_whole_row(backend):
    """p = (.5, .2, .3), q = (.2, .5, .3): a refused draft 1 leaves id 0 alone."""
    row = logits_of([0.5, 0.2, 0.3]).tolist()
    for options in (
        {"draft_probs": [[0.2, 0.5, 0.3 + 1e-6]]},
        {"draft_logits": [[0.0, math.log(2.5), math.log(1.51)]]},
    ):
        verdict = repeated(MANY.get(backend, 2000), [row, row], [1], **options)
        assert (verdict.tokens[verdict.num_accepted == 0, 0] == 0).all()


# ---- what comes back


def test_logprobs_are_those_of_the_raw_row():
    rows = torch.randn(3, 1000) * 3
    verdict = judge([rows], [rows[:2].argmax(1).tolist()], temperature=0.5, top_k=1, return_logprobs=True)
    expected = rows.double().log_softmax(1)[torch.arange(3), rows.argmax(1)]
    assert torch.allclose(verdict.logprobs[0].double(), expected, atol=1e-6)
    wrong = (int(rows[0].argmax()) + 1) % 1000
    greedy = judge([rows], [[wrong, 0]], temperature=0, return_logprobs=True)
    assert greedy.logprobs[0, 0].item() == pytest.approx(expected[0].item(), abs=1e-6)
    assert greedy.logprobs[0, 1:].isnan().all()


def test_dtypes_and_shapes_of_the_verdict():
    verdict = judge([torch.randn(2, 5), torch.randn(4, 5)], [[1], [1, 2, 3]])
    assert verdict.tokens.dtype is torch.int64 and tuple(verdict.tokens.shape) == (2, 4)
    assert verdict.num_accepted.dtype is torch.int32 and verdict.flags.dtype is torch.int32
    assert verdict.logprobs is None


def test_empty_calls():
    none = torch.zeros(0, dtype=torch.int64)
    verdict = sk.verify(torch.zeros(0, 7), none, bounds([]), **keys(0))
    assert tuple(verdict.tokens.shape) == (0, 1) and tuple(verdict.flags.shape) == (0,)
    assert emitted(sk.verify(torch.zeros(1, 1), none, bounds([0]), **keys(1))) == [0]
    assert tuple(sk.sample(torch.zeros(0, 7), **keys(0)).shape) == (0,)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_draft_token_dtypes(dtype):
    rows = torch.zeros(2, 5)
    rows[0, 3] = rows[1, 2] = 9.0
    assert emitted(sk.verify(rows, torch.tensor([3], dtype=dtype), bounds([1]), temperature=0)) == [3, 2]
