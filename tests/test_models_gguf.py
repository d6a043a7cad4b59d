"""The llama family from GGUF files: the same model as from its folder, whatever the two formats call and order."""

import json

import pytest
import torch

import tiny_folders
from specloop.errors import ModelError
from specloop.loader import load_model

gguf = pytest.importorskip("gguf", reason="its writer makes the files")
pytest.importorskip("transformers", reason="it makes the models")

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}


def gguf_name(name):
    head, _, kind = name.rpartition(".")
    if head.startswith("model.layers."):
        _, _, layer, head = head.split(".", 3)
        return f"blk.{layer}.{NAMES[head]}.{kind}"
    return f"{NAMES[head]}.{kind}"


def side_by_side(rows, heads):
    """Rotary pairs i and i + D / 2 next to each other, as files of the architecture llama have them."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(rows.shape)


def write(path, model, architecture, extra=None):
    c = model.config
    out = gguf.GGUFWriter(path, architecture)
    out.add_block_count(c.num_hidden_layers)
    out.add_context_length(c.max_position_embeddings)
    out.add_embedding_length(c.hidden_size)
    out.add_feed_forward_length(c.intermediate_size)
    out.add_head_count(c.num_attention_heads)
    out.add_head_count_kv(c.num_key_value_heads)
    out.add_layer_norm_rms_eps(c.rms_norm_eps)
    out.add_rope_freq_base(c.rope_parameters["rope_theta"])
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    out.add_key_length(head_dim)
    out.add_value_length(head_dim)
    if c.rope_parameters["rope_type"] in ("yarn", "linear"):
        kind = c.rope_parameters["rope_type"]
        out.add_rope_scaling_type(gguf.RopeScalingType.YARN if kind == "yarn" else gguf.RopeScalingType.LINEAR)
        out.add_rope_scaling_factor(c.rope_parameters["factor"])
        if kind == "yarn":
            out.add_rope_scaling_orig_ctx_len(c.rope_parameters["original_max_position_embeddings"])
    told = json.loads(tiny_folders.byte_level().to_str())["model"]
    tokens = sorted(told["vocab"], key=told["vocab"].get)
    tokens += [f"[PAD{i}]" for i in range(len(tokens), c.vocab_size)]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen2")
    out.add_token_list(tokens)
    out.add_token_types([3 if i < 3 else 5 if token.startswith("[PAD") else 1 for i, token in enumerate(tokens)])
    out.add_token_merges([" ".join(pair) for pair in told["merges"]])
    for name, value in (model.state_dict() | (extra or {})).items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            value = side_by_side(value, c.num_attention_heads if ".q_proj." in name else c.num_key_value_heads)
        out.add_tensor(name if name in (extra or {}) else gguf_name(name), value.contiguous().numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def factors(model):
    """What the frequencies of a model with a scaling are divided by, as converters store it."""
    theta, size = model.config.rope_parameters["rope_theta"], model.model.rotary_emb.inv_freq.shape[0]
    return theta ** (-torch.arange(size) / size) / model.model.rotary_emb.inv_freq


@pytest.mark.parametrize("name", ["llama2", "llama3", "linear", "qwen2", "qwen2 tied", "qwen3", "qwen3 tied"])
def test_the_same_model_from_both_formats(tmp_path, name):
    theirs = tiny_folders.build(name)
    theirs.save_pretrained(tmp_path / "folder")
    tiny_folders.write_tokenizer(tmp_path / "folder", tiny_folders.byte_level())
    extra = {"rope_freqs.weight": factors(theirs)} if name == "llama3" else {}
    write(tmp_path / "m.gguf", theirs, name[:5].replace("linea", "llama"), extra)
    tokens = torch.randint(0, 300, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    logits = []
    for path in (tmp_path / "folder", tmp_path / "m.gguf"):
        model, tokenizer, _ = load_model(path, dtype="f32", kv="f32")
        logits.append(model.forward(tokens, model.new_cache(50), last=50).clone())
    assert (logits[0] - logits[1]).abs().max() < 2e-5 * logits[0].abs().max()
    assert model.config.tied == theirs.config.tie_word_embeddings and tokenizer.vocab_size == 416


def test_a_llama_with_biases(tmp_path):
    """Architecture llama says nothing of biases, but its files may have them; their pairs are in order, too."""
    theirs = tiny_folders.build("qwen2 tied")
    write(tmp_path / "m.gguf", theirs, "llama")
    write(tmp_path / "n.gguf", theirs, "qwen2")
    logits = []
    for path in (tmp_path / "m.gguf", tmp_path / "n.gguf"):
        model, _, _ = load_model(path, dtype="f32", kv="f32")
        logits.append(model.forward([5, 6, 7, 8], model.new_cache(4), last=4).clone())
        assert model.config.qkv_bias
    assert torch.equal(*logits)


@pytest.mark.parametrize("name", ["blk.0.attn_output.bias", "blk.0.ffn_gate_exps.weight", "cls.weight"])
def test_tensors_that_would_be_left_over(tmp_path, name):
    write(tmp_path / "m.gguf", tiny_folders.build("llama2"), "llama", {name: torch.ones(3, 4)})
    with pytest.raises(ModelError, match=f"tensor '{name}': no llama"):
        load_model(tmp_path / "m.gguf")


def test_rotary_factors_of_another_head_size(tmp_path):
    write(tmp_path / "m.gguf", tiny_folders.build("llama2"), "llama", {"rope_freqs.weight": torch.ones(9)})
    with pytest.raises(ModelError, match="factors: expected 8 numbers, got 9"):
        load_model(tmp_path / "m.gguf")
