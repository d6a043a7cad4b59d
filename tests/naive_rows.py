"""What options do to one row, written out id by id: nothing here is shared with what is tested."""

import math

from scripted import argmax
from specloop.drafts.base import Proposal


def processed(row, ids, prompt_tokens, eos_ids=(), **options):
    """``row``: the model's logits after ``ids``, as floats."""
    row, answer = list(row), ids[prompt_tokens:]
    for token, bias in options.get("logit_bias", {}).items():
        row[token] += bias
    repetition = options.get("repetition_penalty", 1.0)
    for token in set(ids):
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    for token in set(answer):
        row[token] -= options.get("frequency_penalty", 0.0) * answer.count(token)
        row[token] -= options.get("presence_penalty", 0.0)
    for word in options.get("bad_words", ()):
        n = len(word) - 1
        if not n or tuple(ids[-n:]) == tuple(word[:-1]):
            row[word[-1]] = -math.inf
    if len(answer) < options.get("min_new_tokens", 0):
        for token in eos_ids:
            row[token] = -math.inf
    if "allowed" in options:
        allowed = options["allowed"](ids)
        row = [value if allowed is None or token in allowed else -math.inf for token, value in enumerate(row)]
    return row


def plainly(model, prompt, tokens, **options):
    """Greedy decoding of so many ids, or up to an end."""
    ids = list(prompt)
    while len(ids) < len(prompt) + tokens:
        ids.append(argmax(processed(model.logits(ids), ids, len(prompt), model.eos_ids, **options)))
        if ids[-1] in model.eos_ids:
            break
    return ids[len(prompt) :]


class TreeDraft:
    """A tree of the same shape in every round: node j is ``following(ids on the way, j)``; siblings differ."""

    name, timely = "tree", True

    def __init__(self, following, vocab_size, parents):
        self.following, self.vocab_size, self.parents, self.ids = following, vocab_size, parents, []

    def begin(self, ids):
        self.ids = list(ids)

    def append(self, ids):
        self.ids.extend(ids)

    def outlook(self):
        return 0, len(self.parents)

    def propose(self, k):
        paths, depth, tokens, taken, links, node_of = {-1: []}, {-1: 0}, [], {}, [], {-1: -1}
        for j, parent in enumerate(self.parents):
            depth[j] = depth[parent] + 1
            if depth[j] > k or parent not in node_of:
                continue
            token = self.following(self.ids + paths[parent], j)
            while token in taken.setdefault(parent, set()):
                token = (token + 1) % self.vocab_size
            taken[parent].add(token)
            node_of[j] = len(tokens)
            links.append(node_of[parent])
            tokens.append(token)
            paths[j] = [*paths[parent], token]
        return Proposal(tokens, links)
