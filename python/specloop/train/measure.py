"""What a draft is worth on texts that it was not trained on: acceptance per position."""

from __future__ import annotations

import torch

from .head_loss import compare, with_ones
from .plan import runs
from .samples import collate


class Held:
    """A fixed sample of the texts held out. All in float32: what it says is what a decoder should find."""

    def __init__(self, samples, column_of, teacher_head, depths, losses, rows):
        self._samples, self._column_of, self._head = samples, column_of, with_ones(teacher_head.float())
        self._depths, self._losses = depths, losses
        step = max(1, len(samples.held_out) // 256)
        spread = [place for start in range(step) for place in samples.held_out[start::step]]
        self.places, total = [], 0
        for place, answer in zip(spread, samples.lengths(spread), strict=True):
            self.places.append(place)
            total += answer
            if total >= rows:
                break

    @torch.no_grad()
    def measure(self, draft, values):
        """{"alpha", "agreed", "loss"}, a list each with one number per depth.

        ``values``: of the draft's parameters. ``alpha``: sum of min(p, q), the acceptance at T = 1 of a token that is
        i guesses behind the target's last word; ``agreed``: how often the argmaxes agree, the acceptance at T = 0.
        """
        lengths = self._samples.lengths(self.places)
        seen, counts, before, draft.compute = 0, 0, draft.compute, torch.float32
        try:
            for run in runs(range(len(self.places)), lengths, 1024):
                texts = [self._samples.text(self.places[i]) for i in run]
                batch = collate(texts, self._column_of, self._head, self._head.device)
                states = torch.func.functional_call(draft, values, (batch, self._depths))
                states = torch.stack([states[i].roll(i, 0) for i in range(self._depths)])
                counted = batch.counted(self._depths)
                found, *_ = compare(states, values["head"], batch.teacher, counted, self._losses, torch.float32)
                means, rows = found.means()
                seen, counts = seen + means * rows, counts + rows
        finally:
            draft.compute = before
        loss, alpha, agreed = (seen / counts.clamp(min=1)).tolist()
        return {"loss": loss, "alpha": alpha, "agreed": agreed, "rows": counts.tolist()}
