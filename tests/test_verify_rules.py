"""Block, typical and threshold: inputs whose right answer is known, on every backend."""

import math

import pytest
import torch

import specdec_kernels as sk
from sequences import World, sequences
from verify_cases import FEW_BACKENDS, MANY, bounds, emitted, judge, keys, logits_of, near, repeated, running

NAN, INF = math.nan, math.inf
HARD, EMPTY, BAD_DRAFT = 1, 2, 8


@pytest.fixture(params=FEW_BACKENDS, autouse=True)
def backend(request):
    torch.manual_seed(0)
    with running(request.param):
        yield request.param


def certain(x, vocabulary=8):
    row = torch.full((vocabulary,), -INF)
    row[x] = 0.0
    return row


# ---- block


def test_a_block_ends_before_a_placeholder(backend):
    """h_1 = 1, and h_2 = r_2 = 1/2 whatever lies behind: both drafts and id 9, or the first and id 5."""
    p, q = torch.full((4, 16), -INF), torch.full((3, 16), NAN)
    p[0, 7] = p[2, 9] = 0.0
    p[1, [2, 5]] = torch.tensor([0.25, 0.75]).log()
    q[:2] = 0.0
    q[0, 7], q[1, [2, 5]] = 1.0, 0.5
    n = MANY.get(backend, 4000)
    verdict = repeated(n, p, [7, 2, -1], draft_probs=q, rule="block")
    whole = verdict.num_accepted == 2
    assert near(whole.double().mean().item(), 0.5, n) and (verdict.flags == 0).all()
    assert (verdict.tokens[whole] == torch.tensor([7, 2, 9, -1])).all()
    assert (verdict.tokens[~whole] == torch.tensor([7, 5, -1, -1])).all()


def test_block_has_the_right_law_where_a_product_of_uniforms_has_not(backend):
    """p = (.5, .5), q = (.9, .1), two drafts: that wrong rule emits id 0 first with .687."""
    n = MANY.get(backend, 20_000)
    world = World(torch.full((2, 2), 0.5), torch.tensor([[0.9, 0.1]] * 2))
    for form in ("draft_probs", "draft_logits"):
        first = sequences(n, 1, "block", form, world=world)
        assert near((first == 0).double().mean().item(), 0.5, n)


def test_block_can_accept_what_token_refuses(backend):
    """p_1(x)/q_1(x) = 1/2 and p_2(y)/q_2(y) = 4 make up for each other: r_2 = 1, always accepted."""
    p = torch.stack([logits_of([0.25, 0.75]), logits_of([0.8, 0.2]), logits_of([0.5, 0.5])])
    q = torch.tensor([[0.5, 0.5], [0.2, 0.8]])
    n = MANY.get(backend, 4000)
    token = repeated(n, p, [0, 0], draft_probs=q).num_accepted
    block = repeated(n, p, [0, 0], draft_probs=q, rule="block").num_accepted
    assert near((token == 2).double().mean().item(), 0.5, n) and set(token.tolist()) == {0, 2}
    # r_1 = 1/2, r_2 = min(1/2 * 4, 1) = 1
    assert (block == 2).all()


def test_block_with_a_draft_of_probability_zero():
    p = torch.stack([certain(1), torch.zeros(8), torch.zeros(8)])
    for options in ({}, {"draft_logits": torch.zeros(2, 8)}):
        assert emitted(judge([p], [[0, 3]], rule="block", **options)) == [1]


def test_a_block_ends_before_an_unusable_draft_row():
    """Draft 0 is certain; the row of draft 1 is unusable, and what comes behind is not looked at."""
    p = torch.stack([certain(4), certain(6), torch.full((8,), NAN), torch.full((8,), NAN)])
    q = torch.full((3, 8), 1 / 8)
    q[1, 2] = NAN
    verdict = judge([p], [[4, 5, 6]], draft_probs=q, rule="block")
    assert emitted(verdict) == [4, 6] and verdict.flags.item() == BAD_DRAFT


def test_a_block_ends_before_a_row_without_candidate():
    p = torch.stack([certain(4), torch.full((8,), -INF), torch.full((8,), NAN)])
    verdict = judge([p], [[4, 5]], rule="block")
    assert emitted(verdict) == [4] and verdict.flags.item() == EMPTY
    verdict = judge([p[1:]], [[5]], rule="block")
    assert emitted(verdict) == [] and verdict.flags.item() == EMPTY


