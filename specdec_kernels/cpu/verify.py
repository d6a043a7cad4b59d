"""verify, verify_tree and sample on the CPU: addresses, sizes and strides for the C++ kernels."""

from ..native import DTYPE_CODE, cpu, not_recordable, threads


def _rows(rows):
    """Address, dtype, columns and distance of the rows of a matrix, or of none."""
    if rows is None:
        return 0, 0, 0, 0
    return rows.data_ptr(), DTYPE_CODE[rows.dtype], rows.shape[1], rows.stride(0)


def _parameter(value):
    """A number, or (address,) of a tensor with one value per request."""
    return value if type(value) in (float, int) else (value.data_ptr(),)


def _address(tensor):
    return 0 if tensor is None else tensor.data_ptr()


# As in csrc/cpu/verify.h, which has one code for chains and trees.
_RULE = {"token": 0, "block": 1, "traversal": 1, "typical": 2, "threshold": 3}


def verify(
    target_logits, draft_tokens, cu_drafts, draft_rows, draft_is_logits, draft_ids, draft_kind,
    temperature, top_k, top_p, min_p, seed, position, rule, theta, typical,
    tokens, num_accepted, logprobs, flags,
):  # fmt: skip
    not_recordable("verify reads values that it was given as Python numbers and copies")
    cpu.verify(
        threads(),
        *tokens.shape,
        *_rows(target_logits),
        draft_tokens.data_ptr(),
        0,
        cu_drafts.data_ptr(),
        *_rows(draft_rows),
        draft_is_logits,
        _address(draft_ids),
        _address(draft_kind),
        _parameter(temperature),
        _parameter(top_k),
        _parameter(top_p),
        _parameter(min_p),
        _address(seed),
        _address(position),
        _RULE[rule],
        _parameter(0.0 if theta is None else theta),
        *typical,
        0,
        tokens.data_ptr(),
        num_accepted.data_ptr(),
        _address(logprobs),
        flags.data_ptr(),
    )


def verify_tree(
    target_logits, tree_tokens, parents, cu_nodes, draft_rows,
    temperature, top_k, top_p, min_p, seed, position, rule, theta, typical,
    path, tokens, num_accepted, logprobs, flags,
):  # fmt: skip
    not_recordable("verify_tree reads values that it was given as Python numbers and copies")
    cpu.verify(
        threads(),
        *tokens.shape,
        *_rows(target_logits),
        tree_tokens.data_ptr(),
        parents.data_ptr(),
        cu_nodes.data_ptr(),
        *_rows(draft_rows),
        False,
        0,
        0,
        _parameter(temperature),
        _parameter(top_k),
        _parameter(top_p),
        _parameter(min_p),
        _address(seed),
        _address(position),
        _RULE[rule],
        _parameter(0.0 if theta is None else theta),
        *typical,
        path.data_ptr(),
        tokens.data_ptr(),
        num_accepted.data_ptr(),
        _address(logprobs),
        flags.data_ptr(),
    )


def sample(logits, temperature, top_k, top_p, min_p, seed, position, stream, index, tokens, logprobs):
    not_recordable("sample reads values that it was given as Python numbers and copies")
    cpu.sample(
        threads(),
        logits.shape[0],
        *_rows(logits),
        _parameter(temperature),
        _parameter(top_k),
        _parameter(top_p),
        _parameter(min_p),
        _address(seed),
        _address(position),
        stream,
        _parameter(index),
        tokens.data_ptr(),
        _address(logprobs),
    )
