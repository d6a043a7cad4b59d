"""Which model a target is, whatever file it came from and whatever its matrices are stored as.

A draft that reads the hidden states of one target is of no use to another, so its file names the target by this
fingerprint: a SHA-256 over the numbers of the configuration, the tokenizer's own fingerprint and all RMS norms'
vectors. These are the weights that GGUF files, folders and packs hold exactly, and training changes every one of them.
Of each number sign and mantissa as bfloat16 are taken: int8 models have powers of two moved out of their norms
(models/balance.py), which changes neither.
"""

from __future__ import annotations

import hashlib
import struct

FORM = b"specdec target 1"
EXPONENT = 0x7F80  # of bfloat16
COUNTS = ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab")


def fingerprint(model, tokenizer) -> str | None:
    """64 hex digits; None for a model or a tokenizer that does not say what it consists of.

    ``model``: a models.llama.Llama, in memory or streaming.
    """
    config, weights = getattr(model, "config", None), getattr(model, "weights", None)
    if config is None or not hasattr(weights, "norms") or not hasattr(tokenizer, "fingerprint"):
        return None
    return digest(config, weights.norms(), tokenizer)


def digest(config, norms, tokenizer) -> str:
    """``norms``: all RMS norms' vectors, in the order of models.weights.NORMS layer by layer, then the last one.

    Context and the scaling of the rotary frequencies don't count: files of the same model say them differently.
    """
    import torch

    found = hashlib.sha256(FORM)
    numbers = [getattr(config, name) for name in COUNTS]
    # Real numbers as float32, which is what a GGUF holds of them.
    found.update(struct.pack("<7q2f2?", *numbers, config.rope_theta, config.rms_eps, config.qkv_bias, config.qk_norm))
    found.update(f" {tokenizer.fingerprint} ".encode())
    for norm in norms:
        bits = norm.detach().to("cpu").to(torch.bfloat16).contiguous().view(torch.int16)
        found.update(struct.pack(f"<{len(norm)}h", *(bits & ~EXPONENT).tolist()))
    return found.hexdigest()