def test_a_block_examines_all_its_rows():
    """The token rule stops at the refusal and has not seen the NaN."""
    p = torch.stack([certain(1), torch.zeros(8), torch.zeros(8)])
    p[2, 3] = NAN
    assert [judge([p], [[2, 0]], rule=rule).flags.item() for rule in ("token", "block")] == [0, HARD]
    assert emitted(judge([p], [[2, 0]], rule="block")) == [1]
    greedy = judge([p], [[2, 0]], rule="block", temperature=0)
    assert emitted(greedy) == [1] and greedy.flags.item() == 0


def test_equal_distributions_are_accepted_whole():
    """Also by the largest coin, which float32 would round to 1."""
    rows = torch.randn(4, 100)
    drafts = rows[:3].argmax(1).tolist()
    for seed in (1997841943, *range(20)):
        verdict = judge([rows], [drafts], draft_logits=rows[:3], rule="block", **keys(1, seed))
        assert verdict.num_accepted.item() == 3


def test_greedy_block_is_greedy_token():
    rows = torch.randn(4, 60).round()
    best = rows.argmax(1).tolist()
    for drafts in (best[:3], [best[0], 1, best[2]], [-1, 0, 0], [*best[:2], -1]):
        a, b = (judge([rows], [drafts], temperature=0, rule=rule) for rule in ("token", "block"))
        assert torch.equal(a.tokens, b.tokens) and torch.equal(a.flags, b.flags)


# ---- typical


P = [0.7, 0.2, 0.1]  # entropy 0.8018: exp(-H) = 0.4485


def accepts(draft, rule, *, p=P, **options):
    return judge([[logits_of(p).tolist()] * 2], [[draft]], rule=rule, **options).num_accepted.item() == 1


def test_typical_by_the_entropy():
    """delta = .3: the bound is .1345; eps does not matter."""
    assert [accepts(x, "typical", typical=(0.9, 0.3)) for x in range(3)] == [True, True, False]


def test_typical_by_eps():
    assert [accepts(x, "typical", typical=(0.15, 10.0)) for x in range(3)] == [True, True, False]
    assert [accepts(x, "typical", typical=(0.25, 10.0)) for x in range(3)] == [True, False, False]
    assert [accepts(x, "typical", typical=(0.0, 0.0)) for x in range(3)] == [True, True, True]


def test_typical_is_strict():
    """p = 1/2 exactly."""
    assert not accepts(0, "typical", p=[0.5, 0.5], typical=(0.5, 100.0))
    assert accepts(0, "typical", p=[0.5, 0.5], typical=(0.4999, 100.0))


def test_typical_default_is_eps_009_and_delta_03():
    assert accepts(2, "typical") and not accepts(2, "typical", p=[0.7, 0.22, 0.08])


def test_typical_looks_at_p_after_filters_and_at_no_draft_row():
    nothing = torch.full((1, 3), NAN)
    assert accepts(2, "typical", draft_probs=nothing)
    assert not accepts(2, "typical", top_k=2) and not accepts(1, "typical", top_p=0.5)
    assert not accepts(0, "typical", temperature=1e3, typical=(0.4, 100.0))  # 1/3 each
    verdict = judge([[logits_of(P).tolist()] * 2], [[0]], rule="typical", draft_logits=nothing)
    assert verdict.flags.item() == 0


def test_typical_draws_the_last_token_from_p(backend):
    n = MANY.get(backend, 4000)
    verdict = repeated(n, [logits_of(P).tolist()] * 2, [2], rule="typical", typical=(0.5, 10.0))
    assert (verdict.num_accepted == 0).all()
    assert near((verdict.tokens[:, 0] == 2).double().mean().item(), 0.1, n)  # the refused draft may come, too


def test_greedy_typical():
    row = logits_of(P).tolist()
    assert emitted(judge([[row, row]], [[0]], rule="typical", temperature=0)) == [0, 0]
    assert emitted(judge([[row, row]], [[1]], rule="typical", temperature=0)) == [0]


# ---- threshold


def test_threshold_of_a_point_mass():
    for x, p in enumerate([0.5, 0.3, 0.2]):
        answers = [accepts(x, "threshold", p=[0.5, 0.3, 0.2], theta=p + e) for e in (-0.01, 0.01)]
        assert answers == [True, False]
    assert not accepts(0, "threshold", p=[0.5, 0.5], theta=0.5)  # strict: 1/2 exactly
    assert accepts(0, "threshold", p=[0.5, 0.5], theta=0.4999)


