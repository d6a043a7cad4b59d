"""What one request did and took, in the form of the contract's ``--json`` object. Unknown is None, never 0."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass
class Speculation:
    """Counts of drafts. A draft after the first refusal, or after the text's end, was proposed but not evaluated."""

    rounds: int = 0  # passes of the target after the prompt
    proposed: int = 0
    evaluated: int = 0
    accepted: int = 0  # by the target, also those that an end or a stop string then cut off
    committed: int = 0  # accepted and in the text
    k_history: list[int] = field(default_factory=list)
    evaluated_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    tokens: int = 0
    draft_seconds: float | None = None
    verify_seconds: float = 0.0
    theta: float | None = None
    off_reason: str | None = None
    faults: list[str] = field(default_factory=list)

    def add(self, proposed: int, accepted: int, tokens: int, seconds: float) -> None:
        """One round: ``proposed`` drafts, of which the target accepted ``accepted``; ``tokens`` came into the text."""
        self.rounds += 1
        self.proposed += proposed
        evaluated = min(accepted + 1, proposed)
        self.evaluated += evaluated
        self.accepted += accepted
        self.committed += min(accepted, tokens)
        self.tokens += tokens
        self.k_history.append(proposed)
        self.verify_seconds += seconds
        for at, n in ((self.evaluated_at, evaluated), (self.accepted_at, accepted)):
            at.extend([0] * (proposed - len(at)))
            for j in range(n):
                at[j] += 1

    def end(self, draft, controller) -> None:
        """Decoding is over, or begins again elsewhere: what the draft took, and why it does not draft, if so."""
        self.faults += draft.faults
        if draft.draft is None:
            self.off_reason = draft.off_reason or controller.off_reason()
            return
        if self.rounds:
            self.draft_seconds = (self.draft_seconds or 0.0) + draft.seconds
        self.off_reason = draft.off_reason or controller.off_reason()
        if self.rounds and not self.proposed and not self.off_reason:
            self.off_reason = "the draft found nothing to propose"

    @property
    def acceptance_rate(self) -> float | None:
        return _ratio(self.accepted, self.evaluated)

    @property
    def tokens_per_pass(self) -> float | None:
        return _ratio(self.tokens, self.rounds)

    @property
    def per_position(self) -> list[float | None]:
        """Acceptance of the first, second, ... draft, given that those before it were accepted."""
        return [_ratio(a, n) for a, n in zip(self.accepted_at, self.evaluated_at, strict=True)]

    def as_dict(self) -> dict:
        return {
            "rounds": self.rounds,
            "proposed": self.proposed,
            "evaluated": self.evaluated,
            "accepted": self.accepted,
            "committed": self.committed,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_pass": self.tokens_per_pass,
            "per_position": self.per_position,
            "draft_ms": _ms(self.draft_seconds),
            "verify_ms": _ms(self.verify_seconds) if self.rounds else None,
            "k_history": list(self.k_history),
            "theta": self.theta,
            "off_reason": self.off_reason,
            "faults": list(self.faults),
        }


@dataclass
class Timing:
    load_seconds: float | None = None
    prefill_seconds: float | None = None
    decode_seconds: float = 0.0

    def as_dict(self, tokens: int) -> dict:
        decoded = tokens and self.decode_seconds > 0
        return {
            "load_s": self.load_seconds,
            "prefill_ms": _ms(self.prefill_seconds),
            "decode_ms": _ms(self.decode_seconds) if decoded else None,
            "tokens_per_second": tokens / self.decode_seconds if decoded else None,
        }


@dataclass
class Memory:
    """Bytes."""

    budget: int | None = None  # None = no limit was asked for
    peak: int | None = None  # of the whole process, mapped files included
    resident: int | None = None  # weights held in memory
    streamed_bytes: int | None = None  # of weights, read from the file for this request's passes
    released: list[dict] = field(default_factory=list)  # {"step", "bytes"}: given back so that this request could go on


@dataclass
class Stats:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    speculation: Speculation = field(default_factory=Speculation)
    timing: Timing = field(default_factory=Timing)
    memory: Memory = field(default_factory=Memory)
    backend: str | None = None
    settings: dict = field(default_factory=dict)  # what was in effect, defaults resolved
    swaps: int = 0  # how often the target or the draft was exchanged meanwhile

    def as_dict(self) -> dict:
        return {
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.completion_tokens,
                "total_tokens": self.prompt_tokens + self.completion_tokens,
            },
            "speculation": self.speculation.as_dict(),
            "memory": asdict(self.memory),
            "timing": self.timing.as_dict(self.completion_tokens),
            "backend": self.backend,
            "settings": dict(self.settings),
        }


def _ratio(part, whole):
    return part / whole if whole else None


def _ms(seconds):
    return None if seconds is None else seconds * 1e3


def peak_memory() -> int | None:
    """Most memory that this process ever had resident, in bytes."""
    try:
        import resource
        import sys
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
