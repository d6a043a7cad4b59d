"""Sequences of several rounds with the real generator, many at once, and how probable such counts are.

Every request has its own seed, drafts with ``sample`` from stream 0 at the round's position, and goes on until it has
``length`` tokens. A row depends on the token before.
"""

from dataclasses import dataclass

import scipy.stats
import torch

import specdec_kernels as sk
from verify_cases import bounds

# Ways to judge and draft. A tree's siblings are drawn without replacement, or the likeliest.
CHAINS = [(rule, form) for rule in ("token", "block") for form in ("draft_logits", "draft_probs", "point")]
TREES = [(rule, form) for rule in ("token", "traversal") for form in ("drawn", "deterministic")]


@dataclass
class World:
    target: torch.Tensor  # [V, V] probabilities of the next token, by the token before
    draft: torch.Tensor
    drafts: int = 2  # of a chain
    parents: tuple = (-1, -1, 0, 1)  # of a tree

    def law(self, length):
        """[V^length], float64; a sequence is a number in base V. The token before the first is 0."""
        laws = torch.eye(len(self.target), dtype=torch.float64)[0]
        for _ in range(length):
            laws = (laws[:, None] * self.target.double().repeat(len(laws) // len(self.target), 1)).flatten()
        return laws[: len(self.target) ** length] / laws.sum()


# Draft and target lie far apart, so that refusals are frequent and a number that is used twice shows.
FAR = World(
    torch.tensor([[0.2, 0.4, 0.4], [0.5, 0.2, 0.3], [0.35, 0.35, 0.3]]),
    torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]]),
)
# Where the target likes to stay the draft likes to change, and the other way round.
CROSSED = World(torch.tensor([[0.75, 0.25], [0.35, 0.65]]), torch.tensor([[0.3, 0.7], [0.7, 0.3]]))
# The draft repeats the last token: a world in which coins that come back show most under block verification.
REPEATING = World(torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.eye(2), drafts=3)


def sequences(n, length, rule, form, *, world=FAR, start=0, draft_stream=0, draft_key=None, verify_position=None):
    """Runs rounds until each of ``n`` requests has ``length`` tokens; returns a number per request, see World.law.

    ``draft_key(position, i)`` -> (position, index), and ``verify_position(position)``, replace the right keys.
    """
    widest = max(world.drafts, len(world.parents)) + 1
    tokens = torch.zeros((n, 1 + length + widest), dtype=torch.int64)  # column 0: the token before the first
    have, seeds, live = torch.zeros(n, dtype=torch.int64), torch.arange(n) + start, torch.arange(n)
    play = _chain if (rule, form) in CHAINS else _tree
    while len(live):
        position = have[live]

        def sample(rows, i, position=position, live=live):
            where, index = draft_key(position, i) if draft_key else (position, i)
            return sk.sample(rows, seed=seeds[live], position=where, stream=draft_stream, index=index)

        keys = {"seed": seeds[live], "position": verify_position(position) if verify_position else position}
        verdict = play(world, tokens[live, position], sample, rule, form, keys)
        assert not verdict.flags.any()
        for i in range(verdict.tokens.shape[1]):
            new = verdict.tokens[:, i] >= 0
            tokens[live[new], position[new] + 1 + i] = verdict.tokens[new, i]
        have[live] += verdict.num_accepted + 1
        live = live[have[live] < length]
    return (tokens[:, 1 : length + 1] * len(world.target) ** torch.arange(length - 1, -1, -1)).sum(1)


def _chain(world, last, sample, rule, form, keys):
    """One round of requests whose token before is ``last`` [n]; the verdict."""
    at = [last]
    for i in range(world.drafts):
        at.append(sample(world.draft.log()[at[-1]], i))
    options, q = dict(keys), world.draft[torch.stack(at[:-1], 1).flatten()]
    if form != "point":
        options[form] = q.log() if form == "draft_logits" else q
    rows = world.target.log()[torch.stack(at, 1).flatten()]
    return sk.verify(rows, torch.stack(at[1:], 1).flatten(), bounds([world.drafts] * len(last)), rule=rule, **options)


def _tree(world, last, sample, rule, form, keys):
    at, parents = {-1: last}, world.parents
    for j, parent in enumerate(parents):
        left = world.draft.log()[at[parent]]
        for sibling in range(j):
            if parents[sibling] == parent:
                left.scatter_(1, at[sibling][:, None], -torch.inf)
        at[j] = left.argmax(1) if form == "deterministic" else sample(left, j)
    nodes = torch.stack([at[j] for j in range(len(parents))], 1)
    options = dict(keys)
    if form != "deterministic":
        options["draft_probs"] = world.draft[torch.stack([at[parent] for parent in parents], 1).flatten()]
    rows = world.target.log()[torch.cat([last[:, None], nodes], 1).flatten()]
    links, counts = torch.tensor(parents).repeat(len(last)), bounds([len(parents)] * len(last))
    return sk.verify_tree(rows, nodes.flatten(), links, counts, rule=rule, **options)


def p_value(numbers, length, world=FAR):
    """Of the chi-square test against the target's law."""
    law = world.law(length)
    count = torch.bincount(numbers, minlength=len(law)).double()
    return scipy.stats.chisquare(count, law * len(numbers)).pvalue
