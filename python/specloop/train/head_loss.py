"""From hidden states to the loss, without ever holding the logits of more than a few rows.

Eight thousand logits a row, in float32 and for several depths, are what training a small draft would spend its memory
and most of its time on. So the head's product, the softmaxes, the loss and its gradient are one function: chunk by
chunk it makes the target's distribution once, compares the draft's of every depth with it, and multiplies the gradient
back at once. Logits are made in the products' dtype; everything after them is float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .losses import Rows, mixed

CHUNK = 256  # rows: from here on a matrix product with so many reaches a processor's full speed


UNKNOWN = -2  # the column of an argmax that nobody kept
_MORE = 32  # columns that are appended: products like multiples


class Teacher(NamedTuple):
    """The target's distributions at T = 1, over the cut ids, of N rows: log p = head . f - lse.

    ``head`` [V', d + 32] is :func:`with_ones` and ``features`` [N, d + 32] :func:`append`, which brings the lse into
    the product: its sums are float32, and what is rounded to the products' dtype is log p, which is small where it
    matters, and not a logit. ``best``: int64 [N], the column of the target's argmax, -1 where it was cut, UNKNOWN where
    it is to be found among the columns.
    """

    head: torch.Tensor
    features: torch.Tensor
    best: torch.Tensor

    def log_p(self, start, stop):
        """[stop - start, V'] in the products' dtype."""
        return self.features[start:stop] @ self.head.t()

    def best_of(self, start, stop, p, mass):
        """Where it is unknown it is the likeliest column, unless more than that was cut."""
        best = self.best[start:stop]
        most, column = p.max(1)
        return torch.where(best == UNKNOWN, torch.where(most >= 1 - mass, column, -1), best)


def with_ones(head):
    """A target's head [V', d] for a Teacher."""
    more = torch.zeros(len(head), _MORE, dtype=head.dtype, device=head.device)
    more[:, :3] = 1
    return torch.cat([head, more], 1)


def append(features, lse):
    """Features [N, d] for a Teacher; ``lse`` float32 [N] in three parts, as bf16 has an eighth of its bits."""
    more = torch.zeros(len(features), _MORE, dtype=features.dtype, device=features.device)
    left = -lse
    for i in range(3):
        more[:, i] = left
        left = left - more[:, i].float()
    return torch.cat([features, more], 1)


class Measured(NamedTuple):
    """Of every row at every depth, float32 [depths, N]: the loss, alpha = sum of min(p, q), whether the argmaxes agree
    (1 or 0); and ``counted``, whether the row counts.
    """

    loss: torch.Tensor
    alpha: torch.Tensor
    agreed: torch.Tensor
    counted: torch.Tensor

    def means(self):
        """Of loss, alpha and agreement over the rows that count: float64 [3, depths]; and how many these are."""
        rows = self.counted.sum(1)
        kept = torch.stack(self[:3]).double().where(self.counted, 0)
        return kept.sum(2) / rows.clamp(min=1), rows


def compare(states, head, teacher, counted, losses, dtype, *, weights=None, head_gradient=False):
    """``(Measured, gradient of the states, gradient of the head)``, the gradients None without ``weights``.

    ``states`` float32 [depths, N, d]: row n of every depth is held against the teacher's row n. ``head`` float32
    [V', d]. ``counted`` bool [depths, N]: which rows count. ``weights`` float32 [depths, N] are those of the rows'
    losses in the sum whose gradients are returned, 0 where they don't count.
    """
    depths, n, d = states.shape
    matrix = head.to(dtype)
    slopes = None if weights is None else torch.empty_like(states)
    of_head = torch.zeros_like(head) if head_gradient else None
    seen = states.new_empty(3, depths, n)
    chunk, block = _sizes(states.device)
    for start in range(0, n, chunk):
        stop = min(start + chunk, n)
        x = states[:, start:stop].to(dtype).reshape(-1, d)
        logits = x @ matrix.t()
        _losses(logits.view(depths, stop - start, -1), teacher, start, losses, seen[..., start:stop], block)
        if weights is None:
            continue
        weight = weights[:, start:stop].reshape(-1, 1)
        slopes[:, start:stop] = (logits @ matrix).float().mul_(weight).view(depths, -1, d)
        if head_gradient:
            of_head += (logits.t() @ (x * weight).to(dtype)).float()
    return Measured(*seen, counted), slopes, of_head


def _losses(logits, teacher, start, losses, seen, block):
    """Puts the losses' gradients in the place of the logits, [depths, rows, V'], and what is measured into ``seen``."""
    depths, n, _ = logits.shape
    target = teacher.log_p(start, start + n)
    for first in range(0, n, block):
        part = slice(first, min(first + block, n))
        log_p = target[part].float()
        p = log_p.exp()
        mass = p.sum(1)
        best = teacher.best_of(start + part.start, start + part.stop, p, mass)
        for depth in range(depths):
            rows = Rows(logits[depth, part], log_p, best, p, mass)
            values, slope = mixed(rows, losses)
            for place, value in zip(seen[:, depth, part], (values, rows.alpha, rows.agreed), strict=True):
                place.copy_(value)
            logits[depth, part] = slope


def _sizes(device):
    """Rows of a product, and of what is done between products: on a processor's core that stays in its cache."""
    return (CHUNK, 16 * torch.get_num_threads()) if device.type == "cpu" else (8 * CHUNK, 8 * CHUNK)


class HeadLoss(torch.autograd.Function):
    """The weighted sum of the rows' losses, as a scalar that knows its gradient; and what was measured on the way."""

    @staticmethod
    def forward(ctx, states, head, teacher, counted, weights, losses, dtype):
        measured, slopes, of_head = compare(
            states, head, teacher, counted, losses, dtype, weights=weights, head_gradient=ctx.needs_input_grad[1]
        )
        ctx.save_for_backward(slopes, of_head)
        return (measured.loss.where(counted, 0).double() * weights).sum().float(), measured

    @staticmethod
    def backward(ctx, factor, _):
        scaled = [None if slope is None else slope * factor for slope in ctx.saved_tensors]
        return (*scaled, None, None, None, None, None)
