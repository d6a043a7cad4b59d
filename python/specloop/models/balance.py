"""Powers of two moved between a model's tensors, so that its int8 codes lose less.

A column of a weight matrix may be multiplied by 2^e if what is multiplied with it is divided by 2^e: the norm weight in
front of qkv and gate_up, the rows of up in front of down, those of v in front of the attention's output. No float32
result changes by a bit, since powers of two do not round. But int8 codes have one step per group of columns, and the
error that it causes grows with the activations that the columns meet: columns of large activations get large weights,
and so finer relative steps. The idea is SmoothQuant's (Xiao et al. 2023, arXiv 2211.10438), here for the weights' sake.

Which powers are best depends on the activations, so they are measured once per model (calibrate.py) and kept in
``data/balance.json``: per model, found by a hash of its norm weights (which every file of a model has in float32,
whatever its matrices are stored as), and per layer a digit e + 4 for each column.
"""

import hashlib
import json
from dataclasses import dataclass, fields
from importlib import resources

import torch

MOST = 3  # exponents are -MOST .. MOST
ZERO = 4  # the digit of exponent 0


@dataclass(frozen=True)
class LayerBalance:
    """Factors (float32 powers of two) of one layer's columns."""

    qkv: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [hidden]
    down: torch.Tensor  # [intermediate]
    values: torch.Tensor  # [kv_heads * head_dim], columns of the attention's output; shared by the heads of a group

    def attention_out(self, config):
        """[heads * head_dim]: ``values`` for every query head."""
        heads = self.values.view(config.kv_heads, 1, config.head_dim)
        return heads.expand(-1, config.heads // config.kv_heads, -1).reshape(-1)


def fingerprint(norms):
    """Of a model, from its norm weights in order (float32 vectors)."""
    digest = hashlib.sha256()
    for norm in norms:
        digest.update(bytes(norm.contiguous().view(torch.uint8).tolist()))
    return digest.hexdigest()


def find_balance(norms, config):
    """The balance of every layer, or None for a model that none was measured for."""
    known = json.loads(resources.files("specloop").joinpath("data/balance.json").read_text(encoding="ascii"))
    found = known.get(fingerprint(norms))
    return None if found is None else [_decoded(layer, config) for layer in found["layers"]]


def encoded(layer):
    """A layer as ``data/balance.json`` holds it."""
    digits = {f.name: getattr(layer, f.name).log2().int() + ZERO for f in fields(layer)}
    return {name: "".join(map(str, values.tolist())) for name, values in digits.items()}


def _decoded(layer, config):
    sizes = {"qkv": config.hidden, "gate_up": config.hidden, "down": config.intermediate}
    sizes["values"] = config.kv_heads * config.head_dim
    for name, size in sizes.items():
        if len(layer[name]) != size:
            raise ValueError(f"balance: expected {size} digits for {name}, got {len(layer[name])}")
    return LayerBalance(**{name: 2.0 ** torch.tensor([int(d) - ZERO for d in layer[name]]) for name in sizes})
