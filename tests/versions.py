"""Two versions of a tiny model with one vocabulary, as pairs load them."""

from scripted import ToyTokenizer
from specloop.pair import Pair
from tiny_llama import CONFIG, build

PROMPT = [5, 100, 7, 7, 42]


class Vocabulary(ToyTokenizer):
    """One byte per id, then pairs of them."""

    def __init__(self, fingerprint="tiny", size=CONFIG.vocab):
        super().__init__([bytes([i]) if i < 128 else bytes([65 + i % 26, 97 + i % 23]) for i in range(size)], (2,))
        self.fingerprint, self.vocab_size = fingerprint, size


def parts(seed=0, **options):
    """What a pair loads: a function that builds a model."""
    fingerprint = options.pop("fingerprint", "tiny")
    return lambda: (build(seed=seed, **options), Vocabulary(fingerprint), None)


def pair_of(seed=0, *, draft="lookup", k=3, **options):
    return Pair(parts(seed, **options), draft=draft, k=k)


def alone(seed, ids, tokens, **options):
    """What a fresh load of that version says after ``ids``."""
    with pair_of(seed, draft="none", **options) as pair:
        return pair.generate(list(ids), max_new_tokens=tokens).tokens
