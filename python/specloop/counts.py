"""What became of the drafts of one request, round by round and in sums. Unknown is None, never 0.

*Acceptance rate* = accepted / evaluated: a draft after the first refusal was proposed but not evaluated. Others divide
by what was proposed, so that figure is here as well. *Tokens per pass* counts what came into the text.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

MOST_ROUNDS = 4096  # of which a history keeps at least the newest; so a long text takes no more memory than this
MOST_EVENTS = 256


@dataclass
class Source:
    """What became of the drafts of one kind ("lookup", "model", "feature"), in sums."""

    rounds: int = 0  # passes of the target with drafts of this kind
    proposed: int = 0  # drafts; of a tree all nodes
    evaluated: int = 0  # drafts up to the first refusal; of a tree levels
    accepted: int = 0  # by the target, also those that an end or a stop string then cut off
    committed: int = 0  # accepted and in the text
    evaluated_at: list[int] = field(default_factory=list)  # by position of the draft
    accepted_at: list[int] = field(default_factory=list)

    def count(self, proposed, evaluated, accepted, committed) -> None:
        """One round."""
        self.rounds += 1
        self.proposed += proposed
        self.evaluated += evaluated
        self.accepted += accepted
        self.committed += committed
        _add(self.evaluated_at, [1] * evaluated)
        _add(self.accepted_at, [1] * accepted + [0] * (evaluated - accepted))

    def merge(self, other: Source) -> None:
        """Adds the sums of others."""
        for name in self._SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in self._LISTS:
            _add(getattr(self, name), getattr(other, name))

    @property
    def acceptance_rate(self) -> float | None:
        return ratio(self.accepted, self.evaluated)

    @property
    def per_position(self) -> list[float | None]:
        """Acceptance of the first, second, ... draft, given that those before it were accepted."""
        return [ratio(a, n) for a, n in zip(self.accepted_at, self.evaluated_at, strict=True)]

    def as_dict(self) -> dict:
        sums = {name: getattr(self, name) for name in Source._SUMS}
        at = {name: list(getattr(self, name)) for name in Source._LISTS}
        return sums | at | {"acceptance_rate": self.acceptance_rate, "per_position": self.per_position}

    _SUMS = ("rounds", "proposed", "evaluated", "accepted", "committed")
    _LISTS = ("evaluated_at", "accepted_at")


@dataclass
class Counts(Source):
    """Sums over all rounds, those without drafts, too; those of several requests can be added up (``merge``)."""

    tokens: int = 0  # in the text, drafted or not
    rounds_without_draft: int = 0
    fallbacks: int = 0  # rounds that had drafts of which none was accepted
    fault_count: int = 0
    histogram: list[int] = field(default_factory=list)  # [a]: rounds with drafts, of which a were accepted
    by_source: dict[str, Source] = field(default_factory=dict)
    draft_seconds: float | None = None

    def add_round(self, proposed, evaluated, accepted, tokens, source) -> None:
        """One round, of which so many ``tokens`` came into the text; ``source``: the drafter's name."""
        sums = proposed, evaluated, accepted, min(accepted, tokens)
        self.count(*sums)
        self.tokens += tokens
        if not proposed:
            self.rounds_without_draft += 1
            return
        self.fallbacks += not accepted
        _add(self.histogram, [0] * accepted + [1])
        if source:
            self.by_source.setdefault(source, Source()).count(*sums)

    def merge(self, other: Counts) -> None:
        """Adds the sums of another request."""
        super().merge(other)
        for name, part in other.by_source.items():
            self.by_source.setdefault(name, Source()).merge(part)
        if other.draft_seconds is not None:
            self.draft_seconds = (self.draft_seconds or 0.0) + other.draft_seconds

    @property
    def tokens_per_pass(self) -> float | None:
        return ratio(self.tokens, self.rounds)

    @property
    def mean_draft_length(self) -> float | None:
        """Drafts per round. Below one, acceptance says little about speed."""
        return ratio(self.proposed, self.rounds)

    def as_dict(self) -> dict:
        return super().as_dict() | {
            "rounds_without_draft": self.rounds_without_draft,
            "fallbacks": self.fallbacks,
            "fault_count": self.fault_count,
            "accepted_of_proposed": ratio(self.accepted, self.proposed),
            "tokens_per_pass": self.tokens_per_pass,
            "mean_draft_length": self.mean_draft_length,
            "acceptance_histogram": list(self.histogram),
            "by_source": {name: part.as_dict() for name, part in self.by_source.items()},
            "draft_ms": milliseconds(self.draft_seconds),
        }

    _SUMS = (*Source._SUMS, "tokens", "rounds_without_draft", "fallbacks", "fault_count")
    _LISTS = (*Source._LISTS, "histogram")


