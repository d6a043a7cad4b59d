"""Plain and speculative decoding of the same prompts, taking turns in one process.

Per prompt and repetition: plain, speculative, plain again (and llama.cpp, if llama-cpp-python is installed), in
rotating order. The speed-up is the median over prompts of plain time / speculative time, decoding only; plain / plain
again, taken the same way, is the noise: an effect inside its interval is no effect.
"""

from __future__ import annotations

import importlib.util
import json
import random
import statistics
from importlib import resources

from .errors import OptionError
from .plot import trace


def load_prompts(categories=(), most=None) -> list[dict]:
    """The shipped prompts: 20 in five categories."""
    prompts = json.loads(resources.files(__package__).joinpath("data/prompts.json").read_text(encoding="utf-8"))
    known = list(dict.fromkeys(p["category"] for p in prompts))
    for category in categories:
        if category not in known:
            raise OptionError(f"category: expected one of {', '.join(known)}, got {category!r}")
    if most is not None and most < 1:
        raise OptionError(f"prompts: expected an integer >= 1, got {most}")
    chosen = []
    for category in known:
        if not categories or category in categories:
            chosen += [p for p in prompts if p["category"] == category][:most]
    return chosen


def run(pair, prompts, *, model="", draft="auto", k="auto", max_new_tokens=64, repeat=1, progress=None) -> dict:
    """Measures; the report is what ``--json`` prints."""
    from .options import check_request

    if repeat < 1:
        raise OptionError(f"repeat: expected an integer >= 1, got {repeat}")
    check_request(draft=draft, k=k, max_new_tokens=max_new_tokens, loaded=pair.draft)
    options = {"max_new_tokens": max_new_tokens, "temperature": 0.0}
    sides = {
        "plain": lambda p: pair.generate(p, **options, draft="none"),
        "speculative": lambda p: pair.generate(p, **options, draft=draft, k=k),
        "again": lambda p: pair.generate(p, **options, draft="none"),
    }
    llama = _Llama.open(pair, model, max_new_tokens)
    if llama:
        sides["llama.cpp"] = llama.generate
    for side in sides.values():  # the first call of each pays for what is made once
        side(prompts[0]["prompt"])
    rows, names, runs = [], list(sides), {}
    for n in range(repeat):
        for i, prompt in enumerate(prompts):
            turn = (i + n) % len(names)
            results = {name: sides[name](prompt["prompt"]) for name in names[turn:] + names[:turn]}
            rows.append(_row(prompt, results))
            runs.setdefault(prompt["category"], trace(results["speculative"].stats.speculation))
            if progress:
                progress("measuring", (n * len(prompts) + i + 1) / (repeat * len(prompts)))
    if progress:
        progress(None, 1.0)
    categories = list(dict.fromkeys(row["category"] for row in rows))
    return {
        "settings": {"draft": draft, "k": k, "max_new_tokens": max_new_tokens, "repeat": repeat, **pair.settings},
        "row_costs_ms": None if draft == "none" else [seconds * 1e3 for seconds in pair.costs],
        "categories": {c: _total([row for row in rows if row["category"] == c]) for c in categories},
        "all": _total(rows),
        "llama.cpp": llama.version if llama else None,
        "prompts": rows,
        "runs": runs,  # the rounds of the first speculative run of each category
    }


def _row(prompt, results):
    plain, spec, again = (results[name] for name in ("plain", "speculative", "again"))
    seconds = {name: result.stats.timing.decode_seconds for name, result in results.items()}
    counts = spec.stats.speculation
    return {
        "category": prompt["category"],
        "prompt": prompt["prompt"][:60],
        "tokens": len(plain.tokens),
        "same_tokens": plain.tokens == spec.tokens == again.tokens,
        "plain_tokens_per_second": _rate(plain),
        "speculative_tokens_per_second": _rate(spec),
        "llama_tokens_per_second": _rate(results.get("llama.cpp")),
        "speedup": seconds["plain"] / seconds["speculative"] if seconds["speculative"] else None,
        "noise": seconds["plain"] / seconds["again"] if seconds["again"] else None,
        "tokens_per_pass": counts.tokens_per_pass,
        "acceptance_rate": counts.acceptance_rate,
        "off_reason": counts.off_reason,
    }


