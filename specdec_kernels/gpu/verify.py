"""verify and sample on the GPU. The arguments' form: reference/verify.py, reference/sample.py."""

import torch

from ..native import DTYPE_CODE

RULES = ("token", "block", "typical", "threshold")  # in the order of csrc/gpu/launch.h
CHUNKS = -1  # into how many blocks a row is split; -1 = as the device's size suggests (csrc/gpu/verify.cu)
_NONE = 0, 0, 0, 0


def bind(compiled, place):
    """The operations of this family on top of a compiled module."""

    def judge(target, width, drafts, tokens, *arguments):
        """The call with a workspace of its own. The caching allocator gives it back in the order of the stream."""
        requests, vocabulary = tokens.shape[0], target.shape[1]
        device, stream = place(target)
        draft_columns = arguments[2][2]
        chunks, blocks, size = compiled.plan_verify(requests, width, vocabulary, draft_columns, CHUNKS, device)
        workspace = torch.empty(size, dtype=torch.uint8, device=target.device)
        compiled.verify(
            requests, width, drafts, _rows(target), *arguments, chunks, blocks, workspace.data_ptr(), device, stream
        )

    def verify(
        target_logits, draft_tokens, cu_drafts, draft_rows, draft_is_logits, draft_ids, draft_kind,
        temperature, top_k, top_p, min_p, seed, position, rule, theta, typical, tokens, num_accepted, logprobs, flags,
    ):  # fmt: skip
        judge(
            target_logits,
            tokens.shape[1],
            draft_tokens.shape[0],
            tokens,
            draft_tokens.data_ptr(),
            cu_drafts.data_ptr(),
            _rows(draft_rows),
            draft_is_logits,
            _address(draft_ids),
            _address(draft_kind),
            *map(_parameter, (temperature, top_k, top_p, min_p)),
            _address(seed),
            _address(position),
            RULES.index(rule),
            _parameter(0.0 if theta is None else theta),
            *typical,
            3,
            (0, 0),
            tokens.data_ptr(),
            num_accepted.data_ptr(),
            _address(logprobs),
            flags.data_ptr(),
        )

    def sample(logits, temperature, top_k, top_p, min_p, seed, position, stream, index, tokens, logprobs):
        judge(
            logits,
            1,
            0,
            tokens,
            0,
            0,
            _NONE,
            False,
            0,
            0,
            *map(_parameter, (temperature, top_k, top_p, min_p)),
            _address(seed),
            _address(position),
            0,
            (0, 0),
            0.0,
            0.0,
            stream,
            _parameter(index),
            tokens.data_ptr(),
            0,
            _address(logprobs),
            0,
        )

    return {"verify": verify, "sample": sample}


def _rows(rows):
    """Address, dtype, columns and distance of the rows of a matrix, or of none."""
    return _NONE if rows is None else (rows.data_ptr(), DTYPE_CODE[rows.dtype], rows.shape[1], rows.stride(0))


def _parameter(value):
    """(address, 0) of a tensor with one value per request, or (0, number)."""
    return (value.data_ptr(), 0) if isinstance(value, torch.Tensor) else (0, value)


def _address(tensor):
    return 0 if tensor is None else tensor.data_ptr()
