"""How many answer rows fit into memory at once."""

from __future__ import annotations

import torch

SHARE = 0.5  # of the free memory that a step may take
LEAST = 256


def free_bytes(device):
    """Memory that can be had on the device."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    from specdec_kernels.stream.limits import available_memory

    return available_memory().nbytes


def row_bytes(config, depths, checkpointing, context_rows=512):
    """What a step keeps of one row for its gradient, estimated.

    Per depth: the row's states in float32 and in the products' dtype, gate and up with their activations, queries, keys
    and values, and a head's weights over the text twice. With checkpointing only one depth's at a time, and the states.
    """
    d, wide = config.hidden, config.intermediate
    attention = (config.heads + 2 * config.kv_heads) * config.head_dim
    one = 4 * (12 * d + 3 * attention) + 2 * (2 * d + 6 * wide) + config.heads * context_rows * (4 + 4 + 2)
    one *= config.layers
    return (one + depths * 4 * 4 * d) if checkpointing else depths * (one + 4 * 4 * d)


def choose(config, depths, checkpointing, wanted, free, workers=1):
    """Answer rows at once, for each of ``workers``: ``wanted`` in all if they fit, else as many as do. Parts are equal,
    and a multiple of the workers, so that all have as much to do.
    """
    most = max(LEAST, int(SHARE * free / workers / row_bytes(config, depths, checkpointing)))
    parts = -(-wanted // most)
    parts = -(-parts // workers) * workers
    return max(1, -(-wanted // parts))


def advice(error, rows):
    """A line on an allocation that failed while ``rows`` were made at once (None = none were yet)."""
    first = next(iter(str(error).splitlines()), "").strip()[:200] or type(error).__name__
    at_once = "" if rows is None else f" with {rows} rows at once"
    fewer = "fewer at once (--micro-rows)" if rows is None else f"fewer (--micro-rows {max(1, rows // 2)})"
    return f"there is too little memory{at_once}: {fewer} or --checkpointing need less ({first})"
