"""Trees of drafts: inputs whose right answer is known, on every backend."""

import math

import pytest
import torch

import specdec_kernels as sk
from verify_cases import FEW_BACKENDS, MANY, bounds, emitted, keys, logits_of, near, running

NAN, INF = math.nan, math.inf
HARD, EMPTY, BAD_DRAFT = 1, 2, 8
LOSSLESS = ["token", "traversal"]
RULES = [*LOSSLESS, "typical", "threshold"]


@pytest.fixture(params=FEW_BACKENDS, autouse=True)
def backend(request):
    torch.manual_seed(0)
    with running(request.param):
        yield request.param


def judge(*trees, **options):
    """verify_tree() of requests (rows [D + 1][V], tokens [D], parents [D])."""
    rows = torch.cat([torch.as_tensor(rows, dtype=torch.float32) for rows, _, _ in trees])
    tokens = torch.tensor([x for _, tokens, _ in trees for x in tokens], dtype=torch.int64)
    parents = torch.tensor([j for _, _, parents in trees for j in parents], dtype=torch.int64)
    cu_nodes = bounds([len(tokens) for _, tokens, _ in trees])
    return sk.verify_tree(rows, tokens, parents, cu_nodes, **{**keys(len(trees)), "theta": 0.5, **options})


def repeated(n, rows, tokens, parents, *, draft_probs=None, **options):
    if draft_probs is not None:
        options["draft_probs"] = torch.as_tensor(draft_probs).repeat(n, 1)
    return judge(*[(rows, tokens, parents)] * n, **options)


def certain(*ids, vocabulary=9):
    """Rows that are point masses."""
    rows = torch.full((len(ids), vocabulary), -INF)
    rows[torch.arange(len(ids)), list(ids)] = 0.0
    return rows


def path(verdict, b=0):
    return [j for j in verdict.path[b].tolist() if j >= 0]


@pytest.mark.parametrize("rule", RULES)
def test_bonus_comes_from_the_row_of_the_leaf(rule):
    """One path of two nodes, all accepted."""
    verdict = judge((certain(3, 4, 7), [3, 4], [-1, 0]), rule=rule)
    assert emitted(verdict) == [3, 4, 7] and path(verdict) == [0, 1] and verdict.num_accepted.item() == 2


@pytest.mark.parametrize("rule", RULES)
def test_a_shallow_leaf_has_its_own_row(rule):
    """Node 0 goes two deep; node 2, which p wants, is a leaf below the root."""
    verdict = judge((certain(5, 0, 0, 8), [4, 6, 5], [-1, 0, -1]), rule=rule)
    assert emitted(verdict) == [5, 8] and path(verdict) == [2]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_nodes_are_numbered_inside_their_request(rule, temperature):
    one = (certain(2, 3, 1, 6), [2, 5, 3], [-1, -1, 0])
    none = (certain(4), [], [])
    other = (certain(1, 8, 7), [0, 1], [-1, -1])
    verdict = judge(one, none, other, rule=rule, temperature=temperature)
    assert [emitted(verdict, b) for b in range(3)] == [[2, 3, 6], [4], [1, 7]]
    assert [path(verdict, b) for b in range(3)] == [[0, 2], [], [1]]
    assert verdict.path.dtype is torch.int32 and verdict.tokens.dtype is torch.int64
    assert tuple(verdict.path.shape) == (3, 2) and tuple(verdict.tokens.shape) == (3, 3)


def test_rows_belong_to_their_nodes():
    """A comb of point masses: every node's row allows the next one only."""
    tokens, parents = [1, 0, 2, 0, 3, 0], [-1, -1, 0, 0, 2, 2]
    for rule in RULES:
        verdict = judge((certain(1, 2, 8, 3, 8, 5, 8), tokens, parents), rule=rule)
        assert emitted(verdict) == [1, 2, 3, 5] and path(verdict) == [0, 2, 4]


@pytest.mark.parametrize("rule", LOSSLESS)
def test_greedy_follows_the_argmax(rule):
    rows = torch.randn(6, 50)
    best = rows.argmax(1).tolist()
    tokens, parents = [(best[0] + 1) % 50, best[0], 3, best[2], 4], [-1, -1, 0, 1, 3]
    verdict = judge((rows, tokens, parents), rule=rule, temperature=0, draft_probs=torch.full((5, 50), NAN))
    expected = [best[0], best[2], best[4]] if best[4] != 4 else [best[0], best[2], best[4], best[5]]
    assert emitted(verdict) == expected and path(verdict)[:2] == [1, 3] and verdict.flags.item() == 0
    ties = torch.tensor([[1.0, 1.0, 0.0]] * 3)
    assert path(judge((ties, [1, 0], [-1, -1]), rule=rule, temperature=0)) == [1]


