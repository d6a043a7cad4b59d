"""What a request did, in a few lines for people: what ``--stats`` prints in the end."""

from __future__ import annotations


def summary(result) -> str:
    """``result``: of :meth:`Pair.generate`."""
    s, t = result.stats.speculation, result.stats.timing.as_dict(result.stats.completion_tokens)
    lines = [
        f"{result.stats.prompt_tokens} prompt tokens, {len(result.tokens)} new ({result.finish_reason}); "
        f"load {_number(t['load_s'])} s, prompt {_number(t['prefill_ms'])} ms, "
        f"{_number(t['tokens_per_second'])} tokens/s on {result.stats.backend}",
        f"{s.rounds} rounds, {_number(s.tokens_per_pass)} tokens per pass; drafts: {s.proposed} proposed, "
        f"{s.evaluated} evaluated, {s.accepted} accepted ({_number(s.acceptance_rate)} of the evaluated)",
    ]
    if s.per_position:
        lines.append("acceptance by position: " + " ".join(map(_number, s.per_position)))
    if len(s.by_source) > 1:
        parts = (f"{n.committed} tokens by {name}, {n.accepted} of {n.evaluated}" for name, n in s.by_source.items())
        lines.append("drafts: " + "; ".join(parts))
    if t["estimated_speedup"] is not None:
        lines.append(
            f"one row at a time would be about {_number(t['plain_tokens_per_second'])} tokens/s: "
            f"{_number(t['estimated_speedup'])}x"
        )
    if s.threshold is not None:
        lines.append(
            f"lossy: {s.threshold.lent} tokens lent, theta {s.threshold.start:.3f} to {s.threshold.theta:.3f}; "
            f"agreement with greedy decoding {_number(s.threshold.agreement, 4)}, mean log-probability gap "
            f"{_number(s.threshold.mean_gap, 4)}"
        )
    if s.fault_count:
        last = s.events[-1]
        lines.append(f"{s.fault_count} faults of the draft; last event: round {last['round']}, {last['reason']}")
    if s.off_reason:
        lines.append(f"speculation off: {s.off_reason}")
    if s.proposed and s.proposed < s.rounds:
        lines.append("fewer than one draft per round: the acceptance says little")
    memory = result.stats.memory
    if memory.budget is not None or memory.streamed_bytes:
        mb = lambda value: "-" if value is None else f"{value / 1e6:.1f} MB"
        lines.append(
            f"memory: budget {mb(memory.budget)}, weights resident {mb(memory.resident)}, "
            f"read for this request {mb(memory.streamed_bytes)}"
        )
    released = memory.released
    if released:
        steps = ", ".join(f"{step['step']} ({step['bytes'] / 1e6:.1f} MB)" for step in released)
        lines.append(f"memory was short; given back: {steps}")
    settings = {name: value for name, value in result.stats.settings.items() if value not in (None, [], {})}
    lines.append("settings: " + " ".join(f"{name}={value}" for name, value in settings.items()))
    return "\n".join(lines)


def _number(value, digits=2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
