"""The best next tokens of a model: as an answer in itself, and as what a draft proposes."""

from __future__ import annotations

from collections.abc import Sequence

from .drafts.likeliest import likeliest
from .drafts.vocabulary import map_of
from .errors import ModelFault, OptionError, PromptError, show

CHUNK = 256  # ids per pass over a context


def generate_candidates(draft_model, context, k: int = 3) -> list[tuple[int, float]]:
    """The ``k`` most likely next tokens after ``context`` as (id, log-probability), best first, ties by lower id.

    The probabilities are the model's softmax at temperature 1 over its whole vocabulary. Fewer than ``k`` come back
    only if the model gives fewer a probability at all.

    Args:
        draft_model: a loaded :class:`Pair`, whose target is asked, or a model (anything with ``new_cache`` and
            ``forward`` as in models/base.py). A model with a cut vocabulary (``draft_ids``) answers in ids of the
            whole one.
        context: token ids; for a pair also a string, taken as it is, or chat messages.
        k: how many, 1 to the size of the vocabulary.

    Raises OptionError for a ``k`` or a ``draft_model`` that can't be used, PromptError for such a context, ModelFault
    if the logits are NaN.
    """
    from .checks import integer
    from .pair import Pair

    k = integer("k", k, 1)
    if isinstance(draft_model, Pair):
        return _of_pair(draft_model, context, k)
    if not hasattr(draft_model, "new_cache"):
        raise OptionError(f"draft_model: expected a pair or a model, got {show(draft_model)}")
    ids = _checked(context, draft_model.vocab_size, draft_model.context)
    return _best(draft_model, draft_model.new_cache(len(ids)), draft_model, ids, k)


def _of_pair(pair, context, k):
    from .prompts import prompt_ids

    pair.ready()
    ids = prompt_ids(context, False, pair._version, pair.context + 1)  # no room for an answer is needed
    seat = pair.seat(len(ids))
    try:
        with seat.lock:
            return _best(seat, seat, pair.model, ids, k)
    finally:
        seat.leave()


def _best(forwards, cache, model, ids, k):
    cut = map_of(model, model.vocab_size)
    most = model.vocab_size if cut is None else len(cut)
    if k > most:
        raise OptionError(f"k: expected an integer from 1 to {most}, got {k}")
    last = len(ids) - 1
    for start in range(0, last, CHUNK):
        forwards.forward(ids[start : min(start + CHUNK, last)], cache, last=0)
    found = likeliest(forwards.forward(ids[last:], cache, last=1)[0], cut, k)
    if found is None:
        raise ModelFault(f"no token at position {len(ids)} has a probability: the model's logits are NaN or -inf")
    return found


def _checked(context, vocab_size, most):
    if isinstance(context, str | bytes | bytearray) or not isinstance(context, Sequence):
        raise PromptError(f"context: expected token ids (a string only with a pair), got {show(context)}")
    if not 1 <= len(context) <= most:
        raise PromptError(f"context: expected 1 to {most} token ids, got {len(context)}")
    bad = next((t for t in context if type(t) is not int or not 0 <= t < vocab_size), None)
    if bad is not None:
        raise PromptError(f"context: expected token ids in [0, {vocab_size}), got {show(bad)}")
    return list(context)
