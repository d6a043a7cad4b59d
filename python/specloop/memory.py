"""What a model needs besides its weights, in bytes, before any of it is allocated."""

from .models.cache import PAGE, page_nbytes
from .models.llama import CHUNK, REPEATED, Buffers


def needs(config, *, kv, context, rows=CHUNK):
    """{"kv", "workspace", "logits"}: what :func:`specdec_kernels.stream.plan` takes as ``reserved``."""
    context = min(context, config.context)
    pages = -(-context // PAGE)
    cache = pages * page_nbytes(config, kv)
    buffers = rows * Buffers.row_nbytes(config)
    rotary = context * (config.head_dim * 4 + 8)
    scratch = 16 * (3 * config.intermediate + config.hidden) * 4  # of fused calls, which work on 16 rows at a time
    return {"kv": cache, "workspace": buffers + rotary + scratch, "logits": REPEATED * config.vocab * 4}


def size_in_memory(name, *, dtype, kv, context):
    """All that a model takes that is in memory as a whole, in bytes. Raises what opening it raises."""
    from specdec_kernels import stream

    from .convert import weights_nbytes
    from .errors import translated
    from .formats.locate import find_model, is_pack, open_checkpoint
    from .loader import model_config

    path = find_model(name)
    with translated():
        if is_pack(path):
            with stream.Pack.open(path) as pack:
                config, weights = model_config(pack)[0], sum(pack.blocks[index].nbytes for index in pack.order)
        else:
            with open_checkpoint(path) as checkpoint:
                config, weights = checkpoint.config, weights_nbytes(checkpoint, dtype)
    return weights + sum(needs(config, kv=kv, context=context).values())
