"""The drafts as torch modules, for training: a feature head, and a model of its own.

Weights are float32; matrix products run in ``compute`` (bfloat16, say), everything between them in float32. Names and
fused layouts are those of models/weights.py, so that writing a draft (export.py) only packs them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..errors import OptionError
from ..models import rope
from ..models.config import LlamaConfig
from .attention import Span, attend

WIDTH, INNER = 32, 64  # steps of a model's own width and inner width, and the least of them


class Layer(nn.Module):
    """A llama layer: attention norm, q, k and v in one matrix, gate and up in one."""

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        attention, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        empty = lambda *shape: nn.Parameter(torch.empty(*shape))
        self.attention_norm = nn.Parameter(torch.ones(c.hidden))
        self.qkv = empty(attention + 2 * kv, c.hidden)
        self.attention_out = empty(c.hidden, attention)
        self.mlp_norm = nn.Parameter(torch.ones(c.hidden))
        self.gate_up = empty(2 * c.intermediate, c.hidden)
        self.down = empty(c.hidden, c.intermediate)

    def queries(self, x, rotary, product):
        """Rotated, [rows, heads, D]; ``x`` is normed."""
        return turn(self._heads(product(x, self.qkv[: self.config.heads * self.config.head_dim])), rotary)

    def keys_values(self, x, rotary, product):
        """(rotated keys, values), [rows, key heads, D] each; ``x`` is normed."""
        k, v = self._heads(product(x, self.qkv[self.config.heads * self.config.head_dim :])).chunk(2, 1)
        return turn(k, rotary), v

    def mix(self, x, attended, product):
        """What comes behind attention."""
        x = x + product(attended, self.attention_out)
        gate, up = product(self.norm(x, self.mlp_norm), self.gate_up, float32=False).chunk(2, 1)
        return x + product(F.silu(gate) * up, self.down)

    def norm(self, x, weight):
        return F.rms_norm(x, weight.shape, weight, self.config.rms_eps)

    def _heads(self, x):
        return x.unflatten(1, (-1, self.config.head_dim))


def turn(x, rotary):
    """Heads [rows, heads, D] turned by (cos, sin) [rows, D / 2]."""
    cos, sin = (t[:, None] for t in rotary)
    a, b = x.chunk(2, 2)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], 2)


class Draft(nn.Module):
    """What both kinds share. ``head`` [V', hidden] holds the rows ``draft_ids``."""

    def __init__(self, config, draft_ids, positions, compute):
        super().__init__()
        self.config, self.compute = config, compute
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.Parameter(torch.ones(config.hidden))
        self.head = nn.Parameter(torch.empty(len(draft_ids), config.hidden))
        self.register_buffer("draft_ids", torch.as_tensor(draft_ids, dtype=torch.int64), persistent=False)
        self.checkpointing = False
        self._turns(positions)

    def reach(self, positions):
        """From now on it takes texts that have so many positions, or more."""
        if positions > len(self.cos):
            self._turns(positions)

    def _turns(self, positions):
        cos, sin = rope.table(self.config, positions).to(self.head.device).chunk(2, 1)
        self.register_buffer("cos", cos.contiguous(), persistent=False)
        self.register_buffer("sin", sin.contiguous(), persistent=False)

    def product(self, x, weight, float32=True):
        y = F.linear(x.to(self.compute), weight.to(self.compute))
        return y.float() if float32 else y

    def rotary(self, positions):
        return self.cos[positions], self.sin[positions]

    def normed(self, x, weight):
        return F.rms_norm(x, weight.shape, weight, self.config.rms_eps)

    def _saving(self, function, *inputs):
        """The function, whose intermediate values are made again for its gradient where that is wanted."""
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(function, *inputs, use_reentrant=False)
        return function(*inputs)


class FeatureHead(Draft):
    """One layer on the target's features.

        h = fc . [rms_norm(embedding of x_p) ; f],  f the feature of p - 1: the target's, or where it has not been yet,
        this module's own;  g = rms_norm(layer(h)),  logits = head . g

    ``target_embedding``: the target's, float32 [vocab, d], which is not trained and belongs to no file.
    """

    def __init__(self, config, draft_ids, target_embedding, *, positions, compute=torch.float32):
        super().__init__(config, draft_ids, positions, compute)
        self.fc = nn.Parameter(torch.empty(config.hidden, 2 * config.hidden))
        self.embedding_norm = nn.Parameter(torch.ones(config.hidden))
        self.register_buffer("target_embedding", target_embedding, persistent=False)

    def join(self, embedded, feature):
        return self.product(torch.cat([self.normed(embedded, self.embedding_norm), feature], 1), self.fc)

    def forward(self, batch, depths):
        """Its normed states, float32 [depths, chains, d]. Chain c at depth i is at its start's position + i, so that
        its state is held against the answer's row c + i (``Batch``).
        """
        embedded = self.target_embedding[batch.ids]
        first = self._saving(self._first, embedded, batch.before, batch)
        state, keys, values = first
        states, own = [state], []
        for depth in range(1, depths):
            state, k, v = self._saving(self._next, embedded, state, keys, values, own, batch, depth)
            own = [*own, (k, v)]
            states.append(state)
        return torch.stack(states)

    def _first(self, embedded, before, batch):
        (layer,) = self.layers
        h = self.join(embedded, before)
        n, rotary = layer.norm(h, layer.attention_norm), self.rotary(batch.positions)
        k, v = layer.keys_values(n, rotary, self.product)
        starts = batch.starts
        q = layer.queries(n[starts], tuple(t[starts] for t in rotary), self.product)
        return self._rest(h[starts], q, k, v, [], batch.spans), k, v

    def _next(self, embedded, feature, keys, values, own, batch, depth):
        (layer,) = self.layers
        rows = (batch.starts + depth).clamp(max=len(batch.ids) - 1)  # behind a text's end nothing counts
        h = self.join(embedded[rows], feature)
        n = layer.norm(h, layer.attention_norm)
        rotary = self.rotary(batch.positions[batch.starts] + depth)
        k, v = layer.keys_values(n, rotary, self.product)
        q = layer.queries(n, rotary, self.product)
        return self._rest(h, q, keys, values, [*own, (k, v)], batch.spans), k, v

    def _rest(self, h, q, k, v, own, spans):
        (layer,) = self.layers
        attended = attend(q, k, v, own, spans, self.compute)
        return self.normed(layer.mix(h, attended, self.product), self.norm)


class Standalone(Draft):
    """A small llama of its own, with an embedding of all ids and a head of some."""

    def __init__(self, config, draft_ids, *, positions, compute=torch.float32):
        super().__init__(config, draft_ids, positions, compute)
        self.embedding = nn.Parameter(torch.empty(config.vocab, config.hidden))

    def forward(self, batch, depths=1):
        """Its normed states, float32 [1, chains, d]: no feature could be its own, so there is one depth."""
        x = F.embedding(batch.ids, self.embedding)
        rotary = self.rotary(batch.positions)
        whole = [Span(span.rows, span.rows, 0) for span in batch.spans]
        for layer in self.layers[:-1]:
            x = self._saving(self._layer, layer, x, rotary, None, whole)
        x = self._saving(self._layer, self.layers[-1], x, rotary, batch.starts, batch.spans)
        return self.normed(x, self.norm)[None]

    def _layer(self, layer, x, rotary, wanted, spans):
        n = layer.norm(x, layer.attention_norm)
        k, v = layer.keys_values(n, rotary, self.product)
        if wanted is not None:
            x, n, rotary = x[wanted], n[wanted], tuple(t[wanted] for t in rotary)
        q = layer.queries(n, rotary, self.product)
        return layer.mix(x, attend(q, k, v, [], spans, self.compute), self.product)


def feature_config(target: LlamaConfig) -> LlamaConfig:
    """One layer like the target's, without what only some members of the family have."""
    return replace(target, layers=1, architecture="llama", qkv_bias=False, qk_norm=False, tied=False, draft_ids=None)


def standalone_config(target: LlamaConfig, parameters: int, columns: int) -> LlamaConfig:
    """About ``parameters`` in all, embedding included: four layers, wide rather than deep, since a thin draft's time
    goes into calls, not into bytes. The width takes at most 85 % of them for embedding and head. Raises OptionError
    where not even the thinnest has so few.
    """
    layers, rows = 4, target.vocab + columns

    def heads_of(hidden):
        """(heads, key heads, size of a head, parameters of a layer's attention)"""
        size = 64 if hidden % 64 == 0 else 32
        heads = hidden // size
        kv_heads = next(n for n in (heads // 3, heads // 2, 1) if n and heads % n == 0)
        return heads, kv_heads, size, 2 * hidden * (heads + kv_heads) * size

    def least_of(hidden):
        """All parameters, at least."""
        return rows * hidden + layers * (heads_of(hidden)[3] + 3 * hidden * INNER)

    if parameters < least_of(WIDTH):
        wanted = f"at least {least_of(WIDTH)} for {target.vocab} ids, {columns} of which it can say"
        raise OptionError(f"parameters: expected {wanted}, got {parameters}")
    hidden = max(WIDTH, int(0.85 * parameters / rows) // WIDTH * WIDTH)
    while least_of(hidden) > parameters:
        hidden -= WIDTH
    heads, kv_heads, head_dim, attention = heads_of(hidden)
    room = (parameters - rows * hidden) / layers - attention
    intermediate = max(INNER, round(room / (3 * hidden) / INNER) * INNER)
    return LlamaConfig(
        layers=layers, hidden=hidden, intermediate=intermediate, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        vocab=target.vocab, context=target.context, rope_theta=target.rope_theta, rms_eps=target.rms_eps, tied=False,
    )  # fmt: skip