@pytest.mark.parametrize("rule", RULES)
def test_without_a_proposal_every_rule_is_sample(rule):
    rows, at = torch.randn(3, 500), keys(1, seed=5, position=9)
    plain = sk.sample(rows[:1], **at).tolist()
    assert emitted(judge((rows[:1], [], []), rule=rule, **at)) == plain
    assert emitted(judge((rows, [-1, 4], [-1, 0]), rule=rule, **at)) == plain
    assert emitted(judge((rows, [-1, -1], [-1, -1]), rule=rule, **at)) == plain


@pytest.mark.parametrize("rule", RULES)
def test_an_absent_node_is_absent_with_all_below(rule):
    """Their rows are not looked at, nor is what their tokens and draft rows hold."""
    rows = certain(4, 0, 0, 6)
    rows[1:3] = NAN
    q = torch.full((3, 9), 1 / 9)
    q[:2] = NAN
    for options in ({}, {"draft_probs": q}):
        verdict = judge((rows, [-1, 10**6, 4], [-1, 0, -1]), rule=rule, **options)
        assert emitted(verdict) == [4, 6] and path(verdict) == [2] and verdict.flags.item() == 0


@pytest.mark.parametrize("rule", ["token", "traversal", "threshold"])
@pytest.mark.parametrize("bad", ["NaN", "negative", "infinite", "zero"])
def test_an_unusable_sibling_is_skipped_with_all_below(rule, bad):
    q = torch.full((3, 9), 1 / 9)
    q[0, 8 if bad != "zero" else 3] = {"NaN": NAN, "negative": -0.1, "infinite": INF, "zero": 0.0}[bad]
    rows = certain(4, 0, 0, 6)
    rows[1:3] = NAN  # of node 0, whose draft row is bad, and of the one below
    verdict = judge((rows, [3, 5, 4], [-1, 0, -1]), rule=rule, draft_probs=q)
    assert emitted(verdict) == [4, 6] and path(verdict) == [2] and verdict.flags.item() == BAD_DRAFT


@pytest.mark.parametrize("rule", RULES)
def test_a_last_row_without_candidate_keeps_the_path(rule):
    rows = certain(3, 4, 7)
    rows[2] = -INF
    verdict = judge((rows, [3, 4], [-1, 0]), rule=rule, return_logprobs=True)
    assert emitted(verdict) == [3, 4] and verdict.flags.item() == EMPTY and verdict.logprobs[0, 2].isnan()
    rows[0] = NAN
    verdict = judge((rows, [3, 4], [-1, 0]), rule=rule)
    assert emitted(verdict) == [] and verdict.flags.item() == HARD | EMPTY and path(verdict) == []


def test_examined_rows():
    """Top-down: the rows on the way. Bottom-up: all rows. Either way nothing but a flag comes of it."""
    rows = certain(3, 4, 5, 6)
    rows[2, 0] = NAN  # row of node 1, which p does not want
    for rule, flags in (("token", 0), ("traversal", HARD)):
        verdict = judge((rows, [3, 5, 4], [-1, -1, 0]), rule=rule)
        assert emitted(verdict) == [3, 4, 6] and verdict.flags.item() == flags


def test_coin_equal_to_the_probability_refuses():
    """p = 1/4 each, and the coin of node 0 is exactly 1/4: refused; where all ids are proposed another one comes."""
    quarter = keys(1, 1673268599)
    for rule in LOSSLESS:
        assert path(judge((torch.zeros(2, 4), [2], [-1]), rule=rule, **quarter)) == []
        verdict = judge((torch.zeros(5, 4), [0, 1, 2, 3], [-1] * 4), rule=rule, **quarter)
        assert path(verdict)[0] != 0 and verdict.num_accepted.item() == 1


def test_a_probability_of_zero_is_never_accepted():
    for rule in LOSSLESS:
        for at in (keys(1, 60039404), keys(1, 3)):  # the first: coin 0 is exactly 0
            verdict = judge((certain(1, 5, 6), [0, 1], [-1, -1]), rule=rule, **at)
            assert emitted(verdict) == [1, 6] and path(verdict) == [1]


