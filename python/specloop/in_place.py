"""A folder as Hugging Face has them, streamed as it is: without a conversion, where its values are what is asked for.

Its blocks are ranges all over its files, so they are read through the page cache, and its head is one block, which a
slot has to hold or memory has to keep. A pack (convert.py) has neither flaw, and int8 needs one.
"""

from specdec_kernels import stream

from .models.blueprint import Blueprint

_IN_LAYER = {
    "attention_norm": ["input_layernorm.weight"],
    "qkv": [f"self_attn.{name}_proj.weight" for name in "qkv"],
    "attention_out": ["self_attn.o_proj.weight"],
    "mlp_norm": ["post_attention_layernorm.weight"],
    "gate_up": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "down": ["mlp.down_proj.weight"],
}
_BIASES = {"qkv_bias": [f"self_attn.{name}_proj.bias" for name in "qkv"]}
_NORMS = {name: [f"self_attn.{name}.weight"] for name in ("q_norm", "k_norm")}


def streams_in_place(checkpoint, dtype):
    """Whether all of the checkpoint is stored as ``dtype`` ("bf16", "f32") in safetensors files."""
    stored = getattr(checkpoint, "stored_as", None)
    return stored is not None and all(stored(name)[1] == dtype for name in checkpoint.names())


def folder_pack(checkpoint, dtype):
    """The checkpoint as an open pack with the blocks and matrices of a converted one. ModelError for wrong shapes."""
    config = Blueprint(checkpoint, dtype).config  # which compares every shape; stacked ones could hide a wrong one
    own = lambda name: checkpoint.stored_as(name)[0]
    named = _IN_LAYER | (_BIASES if config.qkv_bias else {}) | (_NORMS if config.qk_norm else {})
    layout = [
        (
            f"layer.{i}",
            [(part, [own(f"model.layers.{i}.{tensor}") for tensor in tensors]) for part, tensors in named.items()],
        )
        for i in range(config.layers)
    ]
    tied = "lm_head.weight" not in checkpoint.names()
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    layout.append(("head.0", [("norm", [own("model.norm.weight")]), ("weight", [own(head)])]))
    order = range(len(layout))
    matrices = {"head": [("head.0", "weight")], "embedding": [("head.0", "weight")]}
    if not tied:
        layout.append(("embedding.0", [("weight", [own("model.embed_tokens.weight")])]))
        matrices["embedding"] = [("embedding.0", "weight")]
    return stream.Pack.from_safetensors(checkpoint.path, layout, order=order, matrices=matrices)
