"""Which tensors a model of the llama family consists of, by Hugging Face's names."""

import re

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_IN_LAYER = {
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}
_BIASES = {f"self_attn.{name}_proj.bias" for name in "qkv"}
_NORMS = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
_LAYER = re.compile(r"model\.layers\.(0|[1-9]\d{0,5})\.(.+)")


def stranger(name, config):
    """Why no model of this configuration has a tensor of that name; None if it may.

    A file with a tensor that is left over belongs to a model that computes something else.
    """
    if name in (EMBEDDING, HEAD, NORM):
        return None
    match = _LAYER.fullmatch(name)
    known = _IN_LAYER | (_BIASES if config.qkv_bias else set()) | (_NORMS if config.qk_norm else set())
    if not match or match[2] not in known:
        return f"no {config.architecture} of this configuration has it"
    if int(match[1]) >= config.layers:
        return f"the configuration says that the model has {config.layers} layers"
    return None