def test_threshold_of_a_distribution():
    q = torch.tensor([[0.2, 0.6, 0.2]])
    for form in ({"draft_probs": q}, {"draft_logits": q.log()}):
        answers = [accepts(1, "threshold", p=[0.5, 0.3, 0.2], theta=theta, **form) for theta in (0.49, 0.51)]
        assert answers == [True, False]


def test_threshold_compares_before_filters():
    """With top-k 2 the draft has 3/8 of what is left, and 0.3 before."""
    assert accepts(1, "threshold", p=[0.5, 0.3, 0.2], theta=0.29, top_k=2)
    assert not accepts(1, "threshold", p=[0.5, 0.3, 0.2], theta=0.31, top_k=2)
    assert not accepts(2, "threshold", p=[0.5, 0.3, 0.2], theta=0.0, top_k=2)  # outside of the support
    q = torch.tensor([[0.6, 0.2, 0.2]])  # the draft model's own filters would leave id 0 alone
    assert accepts(2, "threshold", p=[0.4, 0.3, 0.3], theta=1.4, top_p=0.95, draft_logits=q.log())


def test_threshold_at_the_requests_temperature():
    """softmax(l/2) of (.8, .2) is (2/3, 1/3)."""
    for temperature, p in ((1.0, 0.2), (2.0, 1 / 3)):
        bounds_ = (p - 0.01, p + 0.01)
        assert [accepts(1, "threshold", p=[0.8, 0.2], theta=t, temperature=temperature) for t in bounds_] == [
            True,
            False,
        ]


def test_threshold_of_each_request():
    row = logits_of([0.5, 0.3, 0.2]).tolist()
    verdict = judge([[row, row]] * 3, [[1]] * 3, rule="threshold", theta=torch.tensor([0.2, 0.4, 0.0]))
    assert verdict.num_accepted.tolist() == [1, 0, 1]


def test_greedy_threshold():
    """At temperature 1, filters included; a refused draft gives the argmax."""
    row = logits_of([0.5, 0.3, 0.2]).tolist()
    for theta, top_k, expected in ((0.25, 0, [1, 0]), (0.35, 0, [0]), (0.25, 1, [0])):
        verdict = judge([[row, row]], [[1]], rule="threshold", theta=theta, temperature=0, top_k=top_k)
        assert emitted(verdict) == expected


def test_threshold_with_an_unusable_draft_row():
    for q in ([[0.5, 0.0, 0.5]], [[NAN, 0.5, 0.5]], [[0.5, -0.1, 0.6]]):
        verdict = judge(
            [[logits_of([0.5, 0.3, 0.2]).tolist()] * 2], [[1]], rule="threshold", theta=0.0,
            draft_probs=torch.tensor(q), temperature=0,
        )  # fmt: skip
        assert emitted(verdict) == [0] and verdict.flags.item() == BAD_DRAFT


def test_threshold_refused_draws_from_p(backend):
    n = MANY.get(backend, 4000)
    verdict = repeated(n, [logits_of([0.5, 0.3, 0.2]).tolist()] * 2, [1], rule="threshold", theta=0.9)
    assert (verdict.num_accepted == 0).all() and near((verdict.tokens[:, 0] == 1).double().mean().item(), 0.3, n)


# ---- all of them


@pytest.mark.parametrize("rule", ["token", "block", "typical", "threshold"])
def test_without_a_proposal_every_rule_is_sample(rule):
    rows, at = torch.randn(4, 500), keys(1, seed=5, position=9)
    plain = sk.sample(rows[:1], **at).tolist()
    assert emitted(judge([rows[:1]], [[]], rule=rule, theta=0.5, **at)) == plain
    assert emitted(judge([rows], [[-1, 4, 7]], rule=rule, theta=0.5, **at)) == plain


@pytest.mark.parametrize("rule", ["block", "typical", "threshold"])
def test_logprobs_are_those_of_the_raw_rows(rule):
    rows = torch.randn(3, 1000) * 3
    drafts = rows[:2].argmax(1)
    options = dict(rule=rule, theta=0.0, temperature=0.5, top_k=1, return_logprobs=True, **keys(1))
    verdict = sk.verify(rows, drafts, bounds([2]), **options)
    expected = rows.double().log_softmax(1)[torch.arange(3), rows.argmax(1)]
    assert verdict.num_accepted.item() == 2 and torch.allclose(verdict.logprobs[0].double(), expected, atol=1e-6)
