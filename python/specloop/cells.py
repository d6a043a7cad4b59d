"""What an evaluation says of one way to draft, in one setting, on one category: sums and medians over pairs of answers.

Unknown is None, never 0: acceptance where nothing was evaluated, milliseconds where nothing was drafted, a speed-up
where there is no text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .counts import Counts, milliseconds, ratio
from .measure import interval, median


class Answers:
    """What one side said to a prompt, all turns of it together."""

    def __init__(self, results):
        self.ids = [result.tokens for result in results]
        self.tokens = sum(map(len, self.ids))
        self.seconds = sum(result.stats.timing.decode_seconds for result in results)
        self.counts, self.verify_seconds = Counts(), 0.0
        self.off_reasons = [reason for result in results if (reason := result.stats.speculation.off_reason)]
        for result in results:
            self.counts.merge(result.stats.speculation)
            self.verify_seconds += result.stats.speculation.verify_seconds

    @property
    def rate(self) -> float | None:
        """Tokens per second of decoding."""
        return ratio(self.tokens, self.seconds) or None


@dataclass(frozen=True)
class Trio:
    """One prompt, three times: plain, with drafts, plain again. Texts drawn at T > 0 differ, so rates are compared."""

    plain: Answers
    drafted: Answers
    again: Answers

    @property
    def speedup(self) -> float | None:
        return self._over_plain(self.drafted)

    @property
    def noise(self) -> float | None:
        return self._over_plain(self.again)

    @property
    def same_tokens(self) -> bool:
        return self.plain.ids == self.drafted.ids == self.again.ids

    def _over_plain(self, side):
        return side.rate / self.plain.rate if side.rate and self.plain.rate else None


def cell(trios: Sequence[Trio], *, greedy: bool) -> dict:
    """The figures; ``greedy``: the ids have to be plain decoding's."""
    counts = Counts()
    for trio in trios:
        counts.merge(trio.drafted.counts)
    total = lambda side, name: sum(getattr(getattr(trio, side), name) for trio in trios)
    rate = lambda side: ratio(total(side, "tokens"), total(side, "seconds"))
    verify, plain, drafted = total("drafted", "verify_seconds"), rate("plain"), rate("drafted")
    per_round = lambda seconds: None if seconds is None else milliseconds(ratio(seconds, counts.rounds))
    return {
        "pairs": len(trios),
        "speedup": median(trio.speedup for trio in trios),
        "speedup_interval": interval(trio.speedup for trio in trios),
        "speedup_of_sums": drafted / plain if drafted and plain else None,
        "noise": median(trio.noise for trio in trios),
        "noise_interval": interval(trio.noise for trio in trios),
        "same_tokens": all(trio.same_tokens for trio in trios) if greedy else None,
        "plain_tokens_per_second": median(trio.plain.rate for trio in trios),
        "tokens_per_second": median(trio.drafted.rate for trio in trios),
        "plain_ms_per_token": milliseconds(ratio(total("plain", "seconds"), total("plain", "tokens"))),
        "round_ms": per_round(total("drafted", "seconds")),
        "draft_ms": per_round(counts.draft_seconds),
        "verify_ms": per_round(verify),
        "tokens_per_pass": counts.tokens_per_pass,
        "acceptance_rate": counts.acceptance_rate,
        "per_position": counts.per_position,
        "speculation": counts.as_dict()
        | {
            "tokens": counts.tokens,
            "verify_ms": milliseconds(verify) if counts.rounds else None,
        },
        "off_reasons": dict(Counter(reason for trio in trios for reason in trio.drafted.off_reasons)),
        "speedups": [trio.speedup for trio in trios],
        "noises": [trio.noise for trio in trios],
    }
