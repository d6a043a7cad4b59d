"""What a model needs besides its weights, in bytes, before any of it is allocated."""

from .models.cache import PAGE, Pages
from .models.llama import CHUNK, REPEATED, Buffers


def needs(config, *, kv, context, rows=CHUNK):
    """{"kv", "workspace", "logits"}: what :func:`specdec_kernels.stream.plan` takes as ``reserved``."""
    context = min(context, config.context)
    pages = -(-context // PAGE)
    cache = pages * Pages(config, PAGE, kv, "meta").page_nbytes
    buffers = sum(tensor.nbytes for tensor in vars(Buffers(config, rows, "meta")).values())
    rotary = context * (config.head_dim * 4 + 8)
    scratch = 16 * (3 * config.intermediate + config.hidden) * 4  # of fused calls, which work on 16 rows at a time
    return {"kv": cache, "workspace": buffers + rotary + scratch, "logits": REPEATED * config.vocab * 4}
