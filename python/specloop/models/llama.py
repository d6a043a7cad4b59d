"""A llama-family decoder on our kernels: one pass reads every weight once for all its rows.

Each row of a pass is bit-equal to the row computed alone, so text decoded with speculation equals text decoded without.
That rests on kernels whose rows are independent (rms norm, quantise, linear, attention with a fixed key order) and on
buffers that are reused but never shared between rows. Activations are float32 between kernels; int8 models quantise
them in groups inside the kernels (contract, int8).
"""

import functools

import torch

import specdec_kernels as sk
from specdec_kernels.guesses import Guesses

from . import rope
from .base import Part, check_parts
from .buffers import CHUNK, REPEATED, SHARED, Buffers, Rows, needs
from .cache import KVCache
from .config import LlamaConfig
from .passes import Layout, Span, cut, spans
from .pool import PAGE, Pool, page_nbytes
from .tree import further_pages
from .weights import Head

SHAPES = 64  # of passes that are kept captured; those that were used last


def linear(x, weight, out):
    return (sk.linear_int8 if isinstance(weight, sk.Int8Weight) else sk.linear_f32)(x, weight, out=out)


class Llama:
    """``weights``: Resident or Streamed (weights.py). ``kv``: see ``Pool``. ``rows``: most rows of one pass."""

    reads_features = False

    def __init__(self, config: LlamaConfig, weights, *, context, kv="int8", eos_ids=(), name="llama", rows=CHUNK):
        self.config = config
        self.weights = weights
        self.name = name
        self.context = min(context, config.context)
        self.kv = kv
        self._rotated_keys = kv == "int8" and config.head_dim & (config.head_dim - 1) == 0
        self.vocab_size, self.draft_ids = config.vocab, config.draft_ids
        self.feature_size = config.hidden
        self.eos_ids = frozenset(eos_ids)
        self.device, self.device_type = weights.device, weights.device.type
        self._chunk = rows
        self._buffers = Buffers(config, rows, self.device)
        self._shapes = {}  # of passes -> Rows, those used last at the end
        self._guesses = None  # (what they were made for, Guesses, the Rows that they are made on)
        self._logits = torch.empty(REPEATED, config.columns, device=self.device)
        self._rotary = rope.table(config, self.context).to(self.device)
        pages = self._width = -(-self.context // PAGE)  # of a whole context
        self._pool = Pool(config, kv, self.device, keep=pages)
        self._moves = 0  # of the pool

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

    def new_cache(self, capacity=None, features=False):
        """A cache for ``capacity`` tokens, which also keeps their features if asked to (base.py).

        Raises MemoryError if there is no room for it.
        """
        capacity = min(capacity or self.context, self.context)
        pages, size = self._pool.take(-(-capacity // PAGE)), self.feature_size if features else None
        return KVCache(self._pool, pages, capacity, self._width, self.device, size)

    def forward(self, tokens, cache, *, last):
        """Appends ``tokens`` to the cache and returns float32 logits [last, vocab] of the last ``last`` positions.

        ``last`` 0 fills the cache and skips the head.
        The result is valid until the next call. Raises ValueError if the tokens don't fit or an id is out of range.
        """
        return self.forward_parts([Part(cache, tokens, last)])

    def forward_parts(self, parts):
        """Several requests, chains or trees of drafts, in one pass: see :func:`specloop.models.base.forward_parts`.

        More than ``rows`` rows take several passes; a tree has to fit into one.
        """
        check_parts(parts)
        for cache, tokens, *_ in parts:
            if len(tokens) and (min(tokens) < 0 or max(tokens) >= self.vocab_size):
                raise ValueError(f"tokens: expected ids in [0, {self.vocab_size}), got {min(tokens)} to {max(tokens)}")
            cache.forget_tree()
        total, logits, row = sum(part.last for part in parts), None, 0
        for pieces in cut(parts, self._chunk):
            rows, count = self._pass(pieces), sum(piece.last for piece in pieces)
            if count == total:
                logits = rows
            elif count:
                logits = rows.new_empty(total, self.config.columns) if logits is None else logits
                logits[row : row + count] = rows
                row += count
        return self._logits[:0] if logits is None else logits

    def guesses(self, cache, ids, columns):
        """A :class:`specdec_kernels.guesses.Guesses` that goes on from the last row of ``cache``, whose logits the last
        pass has left: the first ``columns`` of them stand for ``ids`` (int32), or are ids (None). Whoever makes passes
        with it tells the cache (``advance``).

        None where a pass can't be made without Python: off the CPU or without compiled kernels, with weights that
        stream, or with an embedding that is not one int8 matrix in memory. It is valid until the next pass is made
        here.
        """
        self._follow_pool()
        key = None if ids is None else ids.data_ptr(), columns, torch.get_num_threads(), sk.forced_backend()
        if self._guesses is None or self._guesses[0] != key:
            self._guesses = key, *self._new_guesses(ids, columns)
        _, made, r = self._guesses
        if made is None or not made.is_complete or self._reads(cache) is None:
            return None
        r.take_table(0, cache.table)
        return made

    def _new_guesses(self, ids, columns):
        if self.device_type != "cpu" or sk.native.cpu is None or self.weights.streams:
            return None, None
        if not self.weights.embeds_in_place or sk.forced_backend() not in (None, "cpu"):
            return None, None
        layout = Layout([Span([0], 0, 1, None, [0], [])])
        r = self._new_rows(layout, self._logits[:1], self.reads_features)
        (group,) = r.groups
        places = {"id": r.ids, "position": r.positions, "slot": r.slots, "length": group.lengths, "table": group.table}
        tables = {"page": PAGE, "rotary": self._rotary, "turned": r.rotary}
        run = functools.partial(self._one_row, r)
        return Guesses(run, logits=r.logits, columns=columns, ids=ids, **places, **tables, **self._state_of(r)), r

    def _one_row(self, r):
        """All of a pass over one row whose numbers, cosines and sines are there."""
        self.weights.embed(r.ids, r.hidden)
        for _, blocks in self.weights.pieces(True):
            self._steps(r, blocks)

    def _state_of(self, r):
        """What a guess reads of the one before it, besides its id."""
        return {}

    def _reads(self, cache):
        """The cache's features, () where guesses read none; None where they would have to be kept all the same."""
        return () if cache.features is None else None

    def _pass(self, pieces):
        """One pass over the weights; the wanted rows' logits in the pieces' order."""
        layout = Layout([span for piece in pieces for span in spans(piece)])
        featured = any(piece.cache.features is not None for piece in pieces)
        r, key = self._rows(layout, featured)
        r.fill(layout)
        self._rotate(r, layout.spans)
        self._enter(r, key, layout, pieces)
        gathered = layout.in_order
        for block_key, blocks in self.weights.pieces(bool(layout.wanted)):
            if gathered:
                self._make(r, key, block_key, self._steps, blocks)
                continue
            body = [block for block in blocks if not isinstance(block[1], Head)]
            head = blocks[len(body) :]
            if body:
                self._make(r, key, block_key and (block_key, "body"), self._steps, body)
            if head:  # which takes the last rows
                if featured:
                    self._normalise(r)
                    self._keep_features(r, layout, pieces)
                for x in (r.normed,) if featured else (r.hidden, r.delta):
                    x[-len(layout.wanted) :] = x[layout.wanted]
                gathered = True
                self._make(r, key, block_key and (block_key, "head"), self._steps, head)
        if featured and (layout.in_order or not layout.wanted):
            if not layout.wanted:
                self._normalise(r)
            self._keep_features(r, layout, pieces)
        r.seen = True
        for cache, tokens, _, parents in pieces:
            cache.advance(len(tokens) - len(parents or ()))
        return r.logits

    def _rotate(self, r, spans):
        """The cosines and sines of the rows' positions."""
        if len(spans) > 1:
            torch.index_select(self._rotary, 0, r.positions, out=r.rotary)
        else:
            r.rotary.copy_(self._rotary[spans[0].first : spans[0].first + len(spans[0].tokens)])

    def _normalise(self, r):
        """All rows behind the last norm."""
        eps, add = self.config.rms_eps, {"residual": r.hidden, "residual_out": r.hidden}
        sk.rms_norm(r.delta, self.weights.last_norm, eps, out=r.normed, **add)

    @staticmethod
    def _keep_features(r, layout, pieces):
        if len(layout.spans) == 1 and pieces[0].parents is None:
            pieces[0].cache.keep_features(r.normed)
            return
        for piece, chain, nodes in layout.places(pieces):
            if piece.cache.features is not None:
                piece.cache.keep_features(r.normed[chain], r.normed[nodes])

    def _rows(self, layout, featured):
        """The buffers for a pass, and a key of what may be captured on them, or None."""
        self._follow_pool()
        n, wanted = layout.rows, len(layout.wanted)
        repeated = n <= REPEATED or (len(layout.spans) > 1 and wanted and n <= SHARED)
        if repeated and wanted > self._logits.shape[0]:
            self._forget_passes()
            self._logits = self._logits.new_empty(-(-wanted // REPEATED) * REPEATED, self.config.columns)
        key = (*layout.shape, featured, torch.get_num_threads(), sk.forced_backend())
        r = self._shapes.pop(key, None)
        if r is None:
            fits = wanted <= self._logits.shape[0]
            logits = self._logits[:wanted] if fits else self._logits.new_empty(wanted, self.config.columns)
            r = self._new_rows(layout, logits, featured)
        if repeated:
            self._shapes[key] = r
            if len(self._shapes) > SHAPES:
                del self._shapes[next(iter(self._shapes))]
        # One request's shapes come back for sure, those of several once they came back before.
        return r, key if repeated and (r.seen or len(layout.spans) == 1) else None

    def _new_rows(self, layout, logits, featured):
        with torch.inference_mode(False):  # whatever mode the caller is in: another may write to them later
            return Rows(self._buffers, self.config, layout, self._width, logits, featured)

    def _enter(self, r, key, layout, pieces):
        """What the first layer sees of the rows, in ``r.hidden``."""
        self.weights.embed(r.ids, r.hidden)

    def _make(self, r, key, block_key, work, *what):
        """``work(r, *what)``, captured if there are keys for it."""
        again = r.passes.get(block_key)
        if again is not None:
            again()
        elif key is None or block_key is None:
            work(r, *what)
        else:
            r.passes[block_key] = sk.capture(functools.partial(work, r, *what), self.device)

    def _steps(self, r, blocks):
        for index, block in blocks:
            if isinstance(block, Head):
                self._head(r, block)
            else:
                self._layer(r, index, block)

    def _layer(self, r, index, layer):
        """Four calls, where all requests have equally many rows."""
        eps, add = self.config.rms_eps, {"residual": r.hidden, "residual_out": r.hidden}
        x, before = (r.delta, add) if index else (r.hidden, {})  # the first layer has nothing to add
        sk.rms_norm_linear(x, layer.attention_norm, eps, layer.qkv, bias=layer.qkv_bias, out=r.qkv, **before)
        for norm, heads in zip((layer.q_norm, layer.k_norm), r.norms_of_heads, strict=False):
            for values, normed in heads:
                sk.rms_norm(values, norm, eps, out=normed)
        self._attend(r, self._pool.layers[index], self._rotated_keys)
        linear(r.attended, layer.attention_out, out=r.mixed)
        sk.gated_mlp(r.mixed, layer.mlp_norm, eps, layer.gate_up, layer.down, out=r.delta, **add)

    @staticmethod
    def _attend(r, cache, rotated_keys):
        """Writes keys and values to each place where they belong, then attends."""
        new, rotated = (r.k, r.v, r.cos, r.sin, *cache), {"hadamard": rotated_keys}
        for slots in r.copies:
            sk.rope_write_kv_int8(*new, slots, **rotated)
        if len(r.groups) == 1:
            (group,) = r.groups
            sk.rope_attend(r.q, *new, r.slots, group.table, group.lengths, out=r.attended_heads, **rotated)
            return
        sk.rope_write_kv_int8(*new, r.slots, q=r.q, **rotated)
        for q, table, lengths, out in r.groups:
            sk.attend_int8(q, *cache, table, lengths, out=out)

    def _head(self, r, head):
        """Logits of the last rows: one call for a whole head, the norm and one call per part for one in parts.

        Where features are kept all rows are normed; rows that were moved are so already.
        """
        logits, eps = r.logits, self.config.rms_eps
        last = slice(r.hidden.shape[0] - logits.shape[0], None)
        out = logits[:, head.start : head.stop]
        if head.norm is not None and not r.moved_normed:
            rows = slice(None) if r.featured else last
            add = {"residual": r.hidden[rows], "residual_out": r.hidden[rows]}
            if out.shape[1] == self.config.columns and not r.featured:
                sk.rms_norm_linear(r.delta[rows], head.norm, eps, head.weight, out=out, **add)
                return
            sk.rms_norm(r.delta[rows], head.norm, eps, out=r.normed[rows], **add)
        linear(r.normed[last], head.weight, out=out)

    @property
    def streams(self):
        """Whether a pass reads weights from a file."""
        return self.weights.streams

    def close(self):
        """Gives back the weights, with their files and threads; the model can't be used any more."""
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
        more_logits = self._logits.nbytes - fixed["logits"]  # of passes with many rows
        return self.weights.memory_nbytes + self.spare_nbytes + fixed["workspace"] + fixed["logits"] + more_logits

    @property
    def spare_nbytes(self):
        """Of pages that wait for the next cache."""
        return self._pool.spare * self._pool.page_nbytes

    def cache_nbytes(self, capacity, features=False):
        """Of a cache for so many tokens."""
        capacity = min(capacity, self.context)
        kept = 2 * self.feature_size * capacity if features else 0
        return -(-capacity // PAGE) * page_nbytes(self.config, self.kv) + kept

    def tree_nbytes(self, part):
        """Of the pages that a tree's paths need besides the cache's own, while it is judged."""
        chain = len(part.tokens) - len(part.parents)
        return sum(further_pages(part.cache.length, chain, part.parents)) * self._pool.page_nbytes

    def room(self, capacity, also=0):
        """How many more caches for so many tokens fit: into the budget, or into the memory that is free.

        ``also``: bytes that each of their requests needs elsewhere: the draft's cache. What others take of the budget
        is not known here (pressure.py).
        """
        each = self.cache_nbytes(capacity) + also
        if self.budget is None:
            free = self._pool.room * self._pool.page_nbytes
        else:
            free = self.budget - self.memory_nbytes - (self._pool.used - self._pool.spare) * self._pool.page_nbytes
        return max(0, free // each)

    def drop_spare(self):
        """Frees the pages that wait for the next cache. Returns their bytes."""
        freed = self._pool.drop_spare()
        self._follow_pool()
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

    def _follow_pool(self):
        """Passes were captured on the pool's memory, which may be another one now."""
        if self._moves != self._pool.moves:
            self._moves = self._pool.moves
            self._forget_passes()

    def _forget_passes(self):
        self._shapes.clear()
        self._guesses = None
