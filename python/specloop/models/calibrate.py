"""Measures a model's activations and chooses its balance (balance.py).

    python -m specloop.models.calibrate [--out FILE]    # SmolLM2-135M-Instruct, as shipped in data/balance.json

The model answers shipped prompts that bench/bench_fidelity.py does not use; the mean squares of what each matrix is
multiplied with, and of the matrix's columns, give the exponents: round(log2(sqrt(rms of x / rms of the column))), less
the mean over a scale group, since a factor that a whole group shares changes nothing.
"""

import argparse
import json
from pathlib import Path

import specdec_kernels as sk

from .balance import MOST, LayerBalance, encoded, fingerprint
from .blueprint import group_size
from .llama import Llama


class Observed(Llama):
    """A float32 model that sums up the squares of what its matrices are multiplied with, one operation at a time."""

    def __init__(self, model):
        super().__init__(model.config, model.weights, context=model.context, kv="f32")
        self.squares = [dict.fromkeys(("qkv", "attention_out", "gate_up", "down"), 0) for _ in model.weights.layers]

    def _steps(self, r, blocks):
        eps, h, weights = self.config.rms_eps, r.hidden, self.weights
        for layer, kv, squares in zip(weights.layers, self._pool.layers, self.squares, strict=True):

            def product(name, x, layer=layer, squares=squares):
                squares[name] += x.double().square().sum(0)
                return sk.linear_f32(x, getattr(layer, name))

            r.qkv.copy_(product("qkv", sk.rms_norm(h, layer.attention_norm, eps)))
            self._attend(r, kv, False)
            h = h + product("attention_out", r.attended)
            gate_up = product("gate_up", sk.rms_norm(h, layer.mlp_norm, eps))
            h = h + product("down", sk.silu_mul(gate_up))
        if len(r.logits):
            r.logits.copy_(sk.linear_f32(sk.rms_norm(h[-len(r.logits) :], weights.norm, eps), weights.head))


def calibrate(model, texts):
    """The balance of every layer of a float32 model, from its activations on ``texts`` (lists of ids)."""
    config, observed = model.config, Observed(model)
    for ids in texts:
        observed.forward(ids, observed.new_cache(len(ids)), last=0)
    layers = []
    for layer, squares in zip(model.weights.layers, observed.squares, strict=True):
        exponents = {name: _exponents(squares[name], getattr(layer, name)) for name in squares}
        # A column of v feeds one column per query head of its group; they share the mean.
        shared = exponents.pop("attention_out").view(config.kv_heads, -1, config.head_dim).mean(1).flatten()
        powers = {name: 2.0 ** e.round().float() for name, e in {**exponents, "values": shared}.items()}
        layers.append(LayerBalance(**powers))
    return layers


def _exponents(squares, matrix):
    x = (squares / squares.mean()).clamp(min=1e-12)
    w = matrix.double().square().mean(0).clamp(min=1e-18)
    exponents = (x / w).log2() / 4
    groups = exponents.view(-1, group_size(len(exponents)))
    return (groups - groups.mean(1, keepdim=True)).flatten().clamp(-MOST, MOST)


def main():
    from ..measure import load_prompts
    from ..options import check_request
    from ..pair import load

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "data" / "balance.json")
    options = parser.parse_args()
    pair = load("smollm2", dtype="f32", kv="f32", draft="none")
    model, texts = pair.model, []
    for category in dict.fromkeys(p["category"] for p in load_prompts()):
        for entry in load_prompts([category])[2:]:
            answer = pair.generate(entry["prompt"], draft="none", max_new_tokens=40)
            texts.append(pair.encode(entry["prompt"], check_request()) + answer.tokens)
    weights = model.weights
    norms = [norm for layer in weights.layers for norm in (layer.attention_norm, layer.mlp_norm)] + [weights.norm]
    entry = {"name": "SmolLM2-135M-Instruct", "layers": [encoded(layer) for layer in calibrate(model, texts)]}
    options.out.write_text(json.dumps({fingerprint(norms): entry}, indent=1) + "\n", encoding="ascii")
    print(f"wrote {options.out} from {sum(map(len, texts))} tokens of {len(texts)} answers")


if __name__ == "__main__":
    main()