def _rate(result):
    if result is None or not result.tokens or not result.stats.timing.decode_seconds:
        return None
    return len(result.tokens) / result.stats.timing.decode_seconds


def _total(rows):
    def median(name):
        values = [row[name] for row in rows if row[name] is not None]
        return statistics.median(values) if values else None

    names = ("plain_tokens_per_second", "speculative_tokens_per_second", "llama_tokens_per_second", "speedup")
    return {
        "prompts": len(rows),
        "same_tokens": all(row["same_tokens"] for row in rows),
        **{name: median(name) for name in (*names, "tokens_per_pass", "acceptance_rate")},
        "speedup_interval": interval([row["speedup"] for row in rows if row["speedup"]]),
        "noise": median("noise"),
        "noise_interval": interval([row["noise"] for row in rows if row["noise"]]),
    }


def interval(values, draws=1000):
    """Bootstrap 95 % interval of the median, or None if there is nothing to draw from."""
    if not values:
        return None
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(draws))
    return [medians[int(0.025 * draws)], medians[int(0.975 * draws)]]


def table(report) -> str:
    """The report for people; tokens per second, medians."""
    a = report["all"]
    low, high = a["noise_interval"] or (float("nan"), float("nan"))
    lines = [f"plain against itself: {_text(a['noise'])} ({low:.2f} to {high:.2f})"]
    head = ("category", "prompts", "plain", "spec", "llama.cpp", "speed-up", "interval", "tok/pass", "accepted", "same")
    rows = [head]
    for name, t in [*report["categories"].items(), ("all", a)]:
        span = t["speedup_interval"]
        rows.append(
            (
                name,
                str(t["prompts"]),
                _text(t["plain_tokens_per_second"], 1),
                _text(t["speculative_tokens_per_second"], 1),
                _text(t["llama_tokens_per_second"], 1),
                _text(t["speedup"]),
                f"{span[0]:.2f}-{span[1]:.2f}" if span else "-",
                _text(t["tokens_per_pass"]),
                _text(t["acceptance_rate"]),
                "yes" if t["same_tokens"] else "NO",
            )
        )
    if report["llama.cpp"] is None:
        rows = [(*row[:4], *row[5:]) for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(lines)


def _text(value, digits=2):
    return "-" if value is None else f"{value:.{digits}f}"


class _Llama:
    """llama.cpp on the same file and the same prompt ids, if llama-cpp-python is installed."""

    def __init__(self, pair, path, max_new_tokens):
        import llama_cpp
        import torch

        self.pair, self.max_new_tokens, self.version = pair, max_new_tokens, llama_cpp.__version__
        threads = pair.settings.get("threads") or torch.get_num_threads()
        context = pair.settings.get("context", 2048)
        self.model = llama_cpp.Llama(str(path), n_ctx=context, n_threads=threads, verbose=False)

    @classmethod
    def open(cls, pair, model, max_new_tokens):
        if not model or importlib.util.find_spec("llama_cpp") is None:
            return None
        from .formats.locate import find_model

        return cls(pair, find_model(model), max_new_tokens)

    def generate(self, prompt):
        import time

        from .options import check_request
        from .session import Result
        from .stats import Stats

        ids = self.pair.encode(prompt, check_request())
        stats, tokens = Stats(), []
        self.model.reset()
        self.model.eval(ids[:-1])  # as ours: the pass over the last prompt id counts as decoding
        start = time.perf_counter()
        for token in self.model.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0):
            tokens.append(token)
            if token in self.pair.model.eos_ids or len(tokens) == self.max_new_tokens:
                break
        stats.timing.decode_seconds = time.perf_counter() - start
        return Result("", tokens, None, stats)
