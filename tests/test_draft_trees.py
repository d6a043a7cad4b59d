"""Trees of drafts: which nodes they have, that the text stays the target's, and the law of whole texts, exactly."""

import itertools
import math

import pytest
import torch

import specloop.decode
from laws import tree
from loop_laws import PROMPT, Cut, distance, distribution, loop_law, model_draft, rows, wanted
from scripted import Scripted, request_for
from specloop.decode import decode
from specloop.drafts.base import Proposal
from specloop.drafts.chain import ChainDraft
from specloop.drafts.lookup import LookupDraft
from specloop.faults import GuardedDraft
from versions import PROMPT as TEXT
from versions import alone, pair_of, parts

EXACT, WRONG = 1e-9, 1e-3
ONE = {"temperature": 1.0}


def models(vocab_size, **options):
    return Scripted(rows(0, vocab_size), vocab_size, **options), Scripted(rows(1, vocab_size), vocab_size)


def proposed(drafter, k, tree, ids=PROMPT, **options):
    draft = GuardedDraft(model_draft(drafter, drafter.vocab_size, tree=tree, **options), drafter.vocab_size)
    draft.outlook(ids)
    found = draft.propose(k)
    assert draft.faults == []
    return found


def paths(found):
    """The ids on the way to each node."""
    ways = []
    for token, parent in zip(found.tokens, found.parents, strict=True):
        ways.append([*(ways[parent] if parent >= 0 else ()), token])
    return [tuple(way) for way in ways]


# ---- which nodes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("k, nodes", [(1, 3), (2, 5), (3, 1), (3, 7), (4, 12), (2, 64)])
def test_the_nodes_are_those_that_the_draft_reaches_most_often(k, nodes, temperature):
    """Against all sequences of up to k ids, sorted by the product of their probabilities."""
    drafter = Scripted(rows(1, 4), 4)
    found = proposed(drafter, k, nodes, sampling={"temperature": temperature})
    every = {(): 1.0}
    for n in range(k):
        for way in itertools.product(range(4), repeat=n):
            q = distribution(drafter.logits([*PROMPT, *way]), temperature or 1.0)
            every |= {(*way, token): every[way] * q[token] for token in range(4)}
    del every[()]
    best = sorted(every, key=lambda way: -every[way])[:nodes]
    assert paths(found) == best  # in that order: parents before children, and the likeliest sibling first
    assert found.logits is None and found.source == "model"


def test_a_tree_one_deep_is_a_set_of_candidates():
    drafter = Scripted(rows(1, 9), 9)
    found = proposed(drafter, 1, 4)
    row = drafter.logits(PROMPT)
    assert found.parents == [-1] * 4 and found.tokens == sorted(range(9), key=lambda t: -row[t])[:4]
    assert drafter.passes == [1]  # of which one pass is enough


def test_no_node_follows_an_end_or_an_impossible_id():
    drafter = Scripted(lambda prefix: [1.0, 0.9, -math.inf], 3, eos_ids=[0])
    found = proposed(drafter, 3, 6)
    assert paths(found) == [(0,), (1,), (1, 0), (1, 1), (1, 1, 0), (1, 1, 1)]


def test_a_pass_per_node_that_has_children_to_come():
    drafter = Scripted(rows(1, 4), 4)
    proposed(drafter, 4, 6)
    assert len(drafter.passes) <= 6
    assert sum(drafter.passes) == len(drafter.passes)


def test_a_cut_vocabulary():
    drafter = Cut(rows(1, 6), 6, [1, 3, 4])
    found = proposed(drafter, 2, 5)
    assert set(found.tokens) <= {1, 3, 4} and len(found) == 5


# ---- what is refused -------------------------------------------------------------------------------------------------

