"""Draft files for tiny targets: random weights of the right shapes, and the formula by eye."""

from dataclasses import replace

import torch

from specloop.fingerprint import fingerprint
from specloop.formats.draft_file import packed, write_draft
from specloop.layout import layer_shapes
from specloop.models.feature_head import FeatureHead, HeadWeights
from specloop.models.weights import Layer
from tiny_llama import CONFIG
from versions import Vocabulary

CUT = [i for i in range(CONFIG.vocab) if i % 3 != 1 or i == 2]  # with the id that ends a text


def draft_config(config=CONFIG, **changes):
    return replace(config, layers=1, tied=False, **changes)


def random_weights(kind, config, columns, seed=0):
    """float32, by the names of a file."""
    g = torch.Generator().manual_seed(seed)
    matrix = lambda n, k: torch.randn(n, k, generator=g) * k**-0.5
    vector = lambda n: 1 + 0.1 * torch.randn(n, generator=g)
    d = config.hidden
    made = {"norm": vector(d), "head": matrix(columns, d) * 3}
    if kind == "feature":
        made |= {"fc": matrix(d, 2 * d), "embedding_norm": vector(d)}
    else:
        made["embedding"] = matrix(config.vocab, d) * 3
    for i in range(config.layers):
        for name, shape in layer_shapes(config).items():
            made[f"layer.{i}.{name}"] = matrix(*shape) if len(shape) == 2 else vector(*shape)
    return made


def in_dtype(weights, dtype):
    return {n: packed(w) if w.dim() == 2 and dtype == "int8" else w for n, w in weights.items()}


def write(path, target, *, kind="feature", dtype="int8", ids=CUT, seed=0, config=None, tokenizer=None, **more):
    """A draft file for a tiny target (a model)."""
    tokenizer = tokenizer or Vocabulary()
    config = config or draft_config(target.config)
    weights = in_dtype(random_weights(kind, config, len(ids), seed), dtype)
    about = {"target": {"name": "tiny", "fingerprint": fingerprint(target, tokenizer)}}
    about |= {"vocabulary": tokenizer.fingerprint, "recipe": {"seed": seed}}
    return write_draft(path, kind=kind, config=config, draft_ids=ids, weights=weights, **about | more)


def head_on(target, *, dtype="f32", ids=CUT, seed=0, context=256, kv=None):
    """A random head on a target, without a file."""
    config = replace(draft_config(target.config), draft_ids=tuple(ids))
    w = in_dtype(random_weights("feature", config, len(ids), seed), dtype)
    layer = Layer(**{name: w[f"layer.0.{name}"] for name in layer_shapes(config)})
    weights = HeadWeights(target.weights.embed, w["embedding_norm"], w["fc"], [layer], w["norm"], w["head"])
    return FeatureHead(config, weights, context=context, kv=kv or dtype, eos_ids=target.eos_ids, name="head")


def plain_rows(head, tokens, features):
    """Logits [n, V'] and own features [n, d] of a float32 head, by textbook formulas in float64.

    ``features`` [n or fewer, d]: of the target; behind them the head's own, in bfloat16 as caches keep them, stand in.
    """
    c, w = head.config, head.weights
    (layer,) = w.layers
    double = lambda t: t.double()
    rms = lambda h, v: h / (h.square().mean(-1, keepdim=True) + c.rms_eps).sqrt() * double(v)
    embedded = torch.empty(len(tokens), c.hidden)
    w.embed(torch.tensor(tokens), embedded)
    frequency = c.rope_theta ** -(torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim)

    def turn(t, p):
        cos, sin = ((torch.cat([p * frequency] * 2)).cos(), (torch.cat([p * frequency] * 2)).sin())
        half = c.head_dim // 2
        return t * cos + torch.cat([-t[..., half:], t[..., :half]], -1) * sin

    keys, values, own, logits = [], [], [], []
    for p in range(len(tokens)):
        given = torch.zeros(c.hidden) if p == 0 else features[p - 1] if p - 1 < len(features) else own[-1].bfloat16()
        h = double(w.fc) @ torch.cat([rms(double(embedded[p]), w.embedding_norm), given.double()])
        split = [c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim]
        q, k, v = (t.view(-1, c.head_dim) for t in (double(layer.qkv) @ rms(h, layer.attention_norm)).split(split))
        keys.append(turn(k, p)), values.append(v)
        group = c.heads // c.kv_heads
        k, v = (torch.stack(t).repeat_interleave(group, 1) for t in (keys, values))  # [p + 1, heads, D]
        scores = (torch.einsum("hd,phd->hp", turn(q, p), k) / c.head_dim**0.5).softmax(-1)
        h = h + double(layer.attention_out) @ torch.einsum("hp,phd->hd", scores, v).flatten()
        gate, up = (double(layer.gate_up) @ rms(h, layer.mlp_norm)).chunk(2)
        h = h + double(layer.down) @ (torch.nn.functional.silu(gate) * up)
        own.append(rms(h, w.norm))
        logits.append(double(w.head) @ own[-1])
    return torch.stack(logits), torch.stack(own)
