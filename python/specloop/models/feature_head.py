"""A draft on the hidden states of its target: one layer, whose input is joined of an id and a feature.

Row p consumes the id x_p and the feature f of position p - 1 (models/base.py), and predicts x_(p + 1):

    h = fc . [rms_norm(embedding of x_p) ; f]       the embedding is the target's, in memory once
    g = rms_norm(one llama layer over h),  logits = head . g

Where the target has not been yet, the head's own g takes the place of f: so it guesses as far ahead as it likes, each
guess a pass over one row. (EAGLE's idea: Li et al. 2024, arXiv 2401.15077, here with the state behind the last norm.)
"""

import torch

import specdec_kernels as sk

from .base import Part, check_parts
from .llama import Llama, linear
from .weights import Resident


class HeadWeights(Resident):
    """``embed(ids, out)``: the target's. ``fc``: [hidden, 2 * hidden]."""

    embeds_in_place = False

    def __init__(self, embed, embedding_norm, fc, layers, norm, head):
        super().__init__(head, layers, norm, head)
        self.embedding, self.embedding_norm, self.fc = None, embedding_norm, fc
        self.nbytes = self.all_nbytes = self.nbytes + embedding_norm.nbytes + fc.nbytes
        self.embed = embed
        self.embeds_in_place = getattr(getattr(embed, "__self__", None), "embeds_in_place", False)

    def to(self, device):
        if torch.device(device) != self.device:
            raise ValueError(f"device: expected {self.device}, where the target is, got {device}")
        return self

    def close(self):
        super().close()
        self.embed = self.fc = self.embedding_norm = None


class FeatureHead(Llama):
    """``weights``: HeadWeights; the other arguments are those of a Llama, and so is what it does.

    Its caches have features, its own, and ``given``: (features of the target, how many of them are true). A pass takes
    the given ones where they reach, own ones behind them, and zeros at the first position.
    """

    reads_features = True

    def __init__(self, config, weights, **options):
        super().__init__(config, weights, **options)
        self._joined = torch.empty(self._chunk, 2 * config.hidden, device=self.device)

    def new_cache(self, capacity=None, features=True):
        cache = super().new_cache(capacity, features=True)
        cache.given = None, 0
        return cache

    def cache_nbytes(self, capacity, features=True):
        return super().cache_nbytes(capacity, features=True)

    @property
    def memory_nbytes(self):
        return super().memory_nbytes + self._joined.nbytes

    def forward_parts(self, parts):
        """As a Llama's, but for trees, which a head does not take. One pass takes one request's rows as far as their
        features are there; behind them each row waits for the one before it.
        """
        check_parts(parts)
        made = []
        for cache, tokens, last, parents in parts:
            if parents is not None:
                raise ValueError("parents: expected chains, a feature head takes no trees")
            at, first = 0, len(tokens) - last
            while at < len(tokens):
                stop = min(at + max(1, cache.given[1] - cache.length + 1), len(tokens))
                rows = super().forward_parts([Part(cache, tokens[at:stop], max(0, stop - max(at, first)))])
                if len(parts) == 1 and stop - at == len(tokens):
                    return rows
                made.append(rows.clone())
                at = stop
        return torch.cat(made) if made else self._logits[:0]

    def _enter(self, r, key, layout, pieces):
        """The rows' embeddings and features, joined."""
        self.weights.embed(r.ids, r.hidden)
        (piece,) = pieces
        self._take(piece.cache, self._joined[: layout.rows, self.config.hidden :])
        self._make(r, key, "join", self._join)

    def _one_row(self, r):
        self.weights.embed(r.ids, r.hidden)
        self._join(r)
        for _, blocks in self.weights.pieces(True):
            self._steps(r, blocks)

    def _state_of(self, r):
        return {"state": r.normed, "feature": self._joined[:1, self.config.hidden :]}

    def _reads(self, cache):
        return None if cache.length <= cache.given[1] else cache.features

    @staticmethod
    def _take(cache, out):
        """Features of the positions from that before the cache's next one on."""
        features, reach = cache.given
        first = cache.length - 1
        if first < 0:
            out[0] = 0
            first, out = 0, out[1:]
        true = min(max(reach - first, 0), len(out))
        if true:
            out[:true] = features[first : first + true]
        if true < len(out):  # one row
            out[true:] = cache.features[first + true : first + len(out)]

    def _join(self, r):
        joined, w, d = self._joined[: len(r.hidden)], self.weights, self.config.hidden
        sk.rms_norm(r.hidden, w.embedding_norm, self.config.rms_eps, out=joined[:, :d])
        linear(joined, w.fc, out=r.hidden)