BAD = {
    "a parent that comes later": ([1, 2], [1, -1]),
    "its own parent": ([1], [0]),
    "a parent before the root": ([1], [-2]),
    "siblings alike": ([1, 1], [-1, -1]),
    "an id out of range": ([1, 9], [-1, 0]),
    "an absent node": ([-1], [-1]),
    "fewer parents than nodes": ([1, 2], [-1]),
    "no integers": ([1], [0.5]),
    "too deep": ([1, 2, 3, 4], [-1, 0, 1, 2]),
    "too many": ([0, 1, 2, 3, 4, 5, 6, 7, 8] * 8, [-1] * 9 + [n for n in range(7) for _ in range(9)]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_malformed_tree_is_a_fault(name):
    tokens, parents = BAD[name]

    class Draft:
        name = "bad"
        begin = append = lambda self, ids: None
        outlook = lambda self: (0, 8)
        propose = lambda self, k: Proposal(list(tokens), list(parents))

    draft = GuardedDraft(Draft(), 9)
    draft.outlook([1])
    assert draft.propose(3).tokens == [] and len(draft.faults) == 1


def test_rows_do_not_go_with_a_tree():
    class Draft:
        name = "bad"
        begin = append = lambda self, ids: None
        outlook = lambda self: (0, 8)
        propose = lambda self, k: Proposal([1], [-1], torch.zeros(1, 9))

    draft = GuardedDraft(Draft(), 9)
    draft.outlook([1])
    assert draft.propose(3).tokens == [] and "chosen, not drawn" in draft.faults[0]


# ---- the text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k, nodes", [(1, 1), (1, 4), (2, 3), (3, 8), (8, 20)])
def test_greedy_text_is_that_of_plain_decoding(k, nodes):
    """Report A6: a node that is the draft's second choice is taken where it is the target's first."""
    target, drafter = models(12)
    plain, request = (
        request_for(target, [1, 2], 60, draft, k=k) for draft in (None, model_draft(drafter, 12, tree=nodes))
    )
    for r in (plain, request):
        list(decode(target, [r]))
    assert request.ids == plain.ids and request.draft.faults == []
    counts = request.stats.speculation
    assert counts.proposed and counts.rounds <= 60


def test_a_wider_set_is_accepted_more_often():
    accepted = []
    for nodes in (1, 3, 12):
        target, drafter = models(12)
        request = request_for(target, [1, 2], 60, model_draft(drafter, 12, tree=nodes), k=1)
        list(decode(target, [request]))
        accepted.append(request.stats.speculation.accepted)
    assert accepted[0] < accepted[1] < accepted[2]  # with all 12 ids the right one is among them
    assert accepted[2] == 30


@pytest.mark.parametrize("kv", ["f32", "int8"])
@pytest.mark.parametrize("nodes", [3, 9])
def test_a_pair_with_trees(nodes, kv):
    with pair_of(1, draft=parts(4, kv=kv), k=4, kv=kv) as pair:
        result = pair.generate(TEXT, max_new_tokens=40, tree=nodes)
        assert result.tokens == alone(1, TEXT, 40, kv=kv) and result.stats.speculation.faults == []
        assert result.stats.speculation.proposed


def test_trees_and_chains_in_one_batch():
    target, drafter = models(12)
    drafts = [
        model_draft(drafter, 12, tree=6),
        model_draft(drafter, 12),
        ChainDraft([LookupDraft(), model_draft(target, 12, tree=4)]),
        None,
    ]
    prompts = [[1], [2, 3], [1, 2, 1, 2, 1], [4]]
    together = [request_for(target, p, 40, d, k=3) for p, d in zip(prompts, drafts, strict=True)]
    list(decode(target, list(together)))
    for prompt, request in zip(prompts, together, strict=True):
        plain = request_for(target, prompt, 40)
        list(decode(target, [plain]))
        assert request.ids == plain.ids and request.draft.faults == []


# ---- laws ------------------------------------------------------------------------------------------------------------


def off(vocab_size, k, length, nodes, sampling=ONE, **options):
    target, drafter = models(vocab_size)
    make = lambda: model_draft(drafter, vocab_size, sampling, tree=nodes)
    return distance(loop_law(target, make, k, length, sampling, **options), wanted(target, length, sampling))


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("vocab_size, k, length, nodes", [(2, 3, 4, 3), (3, 2, 3, 4), (4, 1, 3, 3), (3, 3, 3, 6)])
def test_texts_have_the_law_of_plain_sampling(vocab_size, k, length, nodes, rule):
    assert off(vocab_size, k, length, nodes, rule=rule) < EXACT


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.7}, {"temperature": 1.0, "top_k": 2}, {"temperature": 0.7, "top_p": 0.8}], ids=str
)
def test_temperatures_and_filters(sampling):
    """A node that the filters of the target's row exclude is refused for certain."""
    assert off(4, 2, 3, 5, sampling) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("nodes", [2, 5, 9])
def test_longer_texts(nodes, rule):
    assert off(4, 3, 4, nodes, rule=rule) < EXACT


def test_siblings_judged_without_removal_are_noticed(monkeypatch):
    """A refused sibling's mass has to go to the others."""
    monkeypatch.setattr(tree, "residual", lambda p, q, r=1.0: p)
    assert off(3, 1, 3, 2) > WRONG


def test_a_row_of_the_wrong_node_is_noticed(monkeypatch):
    inner = specloop.decode.forward_parts

    def wrong(model, parts):
        logits = inner(model, parts)
        return logits[[0, *range(len(logits) - 1, 0, -1)]] if len(logits) else logits

    monkeypatch.setattr(specloop.decode, "forward_parts", wrong)
    assert off(3, 2, 3, 4) > WRONG


def test_a_draft_of_the_tiny_model_has_room_for_the_tree():
    """The last tokens before the limit: the tree is no deeper than what may still come."""
    with pair_of(1, draft=parts(1), k=8) as pair:
        for n in range(1, 6):
            result = pair.generate(TEXT, max_new_tokens=n, tree=30)
            assert result.tokens == alone(1, TEXT, n) and result.stats.speculation.faults == []
