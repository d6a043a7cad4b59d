"""What a pass needs besides weights: buffers that its calls hand to each other, and the bytes that they take."""

from array import array
from typing import NamedTuple

import torch

from .pool import PAGE, page_nbytes

CHUNK = 128  # rows per pass while reading a prompt: enough to reuse each weight block, small enough to stay in cache
REPEATED = 16  # passes of at most this many rows come back every round: they are recorded once and run again
SHARED = 64  # the same where several requests share a pass


class Buffers:
    """What the calls of a pass hand to each other, allocated once."""

    def __init__(self, config, rows, device):
        for name, width in self.widths(config).items():
            setattr(self, name, torch.empty(rows, width, device=device))

    @staticmethod
    def widths(config):
        """Floats per row of each buffer."""
        c = config
        attention, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        return {
            "rotary": c.head_dim,
            "hidden": c.hidden,  # the residual stream
            "qkv": attention + 2 * kv,
            "attended": attention,
            "mixed": c.hidden,  # what the attention adds to the stream
            "delta": c.hidden,  # what the feed-forward half adds to it
        } | ({"q_normed": attention, "k_normed": kv} if c.qk_norm else {})

    @classmethod
    def row_nbytes(cls, config):
        return 24 + 4 * sum(cls.widths(config).values())


class Numbers:
    """A tensor ``there`` on the device that takes Python's numbers: on a CPU without an operation of torch.

    ``code``: the dtype's in Python's ``array``.
    """

    def __init__(self, code, shape, dtype, device):
        memory = bytearray(torch.Size(shape).numel() * dtype.itemsize)
        self._code, self._memory = code, memoryview(memory).cast(code)
        self._here = torch.frombuffer(memory, dtype=dtype).view(shape)
        self.there = self._here if device.type == "cpu" else torch.empty(shape, dtype=dtype, device=device)

    def set(self, numbers):
        self._memory[:] = array(self._code, numbers)
        if self.there is not self._here:
            self.there.copy_(self._here)


class Group(NamedTuple):
    """Requests with equally many rows, as ``attend_int8`` takes them."""

    q: torch.Tensor  # [requests, rows, heads, D]
    table: torch.Tensor
    lengths: torch.Tensor
    out: torch.Tensor


class Rows:
    """Views of the shared buffers for passes of one shape (passes.Layout), and what was captured on them.

    ``logits`` takes the last rows' logits. ``width``: of a page table. ``featured``: whether all rows go through the
    last norm, which leaves them in ``normed``; ``moved_normed``: before the wanted ones are moved to the end.
    """

    def __init__(self, buffers, config, layout, width, logits, featured=False):
        c, n, self.featured = config, layout.rows, featured
        self.moved_normed = featured and not layout.in_order
        device = buffers.hidden.device
        attention, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.rotary = buffers.rotary[:n]
        self.cos, self.sin = self.rotary.chunk(2, 1)
        self._numbers = Numbers("q", (3 + layout.copies, n), torch.int64, device)
        self.ids, self.positions, self.slots, *self.copies = self._numbers.there
        self.hidden = buffers.hidden[:n]
        self.qkv = buffers.qkv[:n]
        self.q, self.k, self.v = (
            part.unflatten(1, (-1, c.head_dim)) for part in self.qkv.split([attention, kv, kv], 1)
        )
        self.norms_of_heads = ()
        if c.qk_norm:
            whole, normed = (self.q, self.k), (buffers.q_normed[:n], buffers.k_normed[:n])
            self.q, self.k = (heads.unflatten(1, (-1, c.head_dim)) for heads in normed)
            # Heads of one token lie side by side, as do tokens of one head: what takes fewer calls.
            pairs = lambda x, out: list(zip(*(t.unbind(int(n > t.shape[1])) for t in (x, out)), strict=True))
            self.norms_of_heads = pairs(whole[0], self.q), pairs(whole[1], self.k)
        self.attended = buffers.attended[:n]
        self.attended_heads = self.attended.unflatten(1, (-1, c.head_dim))
        self.mixed = buffers.mixed[:n]
        self.delta = buffers.delta[:n]
        self.normed = buffers.mixed[:n]  # in front of the head, where nothing is left to mix
        self.logits, self.passes, self.seen = logits, {}, False
        count = len(layout.spans)
        self.tables = torch.empty(count, width, dtype=torch.int32, device=device)
        self._lengths = Numbers("i", (count,), torch.int32, device)
        self._held = [None] * count  # the tables that ``tables`` has copies of
        self.groups, row, span = [], 0, 0
        for rows, requests in layout.groups:
            taken, members = slice(row, row + rows * requests), slice(span, span + requests)
            heads = (t[taken].unflatten(0, (requests, rows)) for t in (self.q, self.attended_heads))
            q, out = heads
            self.groups.append(Group(q, self.tables[members], self._lengths.there[members], out))
            row, span = taken.stop, members.stop

    def fill(self, layout):
        """Takes a pass's ids, positions, slots, lengths and page tables."""
        self._numbers.set(layout.numbers())
        self._lengths.set([s.first + len(s.tokens) for s in layout.spans])
        for i, span in enumerate(layout.spans):
            self.take_table(i, span.table)

    def take_table(self, i, table):
        """Of span ``i``."""
        if self._held[i] is not table:
            self.tables[i] = table
            self._held[i] = table


def needs(config, *, kv, context, rows=CHUNK):
    """{"kv", "workspace", "logits"}: what :func:`specdec_kernels.stream.plan` takes as ``reserved``."""
    context = min(context, config.context)
    pages = -(-context // PAGE)
    cache = pages * page_nbytes(config, kv)
    buffers = rows * Buffers.row_nbytes(config)
    rotary = context * config.head_dim * 4
    scratch = 16 * (3 * config.intermediate + config.hidden) * 4  # of fused calls, which work on 16 rows at a time
    return {"kv": cache, "workspace": buffers + rotary + scratch, "logits": REPEATED * config.columns * 4}
