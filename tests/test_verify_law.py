"""The law of what is emitted: exact, by enumerating every decision of the reference, and over sequences of rounds.

One call can be right while a chain of calls is not: a number that was used in one round and comes back in another ties
rounds together. So sequences are tested, too, both exactly (all decisions of all rounds) and with the real generator.
"""

import itertools
import sys

import pytest
import scipy.stats
import torch

import specdec_kernels as sk
import specdec_kernels.reference.verify
from specdec_kernels.reference import draws, filters
from verify_cases import BACKENDS, bounds, running

reference = sys.modules["specdec_kernels.reference.verify"]


# ---- exact: every decision of the reference, with its probability ---------------------------------------------------


class Branches:
    """Runs a function once per way its decisions can go. A decision takes the next scripted option, else the first."""

    def __init__(self):
        self.script, self.taken, self.probability = [], [], 1.0

    def decide(self, options):
        """``options``: probabilities; returns the number of the chosen one."""
        likely = [i for i, p in enumerate(options) if p > 0]
        choice = self.script[len(self.taken)] if len(self.taken) < len(self.script) else 0
        self.taken.append((choice, len(likely)))
        self.probability *= options[likely[choice]]
        return likely[choice]

    def accept(self, seed, position, i, q, p, decide):
        chance = min(1.0, p / q)  # the share of the u in [0, 1) with u*q < p
        return self.decide([chance, 1.0 - chance]) == 0

    def draw(self, weights, seed, position, stream, index, decide):
        return self.decide((weights / weights.sum()).tolist())

    def outcomes(self, run):
        while True:
            self.taken, self.probability = [], 1.0
            yield run(), self.probability
            while self.taken and self.taken[-1][0] + 1 == self.taken[-1][1]:
                self.taken.pop()
            if not self.taken:
                return
            self.script = [choice for choice, _ in self.taken]
            self.script[-1] += 1


@pytest.fixture
def branches(monkeypatch):
    def start():
        tree = Branches()
        monkeypatch.setattr(reference, "accept", tree.accept)
        monkeypatch.setattr(reference, "draw", tree.draw)
        return tree

    return start


class Model:
    """Rows of logits for every context of a tiny vocabulary."""

    def __init__(self, vocabulary, number, spread=1.5):
        self.vocabulary, self.generator, self.spread = vocabulary, torch.Generator().manual_seed(number), spread
        self.rows = {}

    def row(self, context):
        if context not in self.rows:
            self.rows[context] = torch.randn(self.vocabulary, generator=self.generator) * self.spread
        return self.rows[context]


def request(target, draft, context, drafts, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, form="draft_logits"):
    """One round's request at a context: drafts may hold -1."""
    known = [context + tuple(drafts[:i]) for i in range(len(drafts) + 1)]
    q = None
    if form != "point" and drafts:
        q = torch.stack([draft.row(c) for c in known[:-1]])
        if form == "draft_probs":
            q = torch.stack([distribution(row, temperature, top_k, top_p, min_p) for row in q])
    return reference.Request(
        target=torch.stack([target.row(c) for c in known]), drafts=list(drafts), draft_rows=q,
        draft_is_logits=form == "draft_logits", draft_ids=None, point_mass=[form == "point"] * len(drafts),
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=0, position=0,
    )  # fmt: skip


