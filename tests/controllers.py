"""Costs to plan with, and rounds played with a given acceptance."""

import random

from scripted import request_for
from specloop.controller import Auto
from specloop.decode import decode

CHEAP = [1.0, 1.06, 1.12, 1.18, 1.25, 1.4, 1.5, 1.6, 1.7]  # reads every weight once per pass
BLAS = [1.0, 1.9, 1.9, 1.9, 1.9, 1.95, 1.95, 2.0, 2.0]  # the second row costs as much as the first
LINEAR = [float(n) for n in range(1, 10)]


def play(model, prompt, tokens, draft, controller):
    """The request, decoded to its end."""
    request = request_for(model, list(prompt), tokens, draft, controller)
    list(decode(model, [request]))
    return request


def feed(auto, rate, rounds, strength=0, limit=8, seed=0):
    """Plays rounds with that acceptance per token; returns (the Ks, cost of it all, tokens)."""
    rng, ks, cost, tokens = random.Random(seed), [], 0.0, 0
    for _ in range(rounds):
        k = auto.choose((strength, limit))
        accepted = next((j for j in range(k) if rng.random() >= rate), k)
        auto.observe((strength, limit), k, accepted)
        ks.append(k)
        cost += auto.costs[k]
        tokens += accepted + 1
    return ks, cost, tokens


def crew(rates, costs, **options):
    """Controllers that know these acceptances per token."""
    autos = [Auto(costs, **options) for _ in rates]
    for auto, rate in zip(autos, rates, strict=True):
        for counter in auto.counters:
            counter.hits, counter.trials = rate * 1e7, 1e7
    return autos
