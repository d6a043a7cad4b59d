"""Plain and speculative decoding of the same prompts, taking turns in one process.

Per prompt and repetition: plain, speculative, plain again (and llama.cpp, if llama-cpp-python is installed), in
rotating order. The speed-up is the median over prompts of plain time / speculative time, decoding only; plain / plain
again, taken the same way, is the noise: an effect inside its interval is no effect.
"""

from __future__ import annotations

import importlib.util

from .checks import integer
from .measure import interval, median, take_turns
from .plot import trace
from .tables import number, render, span


def run(pair, prompts, *, model="", draft="auto", k="auto", max_new_tokens=64, repeat=1, progress=None) -> dict:
    """Measures; the report is what ``--json`` prints."""
    from .options import check_request

    integer("repeat", repeat, 1)
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
    rows, runs = [], {}
    for n in range(repeat):
        for i, prompt in enumerate(prompts):
            results = take_turns(sides, prompt["prompt"], i + n)
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
    of = lambda name: [row[name] for row in rows]
    names = ("plain_tokens_per_second", "speculative_tokens_per_second", "llama_tokens_per_second", "speedup")
    return {
        "prompts": len(rows),
        "same_tokens": all(row["same_tokens"] for row in rows),
        **{name: median(of(name)) for name in (*names, "tokens_per_pass", "acceptance_rate")},
        "speedup_interval": interval(of("speedup")),
        "noise": median(of("noise")),
        "noise_interval": interval(of("noise")),
    }


def table(report) -> str:
    """The report for people; tokens per second, medians."""
    a = report["all"]
    head = ("category", "prompts", "plain", "spec", "llama.cpp", "speed-up", "interval", "tok/pass", "accepted", "same")
    rows = [
        (
            name,
            str(t["prompts"]),
            number(t["plain_tokens_per_second"], 1),
            number(t["speculative_tokens_per_second"], 1),
            number(t["llama_tokens_per_second"], 1),
            number(t["speedup"]),
            span(t["speedup_interval"]),
            number(t["tokens_per_pass"]),
            number(t["acceptance_rate"]),
            "yes" if t["same_tokens"] else "NO",
        )
        for name, t in [*report["categories"].items(), ("all", a)]
    ]
    if report["llama.cpp"] is None:
        head, *rows = [(*row[:4], *row[5:]) for row in (head, *rows)]
    return f"plain against itself: {number(a['noise'])} ({span(a['noise_interval'])})\n{render(head, [rows])}"


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
