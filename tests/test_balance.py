"""Balance: factors between tensors change no float32 bit, and are those of the model they are for.

What they are worth is bench/bench_fidelity.py's to measure.
"""

import json

import pytest
import torch

import tiny_llama
from specloop import loader
from specloop.models import balance, blueprint, calibrate
from test_loader import TOKENS, write
from tiny_llama import CONFIG


def logits(path, dtype):
    model, _, _ = loader.load_model(path, dtype=dtype, kv="f32")
    return model.forward(TOKENS, model.new_cache(64), last=len(TOKENS)).clone()


@pytest.fixture
def found(monkeypatch):
    """Makes every model have a balance of random exponents; returns how often one was asked for."""
    g = torch.Generator().manual_seed(1)
    powers = lambda n: 2.0 ** torch.randint(-1, 2, (n,), generator=g)
    c, asked = CONFIG, []
    layers = [
        balance.LayerBalance(
            powers(c.hidden), powers(c.hidden), powers(c.intermediate), powers(c.kv_heads * c.head_dim)
        )
        for _ in range(c.layers)
    ]
    monkeypatch.setattr(blueprint, "find_balance", lambda norms, config: asked.append(len(norms)) or layers)
    return asked


def test_float32_results_do_not_change_by_a_bit(tmp_path, found, monkeypatch):
    write(tmp_path / "m.gguf")
    want = logits(tmp_path / "m.gguf", "f32")
    assert not found  # float32 needs none
    monkeypatch.setattr(blueprint, "needs_balance", lambda dtype: True)
    assert torch.equal(logits(tmp_path / "m.gguf", "f32"), want)
    assert found == [2 * CONFIG.layers + 1]


def test_int8_models_are_balanced(tmp_path, found):
    write(tmp_path / "m.gguf")
    exact, got = logits(tmp_path / "m.gguf", "f32"), logits(tmp_path / "m.gguf", "int8")
    assert found == [2 * CONFIG.layers + 1]
    assert (got - exact).abs().mean() < 0.3 * exact.std()  # random factors are worse than none, but no other model


def test_calibration_gives_powers_of_two_that_survive_the_file():
    """Channels of very different size, as real models have them, want factors; the largest are cut off."""
    model = tiny_llama.build("f32")
    g = torch.Generator().manual_seed(0)
    for layer in model.weights.layers:
        for norm in (layer.attention_norm, layer.mlp_norm):
            norm.mul_(torch.exp(1.5 * torch.randn(norm.shape, generator=g)))
    texts = [torch.randint(CONFIG.vocab, (40,), generator=g).tolist() for _ in range(4)]
    layers = calibrate.calibrate(model, texts[:2])
    for layer in layers:
        for name in ("qkv", "gate_up", "down", "values"):
            exponents = getattr(layer, name).log2()
            assert torch.equal(exponents, exponents.round()) and exponents.abs().max() <= balance.MOST
    assert any((layer.qkv != 1).any() for layer in layers)
    for layer in layers:
        again = balance._decoded(json.loads(json.dumps(balance.encoded(layer))), CONFIG)
        assert all(torch.equal(getattr(layer, name), getattr(again, name)) for name in ("qkv", "gate_up", "down"))
        assert torch.equal(layer.attention_out(CONFIG)[: CONFIG.head_dim], layer.values[: CONFIG.head_dim])


def test_a_model_without_a_measured_balance_has_none():
    norms = [torch.ones(CONFIG.hidden)] * (2 * CONFIG.layers + 1)
    assert balance.find_balance(norms, CONFIG) is None


def test_digits_of_another_shape_are_refused():
    wrong = dict.fromkeys(("qkv", "gate_up", "down", "values"), "4444")
    with pytest.raises(ValueError, match="expected 96 digits for qkv, got 4"):
        balance._decoded(wrong, CONFIG)
