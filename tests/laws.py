"""Exact laws: every decision of the reference is enumerated, with its probability, over as many rounds as wanted.

``Branches`` takes the place of the reference's two random decisions, the coin and the draw. It knows a random number by
its key and remembers what a decision has revealed about it: an interval of [0, 1). A number that comes back is decided
within what is left of its interval, so that the law is exact also where numbers are reused, a fault that the tests put
in. (A vocabulary of at most 64 ids is one group: the pick decides, the race of groups does not.)
"""

import contextlib
import importlib
import itertools
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import torch

from specdec_kernels.reference import draws, filters
from specdec_kernels.reference.philox import COIN, DRAFT

# The modules: the package's attributes of these names are the functions.
chain = importlib.import_module("specdec_kernels.reference.verify")
tree = importlib.import_module("specdec_kernels.reference.verify_tree")
sampling = importlib.import_module("specdec_kernels.reference.sample")

NEGLIGIBLE = 1e-13  # a decision of smaller probability is a rounding error of another one
ROOT = -1


class Branches:
    """Runs a function once per way its decisions can go. A decision takes the next scripted option, else the first."""

    def __init__(self, key=lambda position, stream, index: (position, stream, index)):
        """``key``: by what a number is known; the default is the contract's."""
        self.key = key

    def decide(self, key, edges):
        """The number of the piece of [0, 1), cut at ``edges`` (0 first, 1 last), into which the number falls."""
        low, high = self.known.get(key, (0.0, 1.0))
        pieces = [(max(a, low), min(b, high)) for a, b in itertools.pairwise(edges)]
        options = [i for i, (a, b) in enumerate(pieces) if (b - a) / (high - low) > NEGLIGIBLE]
        choice = self.script[len(self.taken)] if len(self.taken) < len(self.script) else 0
        self.taken.append((choice, len(options)))
        a, b = self.known[key] = pieces[options[choice]]
        self.probability *= (b - a) / (high - low)
        return options[choice]

    def accept(self, seed, position, i, q, p, decide):
        return self.decide(self.key(position, COIN, i), [0.0, min(1.0, p / q), 1.0]) == 0

    def draw(self, weights, seed, position, stream, index, decide=None):
        running = (weights.cumsum(0) / weights.sum()).tolist()
        return self.decide(self.key(position, stream, index), [0.0, *running[:-1], 1.0])

    def outcomes(self, run, known=()):
        """Yields (what ``run(self)`` returned, its probability, what is known of the numbers then)."""
        self.script = []
        with contextlib.ExitStack() as stack:
            for module, name in itertools.product((chain, tree), ("accept", "draw")):
                stack.enter_context(mock.patch.object(module, name, getattr(self, name)))
            stack.enter_context(mock.patch.object(sampling, "draw", self.draw))
            stack.enter_context(mock.patch.object(filters, "weights", _remembered(filters.weights)))
            while True:
                self.taken, self.probability, self.known = [], 1.0, dict(known)
                yield run(self), self.probability, frozenset(self.known.items())
                while self.taken and self.taken[-1][0] + 1 == self.taken[-1][1]:
                    self.taken.pop()
                if not self.taken:
                    return
                self.script = [choice for choice, _ in self.taken]
                self.script[-1] += 1


def _remembered(weights):
    """The same few rows come again and again."""
    known = {}

    def remembering(row, *parameters, **named):
        key = *row.tolist(), *parameters, *named.items()
        if key not in known:
            known[key] = weights(row, *parameters, **named)
        return known[key]

    return remembering


class Model:
    """Rows of logits for every context of a tiny vocabulary: normally distributed."""

    def __init__(self, vocabulary, number, spread=1.5):
        self.vocabulary, self.spread = vocabulary, spread
        self.generator, self.rows, self.distributions = torch.Generator().manual_seed(number), {}, {}

    def new_row(self):
        return torch.randn(self.vocabulary, generator=self.generator) * self.spread

    def row(self, context):
        if context not in self.rows:
            self.rows[context] = self.new_row()
        return self.rows[context]

    def distribution(self, context, parameters, ids=slice(None)):
        """After temperature and filters; float64."""
        key = context, *parameters.items(), str(ids)
        if key not in self.distributions:
            options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **parameters}
            w = filters.weights(self.row(context)[ids].double(), **options)
            self.distributions[key] = w / w.sum()
        return self.distributions[key]


class DirichletModel(Model):
    """Rows whose probabilities are Dirichlet-distributed: often far from uniform, target and draft often far apart."""

    def __init__(self, vocabulary, number, concentration=0.7):
        super().__init__(vocabulary, number)
        self.numpy, self.concentration = np.random.default_rng(number), [concentration] * vocabulary

    def new_row(self):
        return torch.tensor(self.numpy.dirichlet(self.concentration)).log()


class FixedModel(Model):
    """The same probabilities in every context, or those of the context's last token."""

    def __init__(self, *rows, start=0):
        super().__init__(len(rows[0]), 0)
        self.table, self.start = torch.tensor(rows, dtype=torch.float64).log(), start

    def row(self, context):
        return self.table[(context[-1] if context else self.start) % len(self.table)]


@dataclass(kw_only=True)
class Setting:
    """How a round drafts and judges."""

    target: Model
    draft: Model
    rule: str = "token"
    drafts: int = 2
    form: str = "draft_logits"  # draft_probs, point, cut, mixed, holes; for trees: drawn, deterministic
    parents: tuple = ()  # of a tree
    parameters: dict = field(default_factory=dict)
    reported: Model | None = None  # what the verifier is told that the drafts were drawn from; None = the truth
    proposal: str = "drawn"  # or "argmax"

    @property
    def judging(self):
        one = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "rule": self.rule}
        return {**one, **self.parameters}


