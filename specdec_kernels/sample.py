"""Sampling from rows of raw logits, with the random numbers of verification."""

import torch

from . import library, parameters, registry, validate


def sample(
    logits,
    *,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=None,
    position=None,
    stream=3,
    index=0,
    return_logprobs=False,
):
    """Draws one id from each row: plain decoding (stream 3, index 0) or a draft (stream 0, index = place in the round).

    A draft is drawn with the position of the *round*, the first token that the coming ``verify`` call emits; ``index``
    counts the drafts from 0. Keyed by the drafted token's own position, a number could come back in a later round, and
    the emitted law would be off.

    Args:
        logits: [B, V] f32, f16 or bf16, raw; any distance between rows. Never modified.
        temperature, top_k, top_p, min_p, seed, position: as for :func:`specdec_kernels.verify`.
        stream: what the numbers are for: 0 draft, 3 plain (1 and 2 belong to ``verify``).
        index: an int, or a tensor [B] int32 or int64, in [0, 2^24).
        return_logprobs: also return log-softmax of the raw row at the drawn id.

    Returns tokens [B] int64, -1 where a row has no candidate (all NaN or -inf); with ``return_logprobs`` also logprobs
    [B] f32, NaN there.

    Raises ValueError or TypeError that names the argument.
    """
    if torch.compiler.is_compiling():
        tokens, logprobs = library.call(
            "sample", logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
            position=position, stream=stream, index=index, return_logprobs=return_logprobs,
        )  # fmt: skip
        return (tokens, logprobs) if return_logprobs else tokens
    validate.tensor("logits", logits, validate.FLOATS, 2)
    validate.rows("logits", logits)
    device = logits.device
    requests, vocabulary = logits.shape
    if vocabulary == 0:
        raise ValueError(f"logits: expected at least one id, got shape {list(logits.shape)}")
    temperature, top_k, top_p, min_p, seed, position = parameters.sampling(
        temperature, top_k, top_p, min_p, seed, position, requests, device
    )
    stream = validate.integer("stream", stream)
    if not 0 <= stream <= 255:
        raise ValueError(f"stream: expected an integer in [0, 255], got {stream}")
    index = _index(index, requests, device)

    tokens = logits.new_empty(requests, dtype=torch.int64)
    logprobs = logits.new_empty(requests, dtype=torch.float32) if return_logprobs else None
    registry.call(
        "sample",
        validate.device_type(logits),
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        position,
        stream,
        index,
        tokens,
        logprobs,
    )
    return (tokens, logprobs) if return_logprobs else tokens


def _index(value, requests, device):
    if isinstance(value, torch.Tensor):
        validate.vector("index", value, (torch.int32, torch.int64), requests, device)
        if value.is_cpu and not all(0 <= i < 2**24 for i in value.tolist()):
            raise ValueError(f"index: expected values in [0, 2^24), got {value.tolist()}")
        return value.int().contiguous()
    value = validate.integer("index", value)
    if not 0 <= value < 2**24:
        raise ValueError(f"index: expected a value in [0, 2^24), got {value}")
    return value
