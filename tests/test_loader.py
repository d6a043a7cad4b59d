"""The loader: a small GGUF of known weights gives the textbook's logits; files that can't be served are named."""

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from specloop.errors import ModelError
from specloop.loader import load_model
from tiny_llama import CONFIG, plain_float64, weights

gguf = pytest.importorskip("gguf", reason="the gguf package writes the test files: pip install '.[test]'")
TOKENS = [5, 100, 7, 7, 42, 0, 199, 63]


def side_by_side(rows):
    """Rows of q or k with rotary pairs next to each other, which is how GGUF stores them for llama."""
    heads = rows.unflatten(0, (-1, 2, CONFIG.head_dim // 2))
    return heads.transpose(1, 2).reshape(rows.shape)


def write(path, *, tied=True, skip=(), reshape=(), architecture="llama", config=CONFIG, seed=0):
    """A GGUF with the weights of tiny_llama.weights(config, seed) and a byte-level vocabulary."""
    c = config
    embedding, layers, norm = weights(config, seed)
    out = gguf.GGUFWriter(path, architecture)
    out.add_block_count(c.layers)
    out.add_embedding_length(c.hidden)
    out.add_feed_forward_length(c.intermediate)
    out.add_head_count(c.heads)
    out.add_head_count_kv(c.kv_heads)
    out.add_context_length(c.context)
    out.add_layer_norm_rms_eps(c.rms_eps)
    out.add_rope_freq_base(c.rope_theta)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("smollm")
    out.add_token_list(["a", "b", "ab", *(chr(0x100 + i) for i in range(c.vocab - 3))])
    out.add_token_types([1] * c.vocab)
    out.add_token_merges(["a b"])
    out.add_eos_token_id(2)
    tensors = {"token_embd.weight": embedding, "output_norm.weight": norm}
    if not tied:
        tensors["output.weight"] = embedding * 0.5
    attention, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    for i, layer in enumerate(layers):
        q, k, v = layer.qkv.split([attention, kv, kv])
        gate, up = layer.gate_up.chunk(2)
        parts = {
            "attn_norm": layer.attention_norm,
            "attn_q": side_by_side(q),
            "attn_k": side_by_side(k),
            "attn_v": v,
            "attn_output": layer.attention_out,
            "ffn_norm": layer.mlp_norm,
            "ffn_gate": gate,
            "ffn_up": up,
            "ffn_down": layer.down,
        }
        tensors |= {f"blk.{i}.{name}.weight": value for name, value in parts.items()}
    for name, value in tensors.items():
        if name not in skip:
            value = value[..., :-1] if name in reshape else value
            out.add_tensor(name, np.ascontiguousarray(value.numpy()))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_the_textbooks(tmp_path, tied):
    path = str(write(tmp_path / "tiny.gguf", tied=tied))
    model, tokenizer, template = load_model(path, dtype="f32", kv="f32", context=64)
    got = model.forward(TOKENS, model.new_cache(), last=len(TOKENS))
    torch.testing.assert_close(got.double(), plain_float64(model, TOKENS), rtol=1e-4, atol=1e-4)
    # plain_float64 reads the model's own matrices, so these have to be the file's.
    embedding, layers, norm = weights()
    assert torch.equal(model.weights.embedding, embedding) and torch.equal(model.weights.norm, norm)
    assert torch.equal(model.weights.layers[1].qkv, layers[1].qkv) and torch.equal(
        model.weights.layers[2].down, layers[2].down
    )
    assert torch.equal(model.weights.head, embedding if tied else embedding * 0.5)
    assert (tokenizer.vocab_size, model.eos_ids, template) == (CONFIG.vocab, frozenset({2}), None)


def test_int8_holds_the_same_weights(tmp_path):
    seen = []
    path = str(write(tmp_path / "tiny.gguf"))
    model, _, _ = load_model(path, dtype="int8", context=64, progress=seen.append)
    _, layers, _ = weights()
    for got, want in (
        (model.weights.layers[0].qkv, layers[0].qkv),
        (model.weights.layers[2].gate_up, layers[2].gate_up),
    ):
        step = want.unflatten(1, (-1, got.group_size)).abs().amax(-1, keepdim=True) / 127
        error = (got.dequantize() - want).unflatten(1, (-1, got.group_size)).abs()
        assert bool((error <= 0.501 * step).all())
    assert model.weights.embedding is model.weights.head and isinstance(model.weights.head, sk.Int8Weight)
    assert seen == sorted(seen) and seen[-1] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skip": ("blk.1.ffn_up.weight",)}, "blk.1.ffn_up.weight: missing from the file"),
        ({"skip": ("output_norm.weight",)}, "output_norm.weight: missing"),
        ({"reshape": ("blk.0.attn_output.weight",)}, r"blk.0.attn_output.weight: expected shape \[96, 96\]"),
        ({"architecture": "mamba"}, "general.architecture: expected llama"),
    ],
)
def test_files_that_can_not_be_served(tmp_path, options, message):
    with pytest.raises(ModelError, match=message):
        load_model(str(write(tmp_path / "bad.gguf", **options)))


def test_unknown_dtype():
    with pytest.raises(ModelError, match="dtype: expected one of int8, bf16, f32, got 'int4'"):
        load_model("smollm2", dtype="int4")
    with pytest.raises(ModelError, match="kv: expected one of int8, f16, f32"):
        load_model("smollm2", kv="int4")
