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
        """float32 [stop - start, V']"""
        return (self.features[start:stop] @ self.head.t()).float()

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
    """Sums over the rows that count, float64 [depths]: the loss, with its weights and without, alpha, how often the
    argmaxes agree; and how many rows there were.
    """

    weighted: torch.Tensor
    loss: torch.Tensor
    alpha: torch.Tensor
    agreed: torch.Tensor
    rows: torch.Tensor


def compare(states, head, teacher, counted, weights, losses, dtype, *, head_gradient=False, gradient=True):
    """``(Measured, gradient of the states, of the head or None)``.

    ``states`` float32 [depths, N, d]: row n of every depth is held against the teacher's row n. ``head`` float32
    [V', d]. ``counted`` bool [depths, N]: which rows count. ``weights`` float32 [depths, N] are those of the rows'
    losses in the sum whose gradients are returned, 0 where they don't count.
    """
    depths, n, _ = states.shape
    matrix = head.to(dtype)
    slopes = torch.zeros_like(states) if gradient else None
    of_head = torch.zeros_like(head) if head_gradient else None
    sums = torch.zeros(4, depths, dtype=torch.float64, device=states.device)
    for start in range(0, n, CHUNK):
        stop = min(start + CHUNK, n)
        log_p = teacher.log_p(start, stop)
        p = log_p.exp()
        mass = p.sum(1)
        best = teacher.best_of(start, stop, p, mass)
        for depth in range(depths):
            x = states[depth, start:stop].to(dtype)
            logits = x @ matrix.t()
            rows = Rows(logits, log_p, best, p, mass)
            values, slope = mixed(rows, losses)
            use = counted[depth, start:stop].double()
            weight = weights[depth, start:stop]
            agreed = logits.argmax(1) == rows.best
            sums[:, depth] += torch.stack([t.double() @ use for t in (values * weight, values, rows.alpha, agreed)])
            if gradient:
                slope, weight = slope.to(dtype), weight[:, None]
                slopes[depth, start:stop] = (slope @ matrix).float() * weight
                if head_gradient:
                    of_head += (slope.t() @ (x * weight).to(dtype)).float()
    return Measured(*sums, counted.sum(1)), slopes, of_head


class HeadLoss(torch.autograd.Function):
    """The weighted sum of the rows' losses, as a scalar that knows its gradient; and what was measured on the way."""

    @staticmethod
    def forward(ctx, states, head, teacher, counted, weights, losses, dtype):
        of_states, of_head = ctx.needs_input_grad[:2]
        measured, slopes, head_slope = compare(
            states, head, teacher, counted, weights, losses, dtype, head_gradient=of_head, gradient=of_states
        )
        ctx.save_for_backward(slopes, head_slope)
        return measured.weighted.sum().float(), measured

    @staticmethod
    def backward(ctx, factor, _):
        slopes, head_slope = ctx.saved_tensors
        scaled = lambda slope: None if slope is None else slope * factor
        return scaled(slopes), scaled(head_slope), None, None, None, None, None
