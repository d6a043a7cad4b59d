"""Has the shards written that are missing in a folder, by whatever makes texts by number."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

import torch

from ..errors import ModelError
from .corpus import shard_numbers, write_shard
from .lock import alone
from .manifest import begin


@dataclass
class Report:
    """What became of the texts that were begun: ``kept`` ones, of ``tokens`` ids, ``answers`` of them drawn as answers;
    ``dropped``: reason -> how many. ``seconds`` that it took."""

    kept: int = 0
    tokens: int = 0
    answers: int = 0
    dropped: Counter = field(default_factory=Counter)
    seconds: float = 0.0


def fill(folder, manifest, about, write, *, shards, size, progress=None) -> Report:
    """Has the missing ones of so many shards written, of ``size`` texts each, and says what it took.

    ``manifest``: all that they are a function of, with ``about``, whose they are. ``write(numbers)`` yields (number,
    text or why it was dropped) in any order; a shard is written when the last of its texts is there. Raises OptionError
    where another writes to the folder, and what :func:`manifest.begin` raises.
    """
    with writing(folder):
        begin(folder, manifest, shards)
        missing = sorted(set(range(shards)) - set(shard_numbers(folder)))
        report, started = Report(), time.perf_counter()
        tell = progress or (lambda fraction: None)
        numbers = [number for shard in missing for number in range(shard * size, (shard + 1) * size)]
        found: dict[int, dict] = {shard: {} for shard in missing}
        tell(0.0)
        with torch.inference_mode():
            for done, (number, outcome) in enumerate(write(numbers), 1):
                shard = number // size
                found[shard][number] = outcome
                if len(found[shard]) == size:
                    _finish(folder, shard, [found[shard][n] for n in sorted(found[shard])], about, report)
                    del found[shard]
                tell(done / len(numbers))
        report.seconds = time.perf_counter() - started
        return report


def writing(folder):
    """Holds a corpus' folder while something is written to it."""
    return alone(folder, f"corpus: another process is writing to {folder}")


def _finish(folder, shard, outcomes, about, report):
    """Writes a shard of what is kept of it."""
    texts = [outcome for outcome in outcomes if not isinstance(outcome, str)]
    dropped = Counter(outcome for outcome in outcomes if isinstance(outcome, str))
    if not texts:
        why = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())
        raise ModelError(f"target: shard {shard}: none of {len(outcomes)} texts can be kept: {why}")
    write_shard(folder, shard, texts, about)
    report.kept += len(texts)
    report.tokens += sum(len(text.ids) for text in texts)
    report.answers += sum(text.answer for text in texts)
    report.dropped += dropped
