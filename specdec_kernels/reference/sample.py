"""Reference of ``sample``: one row after the other, in float64.

Arguments, as the public function hands them to every backend: ``logits`` [B, V] with a contiguous last dimension;
``temperature, top_k, top_p, min_p, seed, position`` as in ``reference/verify.py``; ``stream`` an int; ``index`` an int
or a contiguous int32 tensor [B]; outputs ``tokens`` [B] int64 and ``logprobs`` [B] f32 or None.
"""

import torch

from . import filters
from .draws import Exact, draw, shifts
from .request import at


def sample_row(row, temperature, top_k, top_p, min_p, seed, position, stream, index, decide):
    w = filters.weights(filters.clean(row)[0], temperature, top_k, top_p * decide.top_p, min_p * decide.min_p)
    if not w.any():
        return -1
    if temperature == 0:
        return int(w.nonzero()[0])
    return draw(w, seed, position, stream, index, decide)


def _rows(logits, temperature, top_k, top_p, min_p, seed, position, stream, index):
    for b, row in enumerate(logits.cpu()):
        parameters = [at(parameter, b) for parameter in (temperature, top_k, top_p, min_p)]
        noise = [0 if n is None else int(n[b]) for n in (seed, position)]
        yield (row, *parameters, *noise, stream, at(index, b))


def sample(*args):
    *call, tokens, logprobs = args
    for b, row in enumerate(_rows(*call)):
        tokens[b] = token = sample_row(*row, Exact())
        if logprobs is not None:
            logprobs[b] = torch.nan if token < 0 else filters.clean(row[0])[0].log_softmax(0)[token]


def fragile(*args):
    """Which rows of the call (same arguments as :func:`sample`) give another token when comparisons move a little."""
    *call, _tokens, _logprobs = args
    return [any(sample_row(*row, s) != sample_row(*row, Exact()) for s in shifts()) for row in _rows(*call)]
