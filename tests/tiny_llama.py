"""A small random llama for tests: once on our kernels, once as twenty lines of float64 to check by eye."""

import torch

import specdec_kernels as sk
from specloop.models.blueprint import int8_form
from specloop.models.config import LlamaConfig
from specloop.models.llama import Llama
from specloop.models.weights import Layer, Resident

CONFIG = LlamaConfig(
    layers=3, hidden=96, intermediate=160, heads=6, kv_heads=2, head_dim=16, vocab=203, context=512, rope_theta=1e4,
    rms_eps=1e-5,
)  # fmt: skip


def weights(config=CONFIG, seed=0):
    g = torch.Generator().manual_seed(seed)

    def matrix(n, k):
        return torch.randn(n, k, generator=g) * k**-0.5

    def norm():
        return 1 + 0.1 * torch.randn(c.hidden, generator=g)

    c = config
    attention, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    layers = [
        Layer(
            attention_norm=norm(),
            qkv=matrix(attention + 2 * kv, c.hidden),
            attention_out=matrix(c.hidden, attention),
            mlp_norm=norm(),
            gate_up=matrix(2 * c.intermediate, c.hidden),
            down=matrix(c.hidden, c.intermediate),
        )
        for _ in range(c.layers)
    ]
    return matrix(c.vocab, c.hidden) * 3, layers, norm()


def build(dtype="int8", *, kv=None, tied=True, context=256, config=CONFIG, seed=0):
    """``kv`` defaults to ``dtype``."""
    embedding, layers, norm = weights(config, seed)
    head = embedding if tied else weights(config, seed + 1)[0]
    if dtype == "int8":

        def pack(w):
            group, rotated = int8_form(w.shape[1])
            return sk.pack_int8(w, group_size=group, rotate=rotated)

        packed = pack(embedding)
        head = packed if tied else pack(head)
        embedding = packed
        layers = [
            Layer(**{name: pack(w) if w.dim() == 2 else w for name, w in layer.parts().items()}) for layer in layers
        ]
    parts = Resident(embedding, layers, norm, head)
    return Llama(config, parts, context=context, kv=kv or dtype, eos_ids=(2,), name="tiny")


def plain_float64(model, tokens):
    """Logits [len(tokens), vocab] of a float32 model by textbook formulas in float64."""
    c = model.config
    double = lambda t: t.double()
    x = double(model.weights.embedding)[torch.tensor(tokens)]
    n, group = len(tokens), c.heads // c.kv_heads
    angle = torch.arange(n)[:, None] * c.rope_theta ** -(
        torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim
    )
    cos, sin = torch.cat([angle, angle], 1).cos(), torch.cat([angle, angle], 1).sin()
    rms = lambda h, w: h / (h.square().mean(-1, keepdim=True) + c.rms_eps).sqrt() * double(w)
    turn = lambda t: t * cos + torch.cat([-t[..., c.head_dim // 2 :], t[..., : c.head_dim // 2]], -1) * sin
    split = [c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim]
    for layer in model.weights.layers:
        q, k, v = (
            part.unflatten(1, (-1, c.head_dim)).transpose(0, 1)
            for part in (rms(x, layer.attention_norm) @ double(layer.qkv).T).split(split, 1)
        )
        k, v = turn(k).repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = turn(q) @ k.transpose(1, 2) / c.head_dim**0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        x = x + (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ double(layer.attention_out).T
        gate, up = (rms(x, layer.mlp_norm) @ double(layer.gate_up).T).chunk(2, 1)
        x = x + (torch.nn.functional.silu(gate) * up) @ double(layer.down).T
    return rms(x, model.weights.norm) @ double(model.weights.head).T
