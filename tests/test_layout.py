"""Packs and folders that are well-formed files, but not of the model that they describe, are refused when opened."""

import pytest

from described import edited, model, tiny_pack
from specloop.errors import FormatError, ModelError
from specloop.loader import load_model


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return tiny_pack(tmp_path_factory.mktemp("layout"))


def without_norm(told):
    head = next(block for block in told["blocks"] if block["name"] == "head.0")
    head["parts"] = [part for part in head["parts"] if part["name"] != "norm"]


def name_of(block, name):
    return lambda told: told["blocks"][block].update(name=name)


def name_of_part(block, part, name):
    return lambda told: next(p for p in told["blocks"][block]["parts"] if p["name"] == part).update(name=name)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (model(vocab=250), "matrix 'head': expected 250 rows, got 203"),
        (model(vocab=100), "matrix 'head': expected 100 rows"),
        (model(vocab=2**31 - 1), "matrix 'head'"),
        (model(vocab=2**40), "vocab of at least 1 and at most"),
        (model(layers=2), "expected 2 layers"),
        (model(layers=2**31 - 1), "expected 2147483647 layers"),
        (model(layers=2**60), "layers of at least 1 and at most"),
        (model(intermediate=128), "part 'gate_up'"),
        (model(hidden=32), "part 'attention_norm'"),
        (model(kv_heads=6), "part 'qkv'"),
        (model(qk_norm=True), "expected the parts .*q_norm"),
        (model(qkv_bias="yes"), "qkv_bias"),
        (model(rope_theta=10**400), "rope_theta"),
        (model(rope_scaling={"rope_type": "linear", "factor": 10**400}), "factor"),
        (lambda told: told["order"].remove(1), "expected 3 layers"),
        (lambda told: told["order"].reverse(), "expected 3 layers"),
        (lambda told: told["order"].insert(1, 1), "expected 3 layers"),
        (lambda told: told.update(order=[]), "expected 3 layers"),
        (lambda told: told["matrices"].pop("head"), "matrix 'head'"),
        (lambda told: told["matrices"].pop("embedding"), "matrix 'embedding'"),
        (lambda told: told["matrices"].update(head=[[0, "qkv"]]), "matrix 'head'"),
        (lambda told: told["matrices"].update(embedding=[[0, "qkv"]]), "matrix 'embedding'"),
        (name_of(0, "layer.x"), "expected 3 layers"),
        (name_of(0, "layer.7"), "expected 3 layers"),
        (name_of_part(0, "down", "up"), "expected the parts"),
        (without_norm, "expected the parts weight, norm"),
    ],
)
def test_a_pack_of_another_model(pack, tmp_path, edit, message):
    with pytest.raises(ModelError, match=message):
        load_model(str(edited(pack, tmp_path / "other.pack", edit)), context=64)


def test_a_pack_of_another_dtype(pack, tmp_path):
    with pytest.raises(FormatError, match=r"expected .* of torch.float32, got .* of torch.int8"):
        load_model(str(edited(pack, tmp_path / "x", lambda told: told["config"].update(dtype="f32"))), dtype="f32")