def test_siblings_that_are_certain_take_turns(backend):
    """p = (.2, .3, .5), ids 0 and 1 proposed: each comes with its own probability."""
    n = MANY.get(backend, 4000)
    rows = torch.stack([logits_of([0.2, 0.3, 0.5])] * 3)
    for rule in LOSSLESS:
        verdict = repeated(n, rows, [0, 1], [-1, -1], rule=rule)
        for x, p in enumerate((0.2, 0.3, 0.5)):
            assert near((verdict.tokens[:, 0] == x).double().mean().item(), p, n)
        assert torch.equal(verdict.num_accepted, (verdict.tokens[:, 0] < 2).int())


def test_drawn_siblings_take_turns(backend):
    """p = (1/4, 1/2, 1/4), q = (1/2, 1/4, 1/4): id 0 is accepted with 1/2; then only id 1 is left, and it is next."""
    n = MANY.get(backend, 4000)
    rows = torch.stack([logits_of([0.25, 0.5, 0.25])] * 3)
    for rule in LOSSLESS:
        verdict = repeated(n, rows, [0, 1], [-1, -1], draft_probs=[[0.5, 0.25, 0.25]] * 2, rule=rule)
        assert (verdict.num_accepted == 1).all()
        assert near((verdict.path[:, 0] == 0).double().mean().item(), 0.5, n)


def test_q_loses_a_refused_sibling_and_is_renormalised(backend):
    """p = (.1, .3, .6), q = (.5, .25, .25). Id 0 is accepted with .2. Of p is left (0, .05, .35), of q (0, .5, .5):
    id 1 is accepted with (.05/.4)/.5 = .25, and otherwise id 2 comes."""
    n = MANY.get(backend, 8000)
    rows = torch.stack([logits_of([0.1, 0.3, 0.6])] * 3)
    verdict = repeated(n, rows, [0, 1], [-1, -1], draft_probs=[[0.5, 0.25, 0.25]] * 2)
    for x, share in enumerate((0.2, 0.8 * 0.25, 0.8 * 0.75)):
        assert near((verdict.tokens[:, 0] == x).double().mean().item(), share, n)


def test_an_empty_residual_leaves_p(backend):
    """q need not be normalised: (.9, .9) takes all of p; the refused ids come all the same."""
    rows = torch.stack([logits_of([0.5, 0.5, 0.0])] * 2)
    for rule in LOSSLESS:
        verdict = repeated(200, rows, [0], [-1], draft_probs=[[0.9, 0.9, 0.0]], rule=rule)
        refused = verdict.tokens[verdict.num_accepted == 0, 0]
        assert set(refused.tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("of_tree", "of_chain"), [("token",) * 2, ("traversal", "block"), *[(r, r) for r in RULES[2:]]]
)
def test_a_chain_is_a_tree_with_one_branch(of_tree, of_chain):
    generator = torch.Generator().manual_seed(5)
    accepted = 0
    for number in range(25):
        vocabulary, k = [5, 70, 300][number % 3], number % 5
        rows = torch.randn(k + 1, vocabulary, generator=generator) * 2
        q = (rows[:-1] + torch.randn(k, vocabulary, generator=generator)).softmax(1)
        drafts = q.multinomial(1, generator=generator)[:, 0] if k else torch.zeros(0, dtype=torch.int64)
        if number % 7 == 3:
            drafts[1:2] = -1
        options = dict(temperature=0.8, top_p=0.95, theta=0.3, typical=(0.2, 0.5), **keys(1, seed=number))
        if number % 2:
            options["draft_probs"] = q
        chain = sk.verify(rows, drafts, bounds([k]), rule=of_chain, **options)
        tree = sk.verify_tree(rows, drafts, torch.arange(-1, k - 1), bounds([k]), rule=of_tree, **options)
        for name in ("tokens", "num_accepted", "flags"):
            assert torch.equal(getattr(chain, name), getattr(tree, name)), (number, name)
        n = chain.num_accepted.item()
        assert path(tree) == list(range(n))
        accepted += n
    assert accepted > 10


# ---- typical and threshold


def test_typical_takes_the_longest_path():
    """The bound is .25; node 0 has more probability, but nothing below it is accepted."""
    flat = logits_of([0.5, 0.4, 0.1])
    low = logits_of([0.1, 0.1, 0.8])
    rows = torch.stack([flat, low, flat, flat, flat])
    verdict = judge((rows, [0, 1, 0, 1], [-1, -1, 0, 1]), rule="typical", typical=(0.25, 100.0))
    assert path(verdict) == [1, 3]


