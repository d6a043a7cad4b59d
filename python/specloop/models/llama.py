"""A llama-family decoder on our kernels: one pass reads every weight once for all its rows.

Each row of a pass is bit-equal to the row computed alone, so text decoded with speculation equals text decoded without.
That rests on kernels whose rows are independent (rms norm, quantise, linear, attention with a fixed key order) and on
buffers that are reused but never shared between rows. Activations are float32 between kernels; int8 models quantise
them in groups inside the kernels (contract, int8).
"""

import functools
import weakref

import torch

import specdec_kernels as sk

from . import rope
from .buffers import CHUNK, REPEATED, Buffers, Rows, needs
from .cache import PAGE, KVCache, Pages, page_nbytes
from .config import LlamaConfig
from .weights import Head


def linear(x, weight, out):
    return (sk.linear_int8 if isinstance(weight, sk.Int8Weight) else sk.linear_f32)(x, weight, out=out)


class Llama:
    """``weights``: Resident or Streamed (weights.py). ``kv``: see ``KVCache``. ``rows``: most rows of one pass."""

    def __init__(self, config: LlamaConfig, weights, *, context, kv="int8", eos_ids=(), name="llama", rows=CHUNK):
        self.config = config
        self.weights = weights
        self.name = name
        self.context = min(context, config.context)
        self.kv = kv
        self._rotated_keys = kv == "int8" and config.head_dim & (config.head_dim - 1) == 0
        self.vocab_size = config.vocab
        self.eos_ids = frozenset(eos_ids)
        self.device, self.device_type = weights.device, weights.device.type
        self._chunk = rows
        self._buffers = Buffers(config, rows, self.device)
        self._rows = {}
        self._spare = []  # pages of a cache that is gone, with the passes captured on them
        self._pages = weakref.WeakSet()  # all that there are
        self._closed = False
        self._logits = torch.empty(REPEATED, config.vocab, device=self.device)
        self._rotary = rope.table(config, self.context).to(self.device)
        self._slots = torch.arange(self.context, dtype=torch.int64, device=self.device)

    def to(self, device):
        """The same model on ``device``; itself if it is there already."""
        if torch.empty(0, device=device).device == self.device:
            return self
        return Llama(
            self.config,
            self.weights.to(device),
            context=self.context,
            kv=self.kv,
            eos_ids=self.eos_ids,
            name=self.name,
            rows=self._chunk,
        )

    def new_cache(self, capacity=None):
        """A cache for ``capacity`` tokens; it takes over the pages of one that is gone, warm as they are."""
        try:
            pages = self._spare.pop()
        except IndexError:
            pages = Pages(self.config, self.context, self.kv, self.device)
            self._pages.add(pages)
        return KVCache(pages, min(capacity or self.context, self.context), self._keep)

    def _keep(self, pages):
        if not self._spare and not self._closed:
            self._spare.append(pages)

    def forward(self, tokens, cache, *, last):
        """Appends ``tokens`` to the cache and returns float32 logits [last, vocab] of the last ``last`` positions.

        ``last`` 0 fills the cache and skips the head.
        The result is valid until the next call. Raises ValueError if the tokens don't fit or an id is out of range.
        """
        n = len(tokens)
        if not 0 <= last <= n:
            raise ValueError(f"last: expected 0 to {n} (the number of tokens), got {last}")
        if cache.length + n > cache.capacity:
            raise ValueError(f"tokens: expected at most {cache.capacity - cache.length} (room in the cache), got {n}")
        if n and (min(tokens) < 0 or max(tokens) >= self.vocab_size):
            raise ValueError(f"tokens: expected ids in [0, {self.vocab_size}), got {min(tokens)} to {max(tokens)}")
        ids = torch.tensor(tokens, dtype=torch.int64, device=self.device)
        logits = self._logits[:last] if last <= REPEATED else self._logits.new_empty(last, self.vocab_size)
        first = n - last  # the first position whose logits are wanted
        for start in range(0, n, self._chunk):
            stop = min(start + self._chunk, n)
            wanted = logits[max(start, first) - first : stop - first] if stop > first else None
            self._pass(ids[start:stop], stop - start, cache, wanted)
        return logits

    def _pass(self, ids, n, cache, logits):
        """One pass over the weights for the ``n`` ids; logits (or None) takes the last rows."""
        start, pages = cache.length, cache.pages
        r = self._rows.get(n) or Rows(self._buffers, self.config, n)
        r.rotary.copy_(self._rotary[start : start + n])
        r.slots.copy_(self._slots[start : start + n])
        pages.lengths.fill_(start + n)
        self.weights.embed(ids, r.hidden)
        if n <= REPEATED:
            self._rows[n] = r
        context = n, 0 if logits is None else logits.shape[0], torch.get_num_threads(), sk.forced_backend()
        for key, blocks in self.weights.pieces(logits is not None):
            again = pages.passes.get((*context, key)) if n <= REPEATED and key is not None else None
            if again is not None:
                again()
                continue
            steps = functools.partial(self._steps, r, pages, logits, blocks)
            if n > REPEATED or key is None:
                steps()
            else:
                pages.passes[(*context, key)] = sk.capture(steps, self.device)
        cache.length += n

    def _steps(self, r, pages, logits, blocks):
        for index, block in blocks:
            if isinstance(block, Head):
                self._head(r, logits, block)
            else:
                self._layer(r, pages, index, block)

    def _layer(self, r, pages, index, layer):
        """Four calls."""
        eps, add = self.config.rms_eps, {"residual": r.hidden, "residual_out": r.hidden}
        x, before = (r.delta, add) if index else (r.hidden, {})  # the first layer has nothing to add
        sk.rms_norm_linear(x, layer.attention_norm, eps, layer.qkv, bias=layer.qkv_bias, out=r.qkv, **before)
        for norm, heads in zip((layer.q_norm, layer.k_norm), r.norms_of_heads, strict=False):
            for values, normed in heads:
                sk.rms_norm(values, norm, eps, out=normed)
        sk.rope_attend(
            r.q, r.k, r.v, r.cos, r.sin, *pages.layers[index], r.slots, pages.table, pages.lengths,
            hadamard=self._rotated_keys, out=r.attended_heads,
        )  # fmt: skip
        linear(r.attended, layer.attention_out, out=r.mixed)
        sk.gated_mlp(r.mixed, layer.mlp_norm, eps, layer.gate_up, layer.down, out=r.delta, **add)

    def _head(self, r, logits, head):
        """Logits of the last rows: one call for a whole head, the norm and one call per part for one in parts."""
        eps, last = self.config.rms_eps, slice(r.hidden.shape[0] - logits.shape[0], None)
        hidden = r.hidden[last]
        add = {"residual": hidden, "residual_out": hidden}
        out = logits[:, head.start : head.stop]
        if head.norm is not None and out.shape[1] == self.vocab_size:
            sk.rms_norm_linear(r.delta[last], head.norm, eps, head.weight, out=out, **add)
            return
        if head.norm is not None:
            sk.rms_norm(r.delta[last], head.norm, eps, out=r.normed[last], **add)
        linear(r.normed[last], head.weight, out=out)

    @property
    def streams(self):
        """Whether a pass reads weights from a file."""
        return self.weights.streams

    def close(self):
        """Gives back the weights, with their files and threads; the model can't be used any more."""
        self._closed = True
        self.drop_spare()
        self._forget_passes()
        self.weights.close()

    @property
    def nbytes(self):
        """Bytes of weights in memory (a tied head counted once)."""
        return self.weights.nbytes

    @property
    def weights_nbytes(self):
        """Bytes of all weights, streamed ones with them."""
        return self.weights.all_nbytes

    # What follows is for memory that runs short (pressure.py).

    @property
    def budget(self):
        """Bytes for weights, caches and buffers, or None."""
        return self.weights.budget

    @property
    def memory_nbytes(self):
        """What it takes besides the caches in use: weights, workspace, logits, spare pages."""

        fixed = needs(self.config, kv=self.kv, context=self.context, rows=self._chunk)
        return self.weights.memory_nbytes + self.spare_nbytes + fixed["workspace"] + fixed["logits"]

    @property
    def spare_nbytes(self):
        """Of pages that wait for the next cache."""
        return sum(pages.nbytes for pages in self._spare)

    def cache_nbytes(self, capacity):
        """Of a cache for so many tokens, whose pages no other cache had before."""
        return -(-min(capacity, self.context) // PAGE) * page_nbytes(self.config, self.kv)

    def drop_spare(self):
        """Frees the pages that wait for the next cache. Returns their bytes."""
        freed = self.spare_nbytes
        self._spare.clear()
        return freed

    def drop_slot(self):
        """Frees a slot of weights that stream, if there is one to spare. Returns its bytes."""
        freed = self.weights.drop_slot()
        if freed:
            self._forget_passes()
        return freed

    def drop_block(self):
        """Lets a resident block of weights that stream go. Returns its bytes."""
        freed = self.weights.drop_block()
        if freed:
            self._forget_passes()  # they keep the weights that they use
        return freed

    def grow(self):
        """Takes all of its budget again, after others had a part of it."""
        self._forget_passes()
        self.weights.grow()

    def _forget_passes(self):
        for pages in self._pages:
            pages.passes.clear()
