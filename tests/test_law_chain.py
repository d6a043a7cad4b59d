"""The law of verify's lossless rules is the target's: exactly, by enumeration; faults that are put in are noticed."""

import itertools

import pytest
import torch

from laws import FILTERS, Branches, FixedModel, Model, Setting, chain, chain_round, distance, speculative_law
from specdec_kernels.reference import draws

RULES = ["token", "block"]
FORMS = ["draft_logits", "draft_probs", "point", "cut", "mixed", "holes"]
EXACT, WRONG = 1e-9, 1e-3


def setting(vocabulary=3, **options):
    return Setting(target=Model(vocabulary, 1), draft=Model(vocabulary, 2), **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
def test_every_form_of_draft(rule, form):
    assert distance(setting(rule=rule, form=form), 3) < EXACT


@pytest.mark.parametrize("parameters", FILTERS[1:], ids=str)
@pytest.mark.parametrize("form", ["draft_logits", "point"])
@pytest.mark.parametrize("rule", RULES)
def test_every_filter(rule, form, parameters):
    assert distance(setting(rule=rule, form=form, parameters=parameters), 2) < EXACT


@pytest.mark.parametrize(("vocabulary", "drafts", "length"), [(2, 1, 4), (2, 3, 4), (4, 1, 3), (4, 2, 1), (1, 3, 4)])
@pytest.mark.parametrize("rule", RULES)
def test_sizes(rule, vocabulary, drafts, length):
    assert distance(setting(vocabulary, rule=rule, drafts=drafts), length) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("parameters", FILTERS, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
def test_four_ids_three_drafts(rule, form, parameters):
    assert distance(setting(4, rule=rule, form=form, drafts=3, parameters=parameters), 3) < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("p", [[0.0, 1.0, 0.0], [0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
def test_zeros_and_equal_rows(rule, p):
    """p that holds zeros; q = p, where nothing can be refused and there is no residual."""
    for draft in (FixedModel([0.3, 0.4, 0.3]), FixedModel(p)):
        assert distance(Setting(target=FixedModel(p), draft=draft, rule=rule), 3) < EXACT


# ---- faults: each is put in, and the same test notices ---------------------------------------------------------------


def test_block_with_the_ratio_for_a_chance(monkeypatch):
    """Accepting iff u < r instead of u < h."""
    monkeypatch.setattr(chain, "chance", lambda p, q, r: r)
    assert distance(setting(rule="block"), 3) > WRONG


class ProductOfUniforms(Branches):
    """Accepts the longest prefix with u_1 ... u_i < r_i; every u is one of the middles of STEPS equal pieces."""

    STEPS = 16

    def accept(self, seed, position, i, q, p, decide):
        piece = self.decide(self.key(position, 1, i), [n / self.STEPS for n in range(self.STEPS + 1)])
        self.product = (1.0 if i == 0 else self.product) * (piece + 0.5) / self.STEPS
        return self.product < p


def test_block_with_products_of_uniforms(monkeypatch):
    """P(u_1 ... u_i < t) is more than t. For p = (.5, .5), q = (.9, .1), K = 2 the first token is 0 with .687."""
    s = Setting(target=FixedModel([0.5, 0.5]), draft=FixedModel([0.9, 0.1]), rule="block")
    assert speculative_law(s, 1)[0,] == pytest.approx(0.5, abs=EXACT)
    monkeypatch.setattr(chain, "chance", lambda p, q, r: r)
    assert speculative_law(s, 1, ProductOfUniforms())[0,] == pytest.approx(0.687, abs=0.01)


class StopsAtTheFirstRefusal(Branches):
    """Block verification judges every prefix; one that is refused does not end the loop."""

    def accept(self, seed, position, i, q, p, decide):
        self.going = (i == 0 or self.going) and super().accept(seed, position, i, q, p, decide)
        return self.going


def test_block_that_stops_at_the_first_refusal():
    assert distance(setting(rule="block"), 3, StopsAtTheFirstRefusal()) > WRONG


def test_block_judges_every_prefix(monkeypatch):
    """u = (.9, 0), h = (.5, .4): both drafts are accepted."""
    monkeypatch.setattr(chain, "chance", lambda p, q, r: 0.5)
    monkeypatch.setattr(chain, "accept", lambda seed, position, i, q, p, decide: [0.9, 0.0][i] * q < p)
    p, q = torch.tensor([0.4, 0.6]).log().expand(3, 2), torch.tensor([1.0, 0.0]).log().expand(2, 2)
    request = chain.Request(
        target=p, drafts=[0, 0], draft_rows=q, draft_is_logits=True, draft_ids=None, point_mass=[False] * 2,
        temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0, rule="block",
    )  # fmt: skip
    assert chain.block(request, draws.Exact())[0] == 2


@pytest.mark.parametrize("rule", RULES)
def test_residual_that_subtracts_q_at_the_draft_alone(rule, monkeypatch):
    """As if a draft that was drawn from a whole distribution were a point mass."""
    judged, distribution = [], chain.Request.draft_distribution

    def remember(self, i, *options, **more):
        judged.append(self.drafts[i])
        return distribution(self, i, *options, **more)

    def residual(p, q, r=1.0):
        x, left = judged[-1], r * p
        left[x] = max(float(left[x] - q[x]), 0.0)
        return left

    monkeypatch.setattr(chain.Request, "draft_distribution", remember)
    monkeypatch.setattr(chain, "residual", residual)
    s = Setting(target=FixedModel([0.5, 0.2, 0.3]), draft=FixedModel([0.2, 0.5, 0.3]), drafts=1, rule=rule)
    assert distance(s, 2) > 0.03


class TwoChances(Branches):
    """Accepted if u*q < p or if a token drawn from p equals the draft."""

    def accept(self, seed, position, i, q, p, decide):
        chance = 1 - (1 - min(1.0, p / q)) * (1 - p)
        return super().accept(seed, position, i, 1.0, chance, decide)


def test_two_chances_for_a_draft():
    s = Setting(target=FixedModel([0.5, 0.3, 0.2]), draft=FixedModel([1.0, 0.0, 0.0]), form="point", drafts=1)
    assert distance(s, 2) < EXACT
    law = speculative_law(s, 1, TwoChances())
    assert [law[x,] for x in range(3)] == pytest.approx([0.75, 0.15, 0.1])


def test_chosen_drafts_judged_as_if_drawn():
    """The likeliest draft, from a beam or a list, has to be judged as a point mass, not with the q it was found by."""
    s = Setting(target=FixedModel([0.5, 0.5]), draft=FixedModel([0.6, 0.4]), drafts=1, proposal="argmax")
    law = speculative_law(s, 1)
    assert [law[x,] for x in range(2)] == pytest.approx([5 / 6, 1 / 6])
    s.form = "point"
    assert distance(s, 2) < EXACT


def test_drafts_drawn_from_another_distribution_than_reported():
    raw = FixedModel([0.4, 0.3, 0.2, 0.1])
    s = Setting(target=FixedModel([0.25] * 4), draft=FixedModel([1.0, 0.0, 0.0, 0.0]), drafts=1)
    assert distance(s, 2) < EXACT
    s.reported = raw  # drawn from its likeliest id alone
    assert distance(s, 1) > 0.1
    s = setting()
    s.reported = Model(3, 2, spread=3.0)
    assert distance(s, 2) > 0.02


@pytest.mark.parametrize("rule", RULES)
def test_placeholder_that_subtracts_its_row(rule, monkeypatch):
    """Where nothing was proposed the token comes from p; a row of q that lies there anyway is not for it."""
    right = chain.verify_request

    def wrong(request, decide):
        if -1 not in request.drafts:
            return right(request, decide)
        first = request.drafts.index(-1)
        request.draft_rows = request.draft_rows.nan_to_num(0.0)
        request.drafts = [*request.drafts[:first], *[0] * (len(request.drafts) - first)]
        return right(request, decide)

    monkeypatch.setattr(chain, "verify_request", wrong)
    assert distance(setting(rule=rule, form="holes"), 3) > WRONG


# ---- how often drafts are accepted -----------------------------------------------------------------------------------


def test_acceptance_is_one_minus_total_variation():
    """A drawn draft is accepted with sum min(p, q); judged as a point mass with sum p q: lossless too, but less."""
    for form, expected in (("draft_logits", torch.minimum), ("point", torch.mul)):
        s = setting(4, drafts=1, form=form)
        p, q = s.target.distribution((), {}), s.draft.distribution((), {})
        outcomes = Branches().outcomes(lambda b, s=s: chain_round(s, (), b))
        mean = sum(n * probability for (_, n), probability, _ in outcomes)
        assert mean == pytest.approx(float(expected(p, q).sum()), abs=1e-12)


def test_wider_reports_lower_the_acceptance_not_the_law():
    """p = (.6, .2, .1, .1), q = (.7, .2, .05, .05): the likeliest draft is accepted with .6, a drawn one with .9."""
    p, q = FixedModel([0.6, 0.2, 0.1, 0.1]), FixedModel([0.7, 0.2, 0.05, 0.05])
    for form, proposal, expected in (("point", "argmax", 0.6), ("draft_logits", "drawn", 0.9)):
        s = Setting(target=p, draft=q, drafts=1, form=form, proposal=proposal)
        outcomes = Branches().outcomes(lambda b, s=s: chain_round(s, (), b))
        assert sum(n * m for (_, n), m, _ in outcomes) == pytest.approx(expected) and distance(s, 2) < EXACT


def test_probabilities_of_the_outcomes_sum_to_one():
    for rule, form in itertools.product(RULES, FORMS):
        s = setting(rule=rule, form=form)
        assert sum(m for _, m, _ in Branches().outcomes(lambda b, s=s: chain_round(s, (), b))) == pytest.approx(1.0)