CUT = torch.tensor([0, 2])  # target ids of a cut draft vocabulary


def chain_round(s, context, branches):
    """Drafts, judges, and returns (emitted tokens, number of accepted drafts)."""
    drafts, rows, points, reported = [], [], [], s.reported or s.draft
    for i in range(s.drafts):
        here = context + tuple(drafts)
        if s.form == "holes" and (sum(here) + len(here)) % 3 == 1:
            drafts += [-1, *[0] * (s.drafts - i - 1)]
            break
        ids = CUT if s.form == "cut" else slice(None)
        q = s.draft.distribution(here, s.parameters, ids)
        points.append(s.form == "point" or (s.form == "mixed" and len(here) % 2 == 0))
        certain = s.proposal == "argmax" or (s.form == "mixed" and points[-1])
        x = int(q.argmax()) if certain else branches.draw(q, 0, len(context), DRAFT, i)
        drafts.append(int(CUT[x]) if s.form == "cut" else x)
        rows.append(reported.distribution(here, s.parameters) if s.form == "draft_probs" else reported.row(here)[ids])
    known = [context + tuple(drafts[:i]) for i in range(s.drafts + 1)]
    missing = s.drafts - len(rows)
    rows += [torch.full_like(s.draft.row(()), torch.nan)] * missing
    request = chain.Request(
        target=torch.stack([s.target.row(c) for c in known]), drafts=drafts,
        draft_rows=None if s.form == "point" else torch.stack(rows),
        draft_is_logits=s.form != "draft_probs", draft_ids=CUT if s.form == "cut" else None,
        point_mass=points + [False] * missing, position=len(context), **s.judging,
    )  # fmt: skip
    tokens, accepted, flags = chain.verify_request(request, draws.Exact())
    assert flags == 0
    return tuple(tokens), accepted


def tree_round(s, context, branches):
    """The same with a tree of shape ``parents``: siblings drawn without replacement, or the most likely ones."""
    tokens, contexts, taken = [], {ROOT: context}, {}
    for j, parent in enumerate(s.parents):
        left = None
        if parent in contexts:
            left = s.draft.distribution(contexts[parent], s.parameters).clone()
            left[taken.setdefault(parent, [])] = 0.0
        if left is None or not left.any():
            tokens.append(-1)  # nothing left to propose, or below such a node
            continue
        x = int(left.argmax()) if s.form == "deterministic" else branches.draw(left, 0, len(context), DRAFT, j)
        tokens.append(x)
        taken[parent].append(x)
        contexts[j] = (*contexts[parent], x)
    nothing = torch.full((s.target.vocabulary,), torch.nan)
    rows = [
        s.draft.distribution(contexts[p], s.parameters) if j in contexts else nothing for j, p in enumerate(s.parents)
    ]
    request = tree.TreeRequest(
        target=torch.stack([s.target.row(contexts[j]) if j in contexts else nothing for j in range(-1, len(tokens))]),
        tokens=tokens, parents=list(s.parents), position=len(context), **s.judging,
        draft_rows=None if s.form == "deterministic" else torch.stack(rows),
    )  # fmt: skip
    path, emitted, flags = tree.verify_request(request, draws.Exact())
    assert flags == 0
    return tuple(emitted), len(path)


def speculative_law(s, length, branches=None, *, rounds_share_numbers=False):
    """The law of the first ``length`` tokens, over as many rounds as they take.

    ``rounds_share_numbers``: what a round reveals about its numbers is remembered in the next one. With the right keys
    it makes no difference; without it, fewer states have to be told apart.
    """
    branches, play = branches or Branches(), tree_round if s.parents else chain_round
    levels = [{} for _ in range(length + 1)]  # by number of tokens: (tokens, known numbers) -> probability
    levels[0][(), frozenset()] = 1.0
    for n in range(length):
        for (context, known), mass in levels[n].items():
            run = lambda b, context=context: play(s, context, b)
            for (tokens, _), probability, after in branches.outcomes(run, known):
                state = (context + tokens)[:length], after if rounds_share_numbers else frozenset()
                level = levels[len(state[0])]
                level[state] = level.get(state, 0.0) + mass * probability
    law = {}
    for (context, _), mass in levels[length].items():
        law[context] = law.get(context, 0.0) + mass
    return law


def target_law(s, length):
    law = {(): 1.0}
    for _ in range(length):
        law = {
            (*x, v): mass * p
            for x, mass in law.items()
            for v, p in enumerate(s.target.distribution(x, s.parameters).tolist())
        }
    return law


def distance(s, length, branches=None, **options):
    """Total variation between what is emitted and the target."""
    a, b = speculative_law(s, length, branches, **options), target_law(s, length)
    return 0.5 * sum(abs(a.get(x, 0.0) - b.get(x, 0.0)) for x in a.keys() | b.keys())


class CoinsOnly(Branches):
    """What the last token is makes no difference to how many drafts are accepted: not enumerated."""

    def draw(self, weights, seed, position, stream, index, decide=None):
        if stream == DRAFT:
            return super().draw(weights, seed, position, stream, index, decide)
        return int(weights.nonzero()[0])


def mean_accepted(s):
    """Of one round at the start."""
    play = tree_round if s.parents else chain_round
    return sum(n * probability for (_, n), probability, _ in CoinsOnly().outcomes(lambda b: play(s, (), b)))


FILTERS = [
    {},
    {"temperature": 0.7, "top_k": 2},
    {"temperature": 1.3, "top_p": 0.7},
    {"min_p": 0.3},
    {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.05},
]