@dataclass
class Speculation(Counts):
    """One request's. The loop calls ``add`` once per round, ``end`` where decoding ends or begins again elsewhere."""

    k_history: list[int] = field(default_factory=list)  # drafts per round; histories begin with round first_round
    accepted_history: list[int] = field(default_factory=list)
    seconds_history: list[float] = field(default_factory=list)  # of drafting and verifying
    source_history: list[str | None] = field(default_factory=list)  # whose drafts they were; None without one
    first_round: int = 1
    verify_seconds: float = 0.0  # of passes with this request in them
    threshold: object | None = None  # the request's threshold.Threshold, of rule "threshold"
    off_reason: str | None = None
    faults: list[str] = field(default_factory=list)
    events: list[dict] = field(default_factory=list)  # {"round", "event": "fault" | "off" | "on", "reason"}
    _guard: object | None = field(default=None, repr=False)
    _faults_seen: int = field(default=0, repr=False)
    _seconds_seen: float = field(default=0.0, repr=False)

    def add(self, proposed, accepted, tokens, seconds, *, depth=None, source=None, draft=None, controller=None) -> None:
        """One round: ``proposed`` drafts, of which the target accepted ``accepted``; ``tokens`` came into the text.

        ``seconds``: of the pass and its verdict. ``depth``: of a tree of ``proposed`` nodes. ``source``: the drafter's
        name. ``draft`` and ``controller``: the request's, asked for faults, times and why there was no draft.
        """
        evaluated = min(accepted + 1, proposed if depth is None else depth)
        self.add_round(proposed, evaluated, accepted, tokens, source)
        self.verify_seconds += seconds
        drafting = self._drafting(draft)
        self.k_history.append(proposed)
        self.accepted_history.append(accepted)
        self.seconds_history.append(seconds + drafting)
        self.source_history.append(source if proposed else None)
        if len(self.k_history) > 2 * MOST_ROUNDS:
            histories = self.k_history, self.accepted_history, self.seconds_history, self.source_history
            for history in histories:
                del history[:MOST_ROUNDS]
            self.first_round += MOST_ROUNDS
        if controller is not None and draft is not None and draft.draft is not None:
            self._switched(draft.off_reason or controller.off_reason())

    def end(self, draft, controller) -> None:
        """Decoding is over, or begins again elsewhere: what the draft took, and why it does not draft, if so."""
        self._drafting(draft)
        self.off_reason = draft.off_reason or controller.off_reason()
        if draft.draft is not None and self.rounds and not self.proposed and not self.off_reason:
            self.off_reason = "the draft found nothing to propose"

    def _drafting(self, draft) -> float:
        """What came since the last call: faults, and seconds of drafting, which are returned."""
        if draft is None:
            return 0.0
        if self._guard is None or self._guard() is not draft:  # a swap brings another one
            self._faults_seen, self._seconds_seen = 0, 0.0
            self._guard = weakref.ref(draft)  # results live long, and a draft's memory must not
        seconds, faults = draft.seconds - self._seconds_seen, list(draft.faults[self._faults_seen :])
        self._seconds_seen += seconds
        self._faults_seen += len(faults)
        if self.rounds and (draft.draft is not None or seconds):
            self.draft_seconds = (self.draft_seconds or 0.0) + seconds
        for fault in faults:
            self._note("fault", fault)
        self.fault_count += len(faults)
        self.faults = (self.faults + faults)[-MOST_EVENTS:] if faults else self.faults
        return seconds

    def _switched(self, reason: str | None) -> None:
        """Notes when drafting goes off, with the reason, and when it comes back."""
        if (reason is None) != (self.off_reason is None):
            self._note(*(("on", "drafting again") if reason is None else ("off", reason)))
        self.off_reason = reason

    def _note(self, event, reason) -> None:
        self.events.append({"round": self.rounds, "event": event, "reason": reason})
        del self.events[:-MOST_EVENTS]

    def as_dict(self) -> dict:
        threshold = self.threshold
        return super().as_dict() | {
            "verify_ms": milliseconds(self.verify_seconds) if self.rounds else None,
            "k_history": list(self.k_history),
            "accepted_history": list(self.accepted_history),
            "round_ms": [milliseconds(seconds) for seconds in self.seconds_history],
            "first_round": self.first_round,
            "theta": None if threshold is None else threshold.theta,
            "threshold": None if threshold is None else _lossy(threshold),
            "off_reason": self.off_reason,
            "faults": list(self.faults),
            "events": [dict(event) for event in self.events],
        }


def _lossy(threshold) -> dict:
    """How far a text that a threshold let through is from the target's; ``path``: theta per round, ``lent``: tokens."""
    return {
        "start": threshold.start,
        "window": threshold.window,
        "set_point": threshold.set_point,
        "path": list(threshold.path),
        "agreement": threshold.agreement,
        "mean_gap": threshold.mean_gap,
        "lent": threshold.lent,
    }


def _add(sums: list[int], more: list[int]) -> None:
    sums.extend([0] * (len(more) - len(sums)))
    for i, n in enumerate(more):
        sums[i] += n


def ratio(part, whole):
    return part / whole if whole else None


def milliseconds(seconds):
    return None if seconds is None else seconds * 1e3
