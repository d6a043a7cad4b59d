"""verify, verify_tree and sample on the GPU. The arguments' form: the files of the same names in reference/."""

import torch

from ..native import DTYPE_CODE

RULES = {"token": 0, "block": 1, "traversal": 1, "typical": 2, "threshold": 3}  # as in csrc/gpu/launch.h
CHUNKS = -1  # into how many blocks a row is split; -1 = as the device's size suggests (csrc/gpu/verify_plan.h)
PLAIN = 3  # the random numbers' stream of a request without a proposal
_NO_ROWS = 0, 0, 0, 0
_ZERO = 0, 0.0  # a parameter that the rule does not use


def bind(compiled, place):
    """The operations of this family on top of a compiled module.

    Each call has a workspace whose size follows from shapes alone. It is torch's, and so goes back in the order of the
    stream: nothing waits, and a CUDA graph keeps it.
    """

    def verify(
        target_logits, draft_tokens, cu_drafts, draft_rows, draft_is_logits, draft_ids, draft_kind,
        temperature, top_k, top_p, min_p, seed, position, rule, theta, typical, tokens, num_accepted, logprobs, flags,
    ):  # fmt: skip
        device, stream = place(target_logits)
        rows = _rows(draft_rows)
        chunks, blocks, size = compiled.plan_verify(*tokens.shape, target_logits.shape[1], rows[2], CHUNKS, device)
        workspace = torch.empty(size, dtype=torch.uint8, device=target_logits.device)
        compiled.verify(
            False, *tokens.shape, draft_tokens.shape[0],
            _rows(target_logits), draft_tokens.data_ptr(), cu_drafts.data_ptr(),
            rows, draft_is_logits, _address(draft_ids), _address(draft_kind),
            *map(_parameter, (temperature, top_k, top_p, min_p)), _address(seed), _address(position),
            RULES[rule], _parameter(theta), *typical, PLAIN, _ZERO,
            tokens.data_ptr(), num_accepted.data_ptr(), _address(logprobs), flags.data_ptr(), 0, 0,
            chunks, blocks, workspace.data_ptr(), device, stream,
        )  # fmt: skip

    def verify_tree(
        target_logits, tree_tokens, parents, cu_nodes, draft_rows,
        temperature, top_k, top_p, min_p, seed, position, rule, theta, typical,
        path, tokens, num_accepted, logprobs, flags,
    ):  # fmt: skip
        device, stream = place(target_logits)
        requests, nodes = tokens.shape[0], tree_tokens.shape[0]
        chunks, blocks, size = compiled.plan_verify_tree(requests, nodes, target_logits.shape[1], CHUNKS, device)
        workspace = torch.empty(size, dtype=torch.uint8, device=target_logits.device)
        compiled.verify(
            True, *tokens.shape, nodes,
            _rows(target_logits), tree_tokens.data_ptr(), cu_nodes.data_ptr(), _rows(draft_rows), False, 0, 0,
            *map(_parameter, (temperature, top_k, top_p, min_p)), _address(seed), _address(position),
            RULES[rule], _parameter(theta), *typical, PLAIN, _ZERO,
            tokens.data_ptr(), num_accepted.data_ptr(), _address(logprobs), flags.data_ptr(),
            parents.data_ptr(), path.data_ptr(), chunks, blocks, workspace.data_ptr(), device, stream,
        )  # fmt: skip

    def sample(logits, temperature, top_k, top_p, min_p, seed, position, stream_of_noise, index, tokens, logprobs):
        """A call of verify without drafts."""
        device, stream = place(logits)
        requests = tokens.shape[0]
        chunks, blocks, size = compiled.plan_verify(requests, 1, logits.shape[1], 0, CHUNKS, device)
        workspace = torch.empty(size, dtype=torch.uint8, device=logits.device)
        compiled.verify(
            False, requests, 1, 0,
            _rows(logits), 0, 0, _NO_ROWS, False, 0, 0,
            *map(_parameter, (temperature, top_k, top_p, min_p)), _address(seed), _address(position),
            RULES["token"], _ZERO, 0.0, 0.0, stream_of_noise, _parameter(index),
            tokens.data_ptr(), 0, _address(logprobs), 0, 0, 0,
            chunks, blocks, workspace.data_ptr(), device, stream,
        )  # fmt: skip

    return {"verify": verify, "verify_tree": verify_tree, "sample": sample}


def _rows(rows):
    """Address, dtype, columns and distance of the rows of a matrix, or of none."""
    return _NO_ROWS if rows is None else (rows.data_ptr(), DTYPE_CODE[rows.dtype], rows.shape[1], rows.stride(0))


def _parameter(value):
    """(address, 0) of a tensor with one value per request, or (0, number)."""
    if value is None:
        return _ZERO
    return (value.data_ptr(), 0.0) if isinstance(value, torch.Tensor) else (0, value)


def _address(tensor):
    return 0 if tensor is None else tensor.data_ptr()
