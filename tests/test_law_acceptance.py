"""How much more block and traversal verification accept than the token rule, on random models, exactly."""

import itertools

import numpy as np
import pytest
import torch

from laws import DirichletModel, Model, Setting, mean_accepted

VOCABULARY, TREE_RULES = 3, ("token", "traversal")


def random_models(number):
    return {"target": DirichletModel(VOCABULARY, number), "draft": DirichletModel(VOCABULARY, 10_000 + number)}


def known_models(drafts):
    """Six models on which the rules have been compared outside of this library: the gain to be reached is known."""
    generator = np.random.default_rng(7)
    for size, _ in itertools.product((2, 3), range(6)):
        models = {"target": Model(VOCABULARY, 0), "draft": Model(VOCABULARY, 0)}
        for length in range(size + 1):
            for context in itertools.product(range(VOCABULARY), repeat=length):
                for model in models.values():
                    model.rows[context] = torch.tensor(generator.dirichlet([0.7] * VOCABULARY)).log()
        if size == drafts:
            yield models
        generator.bit_generator.advance(800_000 * size)  # that comparison used these numbers for something else


def gain(models, drafts):
    """Of block over token, in mean accepted drafts per round; and both means."""
    mean, count = dict.fromkeys(("token", "block"), 0.0), 0
    for pair in models:
        both = {rule: mean_accepted(Setting(**pair, rule=rule, drafts=drafts)) for rule in mean}
        assert both["block"] >= both["token"] - 1e-12
        mean, count = {rule: mean[rule] + both[rule] for rule in mean}, count + 1
    return mean["block"] / mean["token"] - 1, [total / count for total in mean.values()]


@pytest.mark.parametrize(
    ("drafts", "low", "high", "means"), [(2, 0.04, 0.06, [0.9567, 1.01]), (3, 0.13, 0.17, [0.9904, 1.1364])]
)
def test_block_accepts_more_than_token(drafts, low, high, means):
    more, both = gain(known_models(drafts), drafts)
    assert low <= more <= high and both == pytest.approx(means, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("drafts", "low", "high"), [(2, 0.03, 0.06), (3, 0.07, 0.11)])
def test_block_accepts_more_on_many_models(drafts, low, high):
    """The gain differs between models; its mean over many at K = 3 is below that of the six above."""
    assert low <= gain(map(random_models, range(150)), drafts)[0] <= high


def test_with_one_draft_block_is_token():
    assert gain(map(random_models, range(6)), 1)[0] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("parents", [(-1, -1, 0), (-1, 0, -1), (-1, 0, -1, 2)], ids=str)
@pytest.mark.parametrize("form", ["drawn", "deterministic"])
def test_traversal_accepts_at_least_what_token_does(parents, form):
    """More where siblings are drawn; of deterministic ones both accept the same."""
    for number in range(6):
        s = {rule: Setting(**random_models(number), rule=rule, form=form, parents=parents) for rule in TREE_RULES}
        more = mean_accepted(s["traversal"]) - mean_accepted(s["token"])
        assert more > 1e-3 if form == "drawn" else abs(more) < 1e-12