def distribution(row, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    w = filters.weights(row.double(), temperature, top_k, top_p, min_p)
    return w / w.sum()


def drafted(draft, context, k, parameters):
    """All drafts of k tokens with their probabilities under the draft model."""
    options = [((), 1.0)]
    for _ in range(k):
        options = [
            ((*x, v), mass * q)
            for x, mass in options
            for v, q in enumerate(distribution(draft.row(context + x), **parameters).tolist())
            if q > 0
        ]
    return options


def sequence_law(target, length, parameters):
    law = {(): 1.0}
    for _ in range(length):
        law = {
            (*x, v): mass * p
            for x, mass in law.items()
            for v, p in enumerate(distribution(target.row(x), **parameters).tolist())
            if p > 0
        }
    return law


def speculative_law(target, draft, length, k, parameters, form, branches, judged_as=None):
    """Law of the first ``length`` tokens over as many rounds as that takes: exact, all rounds independent."""
    done, open_ = {}, {(): 1.0}
    while open_:
        context, mass = open_.popitem()
        for x, chance in drafted(draft, context, k, parameters):
            r = request(target, judged_as or draft, context, x, form=form, **parameters)
            tree = branches()
            for (tokens, _, flags), probability in tree.outcomes(
                lambda r=r: reference.verify_request(r, draws.Exact())
            ):
                assert flags == 0
                sequence = (context + tuple(tokens))[:length]
                where = done if len(sequence) == length else open_
                where[sequence] = where.get(sequence, 0.0) + mass * chance * probability
    return done


def distance(a, b):
    return 0.5 * sum(abs(a.get(x, 0.0) - b.get(x, 0.0)) for x in a.keys() | b.keys())


FILTERS = [
    {},
    {"temperature": 0.7, "top_k": 2},
    {"temperature": 1.3, "top_p": 0.7},
    {"min_p": 0.3},
    {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("parameters", FILTERS, ids=str)
@pytest.mark.parametrize("form", ["draft_logits", "draft_probs", "point"])
def test_law_over_several_rounds_is_exact(parameters, form, branches):
    target, draft = Model(3, 1), Model(3, 2)
    for k in (2,) if parameters else (1, 2, 3):
        got = speculative_law(target, draft, 3, k, parameters, form, branches)
        assert distance(got, sequence_law(target, 3, parameters)) < 1e-9


def test_acceptance_is_one_minus_total_variation(branches):
    target, draft = Model(4, 5), Model(4, 6)
    p, q = distribution(target.row(())), distribution(draft.row(()))
    accepted = {"draft_logits": 0.0, "point": 0.0}
    for form, x in itertools.product(accepted, range(4)):
        r = request(target, draft, (), (x,), form=form)
        for (_, n, _), probability in branches().outcomes(lambda r=r: reference.verify_request(r, draws.Exact())):
            accepted[form] += n * probability * float(q[x])
    assert accepted["draft_logits"] == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-12)
    assert accepted["point"] == pytest.approx(float((p * q).sum()), abs=1e-12)  # lossless too, but accepts less


def test_the_wrong_draft_distribution_is_caught(branches):
    """Drafts sampled from another distribution than the one reported: biased, so this very test would notice."""
    target, draft, sharper = Model(3, 1), Model(3, 2), Model(3, 2, spread=3.0)
    got = speculative_law(target, draft, 2, 1, {}, "draft_logits", branches, judged_as=sharper)
    assert distance(got, sequence_law(target, 2, {})) > 0.02


def test_no_proposal_draws_from_p_not_from_the_residual(branches):
    target, draft = Model(3, 7), Model(3, 8)
    r = request(target, draft, (), (0, -1))
    r.drafts = [-1, 1]
    law = {}
    for (tokens, n, _), probability in branches().outcomes(lambda: reference.verify_request(r, draws.Exact())):
        assert n == 0
        law[tuple(tokens)] = law.get(tuple(tokens), 0.0) + probability
    assert distance(law, sequence_law(target, 1, {})) < 1e-12


# ---- a draw, with u integrated instead of drawn ---------------------------------------------------------------------


def test_pick_inside_a_group_has_the_weights_as_its_law(monkeypatch):
    weights, steps = torch.tensor([0.0, 0.3, 0.0, 0.5, 0.2, 0.0], dtype=torch.float64), 4_000
    count = torch.zeros(6)
    for step in range(steps):
        u = (step + 0.5) / steps
        numbers = lambda *key, u=u: torch.tensor([0.5], dtype=torch.float64) if torch.is_tensor(key[-1]) else u
        monkeypatch.setattr(draws, "uniform", numbers)
        count[draws.draw(weights, 0, 0, 2, 0, draws.Exact())] += 1
    assert (count / steps - weights).abs().max() < 2 / steps


def test_race_of_groups_has_the_masses_as_its_law(monkeypatch):
    """Two groups of masses a and b: the first wins iff E1/a < E2/b, which has probability a/(a + b)."""
    weights, steps = torch.zeros(128, dtype=torch.float64), 120
    weights[5], weights[70] = 0.3, 0.9
    wins = 0.0
    grid = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    for u1, u2 in itertools.product(grid.tolist(), repeat=2):
        numbers = lambda *key, u=(u1, u2): torch.tensor(u, dtype=torch.float64) if torch.is_tensor(key[-1]) else 0.5
        monkeypatch.setattr(draws, "uniform", numbers)
        wins += draws.draw(weights, 0, 0, 2, 0, draws.Exact()) == 5
    assert wins / steps**2 == pytest.approx(0.25, abs=2 / steps)


# ---- over several rounds, with the real generator -------------------------------------------------------------------

# Draft and target lie far apart, so that refusals are frequent and a number used twice shows.
CONTEXTS, LENGTH, DRAFTS, REQUESTS = 3, 4, 2, 30_000
TARGET = torch.tensor([[0.2, 0.4, 0.4], [0.5, 0.2, 0.3], [0.35, 0.35, 0.3]])
DRAFT = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]])


