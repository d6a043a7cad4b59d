"""Sweeps over matrices far larger than the last-level cache, so that every product finds its weights in memory.

The plain read goes over the same bytes with the same threads.
"""

import itertools

import torch

from specdec_kernels import Int8Weight, LargePages, linear_int8, native, record

LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # q, k, v; output; gate, up; down of a 135M llama
SETS = {
    "4096": [(4096, 4096)] * 8,
    "smol": [shape for _ in range(30) for shape in LAYER] + [(49152, 576)],
}


class Sweep:
    """int8 matrices whose codes lie one after the other in memory."""

    def __init__(self, shapes, group_of):
        sizes = [n * k for n, k in shapes]  # no padding: n is a multiple of 16, groups are multiples of 4
        self.arena = LargePages().empty((sum(sizes),), torch.uint8).random_(0, 256)
        self.weights, at = [], 0
        for (n, k), size in zip(shapes, sizes, strict=True):
            empty = Int8Weight.empty(16, k, group_of(k))
            codes = self.arena[at : at + size].view(n // 16, *empty.codes.shape[1:])
            scale = torch.rand(n // 16, *empty.scale.shape[1:])
            self.weights.append(Int8Weight(n, k, empty.group_size, codes, scale))
            at += size

    def run(self, m, *, floats=False, rotated=False):
        """Multiplies m rows, floats or codes, into given outputs; recorded as the decoder does it: no checks later."""
        gen = torch.Generator().manual_seed(0)
        x, weights = {}, self.weights
        if rotated:
            weights = [Int8Weight(w.n, w.k, w.group_size, w.codes, w.scale, True) for w in weights]
        for w in weights:
            if floats:
                x[w.k, w.groups] = torch.randn(m, w.k, generator=gen)
            else:
                q = torch.randint(-127, 128, (m, w.k), dtype=torch.int8, generator=gen)
                x[w.k, w.groups] = (q, torch.rand(m, w.groups, generator=gen))
        calls = [(x[w.k, w.groups], w, torch.empty(m, w.n)) for w in weights]

        with record() as recording:
            for rows, weight, out in calls:
                linear_int8(rows, weight, out=out)
        return recording.run

    def read(self):
        return lambda: read(self.arena)


def read(tensor):
    native.cpu.read_bytes(tensor.data_ptr(), tensor.nbytes, native.threads())


def in_turn(function, matrices):
    """One call works on one matrix, the next call on the next: short timings, and each matrix is cold again."""
    ring = itertools.cycle(matrices)
    return lambda: function(next(ring))
