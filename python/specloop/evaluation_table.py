"""A report of :func:`specloop.evaluate.run`, for people."""

from __future__ import annotations

from .tables import number, render, span


def differing(report) -> list[str]:
    """Where ids at T = 0 were not plain decoding's: nowhere, or something is broken."""
    return [_where(c) for c in report["cells"] if c["same_tokens"] is False and c["category"] != "all"]


def _where(c):
    return f"{c['draft']}, K {c['k']}, penalty {c['repetition_penalty']:g}, {c['category']}"


SHOWN = 4  # positions of drafts
HEAD = (
    "draft", "K", "T", "penalty", "category", "pairs", "speed-up", "interval", "plain/plain", "tok/pass", "drafts",
    "accepted", "by position", "draft ms", "verify ms", "plain ms", "same ids",
)  # fmt: skip


def table(report) -> str:
    """All cells, then what the drafts were and how often they failed."""
    settings, groups = report["settings"], {}
    title = [settings.get("model"), settings.get("dtype"), report["backend"]]
    title = f"{', '.join(str(part) for part in title if part)}; answers of up to {settings['max_new_tokens']} tokens; "
    title += "milliseconds per round, of plain decoding per token"
    for c in report["cells"]:
        groups.setdefault((c["draft"], c["k"], c["temperature"], c["repetition_penalty"]), []).append(_row(c))
    lines = [title, render(HEAD, groups.values(), left=("draft", "category", "by position"))]
    for d in report["drafts"]:
        if d["bytes"] is not None:
            share = number(d["share_of_target"] and 100 * d["share_of_target"], 1)
            lines.append(
                f"draft {d['draft']}: {d['path']}, {d['bytes'] / 1e6:.1f} MB, {share} % of the target's weights"
            )
    faults = sum(c["speculation"]["fault_count"] for c in report["cells"] if c["category"] != "all")
    return "\n".join(lines + [f"{faults} faults of drafts; their rounds went on without"] * bool(faults))


def _row(c):
    positions, drafts = c["per_position"], c["speculation"]["mean_draft_length"]
    return (
        c["draft"],
        str(c["k"]),
        f"{c['temperature']:g}",
        f"{c['repetition_penalty']:g}",
        c["category"],
        str(c["pairs"]),
        number(c["speedup"]),
        span(c["speedup_interval"]),
        f"{number(c['noise'])} ({span(c['noise_interval'])})",
        number(c["tokens_per_pass"]),
        number(drafts),
        number(c["acceptance_rate"]),
        " ".join(map(number, positions[:SHOWN])) + (" .." if len(positions) > SHOWN else "") or "-",
        number(c["draft_ms"]),
        number(c["verify_ms"]),
        number(c["plain_ms_per_token"]),
        {True: "yes", False: "NO", None: "-"}[c["same_tokens"]],
    )
