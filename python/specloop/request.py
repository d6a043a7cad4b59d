"""One text in the making, as the decode loop sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .stats import Stats

if TYPE_CHECKING:
    from .faults import GuardedDraft
    from .models.base import Cache

DRAFT_UNTIL = 4096  # ids, prompt included, beyond which a request decodes plainly
MAX_FALLBACKS = 8  # rounds in a row whose drafts were all refused
FIRST_REST, LONGEST_REST = 16, 256  # rounds without drafts that follow


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """``ids`` is the single truth: cache, draft, random numbers and statistics are functions of it.

    ``cache`` may hold fewer ids than were committed; the loop feeds what is missing. ``limit``: most ids, prompt
    included. ``rule``: of acceptance, "token", "block" or "threshold", the last with a ``threshold`` (threshold.py).
    ``processor``: changes logits rows before they are judged (processors.py). ``logprobs``: a list to which the
    log-probability of every emitted id is appended, or None; ``top_logprobs``: so many of the likeliest ids with it.
    ``on_fallbacks``: "plain" or "stop", after ``max_fallbacks`` rounds in a row without an accepted draft.
    """

    ids: list[int]
    limit: int
    cache: Cache
    draft: GuardedDraft
    controller: Any  # controller.Fixed or Auto
    sampling: Sampling = Sampling()
    stop: Callable[[int], bool] = lambda token: False  # sees every emitted id once; True = the text ends with it
    cancelled: Callable[[], bool] = lambda: False
    rule: str = "token"
    threshold: Any = None
    processor: Any = None
    logprobs: list | None = None
    top_logprobs: int = 0
    draft_until: int = DRAFT_UNTIL
    on_fallbacks: str = "plain"
    max_fallbacks: int = MAX_FALLBACKS
    fallbacks: int = 0  # in a row, so far
    rests: int = 0  # that drafting had to take for that reason since a draft was accepted
    finish_reason: str | None = None  # "stop", "length", "fallbacks" or "cancelled" once it has ended
    failure: Exception | None = None  # why it could not go on; what was emitted stands
    stats: Stats = field(default_factory=Stats)

    def __post_init__(self):
        self.stats.speculation.threshold = self.threshold

    @property
    def behind(self) -> int:
        """How many committed ids the cache lacks, but for the pending one."""
        return len(self.ids) - 1 - self.cache.length

    @property
    def room(self) -> int:
        """Most drafts of the next round."""
        return 0 if len(self.ids) >= self.draft_until else max(0, self.limit - len(self.ids) - 1)

    def may_go_on(self) -> bool:
        """False, with the reason noted, if it must not begin another token."""
        if self.finish_reason is None and self.failure is None:
            if self.cancelled():
                self.finish_reason = "cancelled"
            elif len(self.ids) >= self.limit:
                self.finish_reason = "length"
        return self.finish_reason is None and self.failure is None

    def take(self, token: int, eos_ids, refused: bool = False) -> None:
        """Commits an id. ``refused``: it is that of a round with drafts of which none was accepted."""
        self.ids.append(token)
        if token in eos_ids or self.stop(token):
            self.finish_reason = "stop"
        elif len(self.ids) >= self.limit:
            self.finish_reason = "length"
        elif refused and self.on_fallbacks == "stop" and self.fallbacks + 1 >= self.max_fallbacks:
            self.finish_reason = "fallbacks"

    def observe(self, outlook, proposed: int, accepted: int, seconds: float, rows: int) -> None:
        """What became of a round's drafts, for whoever decides about the next ones. Not for a round that was cut: it
        says nothing about the drafts behind the cut.
        """
        self.controller.observe(outlook, proposed, accepted, seconds, rows)
        if accepted:
            self.fallbacks = self.rests = 0
        elif proposed:
            self.fallbacks += 1
        if self.fallbacks >= self.max_fallbacks:
            rounds = min(FIRST_REST << self.rests, LONGEST_REST)
            self.draft.rest(rounds, f"{self.fallbacks} rounds in a row without an accepted draft")
            self.fallbacks, self.rests = 0, self.rests + 1

    def count(self, proposal, accepted: int, committed: int, seconds: float) -> None:
        """A round, for the statistics."""
        self.stats.speculation.add(
            len(proposal),
            accepted,
            committed,
            seconds,
            depth=proposal.depth,
            source=proposal.source,
            draft=self.draft,
            controller=self.controller,
        )
        if self.stats.batch is not None:
            self.stats.batch.tokens += committed

    def end(self) -> None:
        """Decoding is over, or begins again elsewhere."""
        stats = self.stats
        stats.speculation.end(self.draft, self.controller)
        if self.finish_reason is None and self.failure is None:
            return
        self.draft.let_go("the text has ended")  # its cache makes room for others
        if stats.batch is not None:
            stats.batch.leave(stats)