def sequences(requests, *, form="draft_logits", draft_stream=0, draft_position=None, verify_position=None, start=0):
    """Runs rounds until every request has LENGTH tokens; a row depends on the token before. Returns a number for each.

    ``draft_position(length, i)`` and ``verify_position(length)`` replace the round's position, to do it wrong.
    """
    p, q, seed, rows = TARGET.log(), DRAFT.log(), torch.arange(requests) + start, torch.arange(requests)
    tokens = torch.zeros((requests, LENGTH + DRAFTS + 1), dtype=torch.int64)  # column 0: the token before the first
    length = torch.zeros(requests, dtype=torch.int64)
    while (live := length < LENGTH).any():
        context = [tokens[rows, length]]
        for i in range(DRAFTS):
            position = length if draft_position is None else draft_position(length, i)
            context.append(sk.sample(q[context[-1]], seed=seed, position=position, stream=draft_stream, index=i))
        options = {}
        if form != "point":
            options[form] = q[torch.stack(context[:-1], 1).flatten()]
            options[form] = options[form].exp() if form == "draft_probs" else options[form]
        verdict = sk.verify(
            p[torch.stack(context, 1).flatten()],
            torch.stack(context[1:], 1).flatten(),
            bounds([DRAFTS] * requests),
            seed=seed,
            position=length if verify_position is None else verify_position(length),
            **options,
        )
        for i in range(DRAFTS + 1):
            new = live & (verdict.tokens[:, i] >= 0)
            tokens[rows[new], length[new] + 1 + i] = verdict.tokens[new, i]
        length += live * (verdict.num_accepted + 1)
    powers = CONTEXTS ** torch.arange(LENGTH - 1, -1, -1)
    return (tokens[:, 1 : LENGTH + 1] * powers).sum(1)


def p_value(numbers):
    expected = torch.zeros(CONTEXTS**LENGTH, dtype=torch.float64)
    for x in itertools.product(range(CONTEXTS), repeat=LENGTH):
        mass, previous, number = 1.0, 0, 0
        for v in x:
            mass, previous, number = mass * float(TARGET[previous, v]), v, number * CONTEXTS + v
        expected[number] = mass
    count = torch.bincount(numbers, minlength=len(expected)).double()
    return scipy.stats.chisquare(count, expected / expected.sum() * len(numbers)).pvalue


FAULTS = {
    "draft noise from the stream of the last token": {"draft_stream": 2},
    "the same draft noise in every round": {"draft_position": lambda length, i: torch.full_like(length, i)},
    "the same coins in every round": {"verify_position": torch.zeros_like},
}


@pytest.mark.parametrize("form", ["draft_logits", "draft_probs", "point"])
def test_sequences_have_the_target_law(form):
    with running(BACKENDS[-1]):
        assert p_value(sequences(REQUESTS, form=form)) > 1e-5


@pytest.mark.parametrize("fault", FAULTS)
def test_the_sequence_test_notices_reused_numbers(fault):
    with running(BACKENDS[-1]):
        assert p_value(sequences(REQUESTS, **FAULTS[fault])) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("form", ["draft_logits", "draft_probs", "point"])
def test_sequences_have_the_target_law_a_million(form):
    with running(BACKENDS[-1]):
        numbers = torch.cat([sequences(100_000, form=form, start=10**6 + 100_000 * i) for i in range(10)])
    assert p_value(numbers) > 1e-5


def test_draws_over_many_groups_have_the_right_law():
    """700 ids are eleven groups: race and pick together."""
    n, weights = 60_000, torch.rand(700, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.05
    p = weights / weights.sum()
    with running(BACKENDS[-1]):
        x = sk.sample(p.log().float().expand(n, 700), seed=torch.arange(n), position=torch.zeros(n).long())
    assert scipy.stats.chisquare(torch.bincount(x, minlength=700).double(), p * n).pvalue > 1e-5
