"""Inputs of the verify benchmarks: calls whose outcome is known, in copies that take turns so that caches stay cold."""

import itertools
import sys
from pathlib import Path

import torch

from specdec_kernels import native, verify
from specdec_kernels.reference.philox import COIN, philox4x32

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import real_rows

DRAFTS = 4  # K
COLD = 64 << 20  # bytes that are read before the same row comes again; twice a large last-level cache
POSITION = 7


def gaussian(count, vocabulary):
    """Rows as no model makes them: no order among the ids, one of them likely."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(count, vocabulary, generator=generator) * 2.5
    likely = torch.randint(0, vocabulary, (count, 1), generator=generator)
    return rows.scatter_(1, likely, rows.logsumexp(1, keepdim=True) + 2)


def coins(seeds):
    """The acceptance coins [DRAFTS, seeds] of the round."""
    key = seeds, torch.zeros_like(seeds)
    return torch.stack([philox4x32(key, (POSITION, 0, COIN << 24 | i, 0))[0] for i in range(DRAFTS)]) * 2.0**-32


class Inputs:
    """``requests`` requests of ``DRAFTS`` drafts; either all are accepted, or the first of each is refused.

    The drafts are the rows' most likely ids (accepted by coins below their probability at temperature 0.7), or the
    second most likely (refused by a coin above 0.9). Draft logits are the target's with noise.
    """

    def __init__(self, requests, vocabulary, dtype, *, accept, source=real_rows.logits):
        count = requests * (DRAFTS + 1)
        if source is gaussian:
            rows = gaussian(count, vocabulary)
        else:
            rows = source(vocabulary)
            rows = rows[torch.arange(count) % len(rows)]
        target = rows.view(requests, DRAFTS + 1, vocabulary)
        judged = target[:, :-1]
        best, second = judged.topk(2).indices.unbind(-1)
        self.ids = best if accept else second
        self.tokens = self.ids.reshape(-1)
        self.cu = torch.arange(0, DRAFTS * requests + 1, DRAFTS, dtype=torch.int32)
        self.seed, self.position = self._seeds(judged, accept), torch.full((requests,), POSITION)
        self.requests, self.vocabulary, self.dtype, self.accept = requests, vocabulary, dtype, accept

        touched = requests * (DRAFTS + 1 if accept else 1) * vocabulary * dtype.itemsize
        self.copies = max(2, -(-COLD // touched))
        target = target.to(dtype)
        self.targets = [target.clone() for _ in range(self.copies)]
        self._judged, self._drafts = judged, {}
        self.turn = itertools.cycle(range(self.copies))

    def _seeds(self, judged, accept):
        """Per request a seed whose coins lead to the wanted outcome in every mode."""
        candidates = torch.arange(20000)
        u = coins(candidates)
        if not accept:
            return candidates[u[0] > 0.9][: len(judged)].clone()
        bound = (judged / 0.7).softmax(-1).gather(-1, self.ids[..., None])
        return torch.stack([candidates[(u < b).all(0)][0] for b in bound])

    def drafts(self, form):
        """The copies [B, DRAFTS, V] of the draft rows: ``draft_logits`` or ``draft_probs``; made when first used."""
        if form not in self._drafts:
            rows = self._judged + torch.randn(self._judged.shape, generator=torch.Generator().manual_seed(1)) * 0.5
            if not self.accept:
                rows.scatter_(-1, self.ids[..., None], rows.amax(-1, keepdim=True) + 8)
            if form == "draft_probs":
                rows = (rows / 0.7).softmax(-1)
            rows = rows.to(self.dtype)
            self._drafts = {form: [rows.clone() for _ in range(self.copies)]}  # one form at a time: memory
        return self._drafts[form]

    def ours(self, form=None, **options):
        """A function that verifies the next copy."""
        flat = lambda copies: [copy.view(-1, self.vocabulary) for copy in copies]
        targets, drafts = flat(self.targets), flat(self.drafts(form)) if form else None
        if options["temperature"] != 0:
            options |= {"seed": self.seed, "position": self.position}

        def run():
            i = next(self.turn)
            more = {form: drafts[i]} if form else {}
            return verify(targets[i], self.tokens, self.cu, **options, **more)

        return run

    def rows_read(self, verdict, form, rule):
        """(target rows, draft rows) per request that a call with this verdict has to read."""
        examined = [DRAFTS + 1 if rule == "block" else int(n) + 1 for n in verdict.num_accepted]
        return examined, [min(n, DRAFTS) if form else 0 for n in examined]

    def read(self, verdict, form=None, rule="token"):
        """A function that reads the same rows of the next copy with the same threads and does nothing else."""
        wanted, threads = self.rows_read(verdict, form, rule), native.threads()
        copies = [self.targets, self.drafts(form)] if form else [self.targets]
        pieces = [[_pieces(copy, rows) for copy in c] for c, rows in zip(copies, wanted, strict=False)]

        def run():
            i = next(self.turn)
            for side in pieces:
                for address, size in side[i]:
                    native.cpu.read_bytes(address, size, threads)

        return run


def _pieces(copy, rows):
    """(address, bytes) of each request's first ``rows[b]`` rows, neighbours joined."""
    size = copy[0, 0].numel() * copy.element_size()
    pieces = []
    for request, count in zip(copy, rows, strict=True):
        start = request.data_ptr()
        if pieces and sum(pieces[-1]) == start:
            pieces[-1] = pieces[-1][0], pieces[-1][1] + count * size
        else:
            pieces.append((start, count * size))
    return pieces
