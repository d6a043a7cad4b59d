"""The law of verify_tree's lossless rules is the target's: exactly, by enumeration; faults put in are noticed."""

import pytest

from laws import (
    FILTERS,
    Branches,
    FixedModel,
    Model,
    Setting,
    distance,
    mean_accepted,
    speculative_law,
    target_law,
    tree,
)
from specdec_kernels.reference import filters

RULES = ["token", "traversal"]
FORMS = ["drawn", "deterministic"]
SHAPES = {
    "two leaves": (-1, -1),
    "deeper first": (-1, -1, 0),
    "deeper last": (-1, -1, 1),
    "depth first": (-1, 0, -1),
    "three leaves": (-1, -1, -1),
    "chain": (-1, 0, 1),
    "two below": (-1, 0, 0),
}
LARGE = {"full": (-1, -1, 0, 0, 1, 1), "comb": (-1, 0, 1, 1, 0, -1), "depth first": (-1, 0, 0, -1, 3, 3)}
EXACT, WRONG = 1e-9, 1e-3


def setting(vocabulary=3, **options):
    return Setting(target=Model(vocabulary, 1), draft=Model(vocabulary, 2), **options)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
def test_every_shape(rule, form, shape):
    length = 3 if form == "deterministic" or shape in ("two leaves", "deeper first") else 2
    assert distance(setting(rule=rule, form=form, parents=SHAPES[shape]), length) < EXACT


@pytest.mark.parametrize("parameters", FILTERS[1:], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
def test_every_filter(rule, form, parameters):
    """With few ids left a node proposes fewer children: the rest are absent."""
    assert distance(setting(rule=rule, form=form, parents=(-1, -1, 0), parameters=parameters), 2) < EXACT


@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize("rule", RULES)
def test_larger_trees(rule, shape):
    assert distance(setting(rule=rule, form="deterministic", parents=LARGE[shape]), 4) < EXACT


@pytest.mark.parametrize("vocabulary", [2, 4])
@pytest.mark.parametrize("rule", RULES)
def test_sizes(rule, vocabulary):
    """With two ids the second sibling is what the first one is not: it can't be refused."""
    assert distance(setting(vocabulary, rule=rule, form="drawn", parents=(-1, -1, 0)), 2) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("parameters", FILTERS, ids=str)
@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize("rule", RULES)
def test_larger_trees_drawn(rule, shape, parameters):
    assert distance(setting(rule=rule, form="drawn", parents=LARGE[shape], parameters=parameters), 2) < EXACT


# ---- faults: each is put in, and the same test notices ---------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_siblings_whose_q_is_not_renormalised(rule, monkeypatch):
    def draft_distribution(self, j, removed):
        q = self.own_distribution(j).clone()
        q[removed] = 0.0
        return q

    monkeypatch.setattr(tree.TreeRequest, "draft_distribution", draft_distribution)
    assert distance(setting(rule=rule, form="drawn", parents=(-1, -1)), 2) > WRONG


@pytest.mark.parametrize("rule", RULES)
def test_siblings_judged_without_removal(rule, monkeypatch):
    """As if each had been drawn from the whole distribution."""
    monkeypatch.setattr(tree.TreeRequest, "draft_distribution", lambda self, j, removed: self.own_distribution(j))
    assert distance(setting(rule=rule, form="drawn", parents=(-1, -1)), 2) > WRONG


@pytest.mark.parametrize("rule", RULES)
def test_siblings_judged_against_what_none_of_them_has_taken(rule, monkeypatch):
    """A refused sibling leaves less of p for the next one."""
    monkeypatch.setattr(tree, "residual", lambda p, q, r=1.0: p)
    assert distance(setting(rule=rule, form="drawn", parents=(-1, -1)), 2) > WRONG


@pytest.mark.parametrize("rule", RULES)
def test_bonus_from_the_row_of_the_parent(rule, monkeypatch):
    right = tree.RULES[rule]

    def wrong(r, decide):
        path, last, flags = right(r, decide)
        if path and not r.children()[path[-1]]:
            row = r.target[r.parents[path[-1]] + 1]
            last = r.weights(filters.clean(row)[0], decide)
        return path, last, flags

    monkeypatch.setitem(tree.RULES, rule, wrong)
    assert distance(setting(rule=rule, form="drawn", parents=(-1, 0)), 3) > WRONG


def test_traversal_with_the_ratio_for_a_chance(monkeypatch):
    monkeypatch.setattr(tree, "chance", lambda p, q, r: r)
    assert distance(setting(rule="traversal", form="drawn", parents=(-1, 0)), 3) > WRONG


def test_drawn_siblings_judged_as_deterministic(monkeypatch):
    """Lossless as well, since the siblings were chosen independently of p; but not the other way round."""
    s = setting(form="drawn", parents=(-1, -1, 0))
    monkeypatch.setattr(tree.TreeRequest, "own_distribution", lambda r, j: filters.one_hot(r.tokens[j], 3))
    monkeypatch.setattr(tree.TreeRequest, "draft_distribution", lambda r, j, removed: r.own_distribution(j))
    assert distance(s, 2) < EXACT


def test_likeliest_siblings_judged_as_drawn():
    class Chosen(Branches):
        def draw(self, weights, seed, position, stream, index, decide=None):
            if stream == 0:
                return int(weights.argmax())
            return super().draw(weights, seed, position, stream, index, decide)

    assert distance(setting(form="drawn", parents=(-1, -1)), 2, Chosen()) > WRONG


# ---- relations between the rules -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("of_chain", "of_tree"), [("token", "token"), ("block", "traversal")])
def test_a_chain_is_a_tree(of_chain, of_tree):
    """Not only is the law the same: also how many drafts are accepted."""
    for number in range(3):
        models = {"target": Model(3, number), "draft": Model(3, number + 10)}
        chain = Setting(**models, rule=of_chain, drafts=3)
        as_tree = Setting(**models, rule=of_tree, form="drawn", parents=(-1, 0, 1))
        assert mean_accepted(as_tree) == pytest.approx(mean_accepted(chain), abs=1e-12)


def test_second_sibling_of_two_ids_is_certain():
    """p = (.25, .75), both ids proposed: one of them is accepted, with the law p."""
    s = Setting(target=FixedModel([0.25, 0.75]), draft=FixedModel([0.5, 0.5]), form="deterministic", parents=(-1, -1))
    assert mean_accepted(s) == pytest.approx(1.0, abs=1e-12)
    assert speculative_law(s, 1) == pytest.approx(target_law(s, 1), abs=1e-12)
