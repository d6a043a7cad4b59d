"""Rotary frequencies: the published formulas, and what transformers makes of the same settings."""

import math
from dataclasses import replace

import pytest
import torch

from specloop.errors import ModelError
from specloop.models import rope
from specloop.models.config import LlamaConfig
from tiny_llama import CONFIG as TINY

CONFIG = replace(TINY, head_dim=64, context=4096)
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
SCALINGS = [
    None,
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    LLAMA3,
    YARN,
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 16},
    YARN | {"truncate": False, "attention_factor": 1.5},
]


def of(scaling, theta=1e4):
    return replace(CONFIG, rope_theta=theta, rope_scaling=scaling)


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_are_those_of_transformers(scaling, theta):
    transformers = pytest.importorskip("transformers", reason="it is the authority on rotary scalings")
    theirs = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": theta, "rope_type": "default", **(scaling or {})},
    )
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    found, factor = rope.frequencies(of(scaling, theta))
    assert found.dtype is torch.float64 and factor == pytest.approx(rotary.attention_scaling, rel=1e-12)
    assert torch.allclose(found.float(), rotary.inv_freq, rtol=1e-6, atol=0)


def test_llama3_by_hand():
    """A wave as long as the trained context turns once in it: divided. Four times: kept. Between: blended."""
    plain, _ = rope.frequencies(of(None))
    found, _ = rope.frequencies(of(LLAMA3))
    turns = 1024 * plain / (2 * math.pi)
    assert (turns > 4).any() and (turns < 1).any() and ((turns > 1) & (turns < 4)).any()
    assert torch.equal(found[turns >= 4], plain[turns >= 4])
    assert torch.allclose(found[turns <= 1], plain[turns <= 1] / 8, rtol=1e-15)
    between = (turns > 1) & (turns < 4)
    assert ((found < plain) & (found > plain / 8))[between].all()


def test_factors_divide():
    factors = [1.0 + i for i in range(32)]
    plain, _ = rope.frequencies(of(None))
    found, factor = rope.frequencies(of({"rope_type": "factors", "factors": factors}))
    assert factor == 1 and torch.equal(found, plain / torch.tensor(factors, dtype=torch.float64))


def test_the_table():
    table = rope.table(of(YARN), 9)
    frequency, factor = rope.frequencies(of(YARN))
    assert table.shape == (9, 64) and table.dtype is torch.float32 and factor > 1
    assert table[7, 3] == torch.tensor(math.cos(7 * frequency[3].item()) * factor).float()
    assert table[8, 35] == torch.tensor(math.sin(8 * frequency[3].item()) * factor).float()
    assert rope.table(of(None), 0).shape == (0, 64)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ("linear", "expected an object"),
        ({"rope_type": "su"}, "type 'su' is not supported"),
        ({"rope_type": ["llama3"]}, "is not supported"),
        ({"rope_type": "linear"}, "got no factor"),
        ({"rope_type": "linear", "factor": True}, "factor: expected a positive number"),
        ({"rope_type": "linear", "factor": float("inf")}, "factor: expected a positive number"),
        ({"rope_type": "factors", "factors": [1.0, 0.0]}, "factors: expected a positive number"),
        (
            {"rope_type": "linear", "factor": 1e300},
            r"a positive number from 1e-09 to 1e\+09, got 1e\+300",
        ),
        ({"rope_type": "factors", "factors": [1.0, 5e-324]}, "factors: expected a positive number"),
        (YARN | {"attention_factor": 1e30}, "attention_factor: expected a positive number"),
        (LLAMA3 | {"high_freq_factor": 1e30}, "high_freq_factor: expected a positive number"),
        ({"rope_type": "factors", "factors": [1.0]}, "expected 32 numbers, got 1"),
        ({"rope_type": "factors", "factors": 3.0}, "factors: expected a list"),
        (YARN | {"truncate": 1}, "truncate: expected true or false"),
        (LLAMA3 | {"low_freq_factor": 4.0}, "low_freq_factor below"),
    ],
)
def test_refusals(scaling, message):
    with pytest.raises(ModelError, match=message):
        rope.frequencies(of(scaling))


def test_a_window_and_dynamic_scaling_end_the_context():
    assert replace(CONFIG, sliding_window=100).context == 100
    assert replace(CONFIG, sliding_window=10**6).context == 4096
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 2048}
    assert of(dynamic).context == 2048
    with pytest.raises(ModelError, match="sliding_window of at least 1"):
        replace(CONFIG, sliding_window=0)
    with pytest.raises(ModelError, match="architecture 'gpt2'"):
        replace(CONFIG, architecture="gpt2")
    assert hash(of(LLAMA3)) and of(LLAMA3) == of(dict(LLAMA3)) != of(None)
    assert isinstance(of(LLAMA3), LlamaConfig)
