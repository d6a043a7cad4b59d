"""The exact law of whole texts that the decode loop makes, with a model for a draft: every decision of every round is
followed (laws.py), through the loop, the draft and the reference backend.

Target and draft are scripted models of a few ids; numbers that come back in a later round are what they were.
"""

import itertools
import math

import torch

import specdec_kernels as sk
from laws import Branches
from scripted import Scripted, request_for
from specdec_kernels.reference import filters
from specloop.decode import decode
from specloop.drafts.model import ModelDraft
from specloop.request import Sampling
from specloop.versions import Place, Version

PROMPT = [0, 1, 0]
EXACT, WRONG = 1e-9, 1e-3  # how far a law may be off, and how far it is at least where something is wrong
ONE = {"temperature": 1.0}
FILTERS = {
    "T=1": ONE,
    "T=0.7": {"temperature": 0.7},
    "top-k": {"temperature": 1.0, "top_k": 2},
    "top-p": {"temperature": 0.7, "top_p": 0.8},
    "min-p": {"temperature": 1.3, "min_p": 0.4},
}


def rows(number, vocab_size):
    """Logits as a function of the prefix, for model ``number``."""
    return lambda prefix: [
        math.sin(5 * t + 3 * prefix[-1] + len(prefix) + 1.7 * number * (t + 1)) * 1.5 for t in range(vocab_size)
    ]


class Cut(Scripted):
    """Reads all ids and says the ones in ``ids``."""

    def __init__(self, logits, vocab_size, ids, **options):
        super().__init__(logits, vocab_size, **options)
        self.columns = self.draft_ids = ids

    def forward(self, tokens, cache, *, last):
        return super().forward(tokens, cache, last=last)[:, self.columns]


def seat_of(model, capacity=1000):
    place = Place()
    place.version = Version(model, None, None)
    return place.seat(capacity)


def model_draft(model, vocab_size, sampling=None, **options):
    ids = getattr(model, "draft_ids", None)
    ids = None if ids is None else torch.tensor(ids, dtype=torch.int32)
    return ModelDraft(seat_of(model), vocab_size, sampling=Sampling(**(sampling or {})), ids=ids, **options)


def distribution(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, **_):
    temperature, top_p, min_p = torch.tensor([temperature, top_p, min_p], dtype=torch.float32).tolist()
    w = filters.weights(torch.tensor(logits, dtype=torch.float32).double(), temperature, top_k, top_p, min_p)
    return (w / w.sum()).tolist()


def wanted(target, length, sampling, prompt=PROMPT, change=lambda row, answer: row):
    """The law of the texts by the chain rule; a text ends with an EOS id. ``change``: of each row of logits, by what
    was said before.
    """
    law, running = {}, {(): 1.0}
    for n in range(length):
        longer = {}
        for text, mass in running.items():
            row = change(target.logits([*prompt, *text]), text)
            for token, p in enumerate(distribution(row, **sampling)):
                if p:
                    ended = token in target.eos_ids or n + 1 == length
                    (law if ended else longer)[(*text, token)] = mass * p
        running = longer
    return law


def loop_law(target, draft, k, length, sampling, *, prompt=PROMPT, branches=None, processor=lambda: None, **options):
    """The law of the texts that the loop makes; ``draft()`` and ``processor()`` make those of each."""

    def run(_):
        options["processor"] = processor()
        request = request_for(target, prompt, length, draft(), k=k, sampling=sampling, **options)
        for _ in decode(target, [request]):
            pass
        assert request.draft.faults == []
        return tuple(request.ids[len(prompt) :])

    law = {}
    with sk.use_backend("reference"):
        for text, probability, _ in (branches or Branches()).outcomes(run):
            law[text] = law.get(text, 0.0) + probability
    return law


def distance(a, b):
    """Total variation."""
    assert math.isclose(sum(a.values()), 1, abs_tol=1e-9), sum(a.values())
    return 0.5 * sum(abs(a.get(x, 0.0) - b.get(x, 0.0)) for x in itertools.chain(a, b.keys() - a.keys()))
