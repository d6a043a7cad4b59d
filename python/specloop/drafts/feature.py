"""A feature head as a draft: guesses from what the target itself saw.

It goes by the features that the target's passes leave in the request's cache (models/base.py). A row that was made with
the target's feature stays in the head's cache for good. Guesses have the head's own features in their place, so their
rows are made anew once their ids are committed and the target's features are there: together, in the pass that makes
the next first guess. Where the target has not been yet, there is nothing to guess from.
"""

from __future__ import annotations

import contextlib

from .model import ModelDraft


class FeatureDraft(ModelDraft):
    """``source``: the request's seat at the target, whose cache keeps features. The rest as ModelDraft's; ``seat`` is
    one at a models.feature_head.FeatureHead of that target.
    """

    name = "feature"

    def __init__(self, seat, source, vocab_size, *options, **more):
        super().__init__(seat, vocab_size, *options, **more)
        self.source = source
        self._true = 0  # so many rows of the head's cache were made with the target's features
        self._reach = None  # how many features there are, while passes are made

    def begin(self, ids) -> None:
        self._true = 0
        super().begin(ids)

    def outlook(self) -> tuple[int, int]:
        """Nothing as long as the target has not seen all ids but the last."""
        reach = self.source.features[1] if self._reach is None else self._reach
        return super().outlook() if reach >= len(self._ids) - 1 else (0, 0)

    @contextlib.contextmanager
    def _reading(self):
        with self.seat.lock:
            features, reach = self.source.features
            self._reach = min(reach, len(self._ids) - 1)
            del self._held[self._true :]
            self.seat.truncate(len(self._held))
            self.seat.lend(features, self._reach)
            try:
                yield
            finally:
                self._true = min(len(self._held), self._reach + 1)
                self._reach = None
                self.seat.lend(None, 0)
