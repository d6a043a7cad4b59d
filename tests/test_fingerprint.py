"""A model has one fingerprint, whatever file it came from and whatever its matrices became."""

from dataclasses import replace

import pytest
import torch

from specloop.fingerprint import fingerprint
from specloop.models.llama import Llama
from tiny_llama import CONFIG, build
from versions import Vocabulary

pytest.importorskip("gguf", reason="the gguf package writes the test files: pip install '.[test]'")
from scripted import Scripted
from specloop.formats.gguf_checkpoint import GGUFCheckpoint
from specloop.loader import fingerprint_of_file, load_model
from specloop.models import balance
from test_loader import write
from test_streamed_model import packed, smallest


def of(name, **options):
    model, tokenizer, _ = load_model(name, context=64, **options)
    try:
        return fingerprint(model, tokenizer)
    finally:
        model.close()


def test_files_and_dtypes_of_one_model(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    source = str(write(tmp_path / "tiny.gguf"))
    first = of(source)
    assert len(first) == 64 and int(first, 16)
    assert {of(source, dtype=dtype) for dtype in ("bf16", "f32")} == {first}
    path = packed(source)
    assert {of(path), of(path, memory_budget=smallest(path))} == {first}
    assert fingerprint_of_file(source) == fingerprint_of_file(path) == first


def test_powers_of_two_in_the_norms_change_nothing(tmp_path, monkeypatch):
    """A balance takes them out of int8 models' norms, and out of no others."""
    source = str(write(tmp_path / "tiny.gguf"))
    first = of(source)
    with GGUFCheckpoint(source) as checkpoint:
        c = checkpoint.config
    g = torch.Generator().manual_seed(0)
    sizes = {"qkv": c.hidden, "gate_up": c.hidden, "down": c.intermediate, "values": c.kv_heads * c.head_dim}
    powers = lambda n: 2.0 ** torch.randint(-3, 4, (n,), generator=g).float()
    layers = [balance.LayerBalance(**{name: powers(n) for name, n in sizes.items()}) for _ in range(c.layers)]
    monkeypatch.setattr("specloop.models.blueprint.find_balance", lambda norms, config: layers)
    model = load_model(source, context=64)[0]
    monkeypatch.undo()
    assert not torch.equal(model.weights.layers[0].mlp_norm, load_model(source)[0].weights.layers[0].mlp_norm)
    monkeypatch.setattr("specloop.models.blueprint.find_balance", lambda norms, config: layers)
    assert of(source) == first


def test_what_tells_models_apart():
    model, words = build("f32"), Vocabulary()
    first = fingerprint(model, words)
    assert fingerprint(build("int8"), words) == first != fingerprint(build("f32", seed=1), words)
    assert fingerprint(model, Vocabulary("other")) != first
    for change in ({"rope_theta": 2e4}, {"rms_eps": 1e-6}):
        assert fingerprint(Llama(replace(CONFIG, **change), model.weights, context=64), words) != first
    assert fingerprint(Llama(replace(CONFIG, context=100), model.weights, context=64), words) == first
    model.weights.layers[2].mlp_norm[7] *= -1
    turned = fingerprint(model, words)
    model.weights.layers[2].mlp_norm[7] *= 1.01
    assert len({first, turned, fingerprint(model, words)}) == 3


def test_models_that_do_not_say_what_they_are():
    assert fingerprint(Scripted(lambda prefix: [0.0], 1), Vocabulary()) is None
    assert fingerprint(build(), object()) is None
