"""What one request did and took, in the form of the contract's ``--json`` object. Unknown is None, never 0."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from .counts import MOST_ROUNDS, Counts, Speculation, milliseconds, ratio


@dataclass
class Timing:
    load_seconds: float | None = None
    prefill_seconds: float | None = None
    decode_seconds: float = 0.0
    row_seconds: float | None = None  # of a pass over one row, as measured: what a token costs without drafts

    def as_dict(self, tokens: int) -> dict:
        decoded = tokens and self.decode_seconds > 0
        speed, plain = tokens / self.decode_seconds if decoded else None, ratio(1.0, self.row_seconds)
        return {
            "load_s": self.load_seconds,
            "prefill_ms": milliseconds(self.prefill_seconds),
            "decode_ms": milliseconds(self.decode_seconds) if decoded else None,
            "tokens_per_second": speed,
            "plain_tokens_per_second": plain,  # expected of plain decoding; of this request's own rows if alone
            "estimated_speedup": speed / plain if speed and plain else None,
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
class BatchStats:
    """Of requests that share passes: what their passes were, and the sums of those that have left."""

    joined: int = 0  # again after they were put off
    put_off: int = 0  # for want of memory
    finished: int = 0
    passes: int = 0  # of the target, prompts apart
    rows: int = 0  # in those
    tokens: int = 0  # into any text
    verify_seconds: float = 0.0
    size_history: list[int] = field(default_factory=list)  # requests per pass; begins with pass first_pass
    first_pass: int = 1
    speculation: Counts = field(default_factory=Counts)

    def leave(self, stats: Stats) -> None:
        """A request has ended, however it did."""
        self.finished += 1
        self.speculation.merge(stats.speculation)

    def add(self, requests: int, rows: int, seconds: float) -> None:
        """One pass: ``rows`` of ``requests`` requests. What they make of it they add to ``tokens``."""
        self.passes += 1
        self.rows += rows
        self.verify_seconds += seconds
        self.size_history.append(requests)
        if len(self.size_history) > 2 * MOST_ROUNDS:
            del self.size_history[:MOST_ROUNDS]
            self.first_pass += MOST_ROUNDS

    def as_dict(self) -> dict:
        return {
            "joined": self.joined,
            "put_off": self.put_off,
            "finished": self.finished,
            "passes": self.passes,
            "rows": self.rows,
            "tokens": self.tokens,
            "rows_per_pass": ratio(self.rows, self.passes),
            "tokens_per_pass": ratio(self.tokens, self.passes),
            "verify_ms": milliseconds(self.verify_seconds) if self.passes else None,
            "size_history": list(self.size_history),
            "first_pass": self.first_pass,
            "speculation": self.speculation.as_dict(),
        }


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
    batch: BatchStats | None = None  # of the batch that the request was part of

    def as_dict(self) -> dict:
        shared = {} if self.batch is None else {"batch": self.batch.as_dict()}
        return shared | {
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


def peak_memory() -> int | None:
    """Most memory that this process ever had resident, in bytes."""
    try:
        import resource
        import sys
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