def test_typical_breaks_ties_by_probability_then_by_node():
    flat = logits_of([0.5, 0.4, 0.1])
    rows = torch.stack([flat] * 5)
    options = {"rule": "typical", "typical": (0.05, 100.0)}
    # .4 * .5 against .5 * .1: the second branch
    assert path(judge((rows, [0, 1, 2, 0], [-1, -1, 0, 1]), **options)) == [1, 3]
    # .4 * .5 against .5 * .4, equal: the lowest node at the end
    assert path(judge((torch.zeros(5, 4), [0, 1, 2, 3], [-1, -1, 0, 1]), **options)) == [0, 2]
    assert path(judge((torch.zeros(5, 4), [0, 1, 2, 3], [-1, -1, 1, 0]), **options)) == [1, 2]


def test_typical_goes_on_below_accepted_nodes_only():
    flat = logits_of([0.5, 0.4, 0.1])
    rows = torch.stack([flat] * 4)
    verdict = judge((rows, [2, 0, 0], [-1, 0, 1]), rule="typical", typical=(0.25, 100.0))
    assert path(verdict) == [] and verdict.num_accepted.item() == 0


def test_threshold_goes_to_the_child_of_largest_logit():
    """c = id 1 with .5; c_best is the child of largest P_draft, id 2 with .6: the ratio is 5/6, not 5/2."""
    p = logits_of([0.2, 0.5, 0.3])
    rows, q = torch.stack([p] * 4), torch.tensor([[0.2, 0.2, 0.6]] * 3)
    for theta, expected in ((0.82, [1]), (0.85, [])):
        verdict = judge((rows, [2, 1, 0], [-1, -1, -1]), rule="threshold", theta=theta, draft_probs=q)
        assert path(verdict) == expected
    for theta, expected in ((0.49, [1]), (0.51, [])):  # without distributions P_draft is 1
        assert path(judge((rows, [2, 1, 0], [-1, -1, -1]), rule="threshold", theta=theta)) == expected
    # Among equal logits the lowest id, not the first node.
    assert path(judge((torch.zeros(3, 4), [3, 1], [-1, -1]), rule="threshold", theta=0.1)) == [1]


def test_threshold_stops_outside_the_support():
    p = logits_of([0.2, 0.5, 0.3])
    rows = torch.stack([p] * 2)
    assert path(judge((rows, [2], [-1]), rule="threshold", theta=0.0, top_k=1)) == []
    verdict = judge((rows, [2], [-1]), rule="threshold", theta=0.0, top_k=1, temperature=0)
    assert emitted(verdict) == [1]
    assert path(judge((rows, [2], [-1]), rule="threshold", theta=0.25, temperature=0)) == [0]


# ---- what comes back


@pytest.mark.parametrize("rule", RULES)
def test_logprobs_are_those_of_the_raw_rows(rule):
    rows = torch.randn(4, 500) * 3
    best = rows.argmax(1).tolist()
    options = {"temperature": 0.5, "top_k": 1, "return_logprobs": True, "theta": 0.0}
    verdict = judge((rows, [(best[0] + 1) % 500, best[0], best[2]], [-1, -1, 1]), rule=rule, **options)
    expected = rows.double().log_softmax(1)[[0, 2, 3], [best[0], best[2], best[3]]]
    assert path(verdict) == [1, 2] and torch.allclose(verdict.logprobs[0].double(), expected, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_width_changes_nothing(rule):
    rows = torch.randn(4, 70)
    trees = (rows, [1, 2, 3], [-1, -1, 0])
    a, b = judge(trees, rule=rule), judge(trees, rule=rule, max_depth=6)
    assert emitted(a) == emitted(b) and path(a) == path(b) and tuple(b.path.shape) == (1, 6)
    assert (b.path[0, len(path(b)) :] == -1).all() and (b.tokens[0, len(emitted(b)) :] == -1).all()


def test_empty_calls():
    none = torch.zeros(0, dtype=torch.int64)
    verdict = sk.verify_tree(torch.zeros(0, 7), none, none, bounds([]), **keys(0))
    assert tuple(verdict.tokens.shape) == (0, 1) and tuple(verdict.path.shape) == (0, 0)
    assert emitted(sk.verify_tree(torch.zeros(1, 1), none, none, bounds([0]), **keys(1))) == [0]
