"""Decoding with a target that streams: what a pass costs, and what speculation makes of it.

    python bench/bench_streamed.py [--limit BYTES_PER_S] [--tokens N] [--quick] [--json]

SmolLM2 in int8, none of it resident but the slots, read at most at ``--limit`` (500 MB/s). A pass then takes as long as
its bytes, whatever rows it has, so K drafts that are accepted with probability a make (1 - a^(K+1)) / (1 - a) tokens
per pass and that many times the speed: 3.36 for a = 0.8, K = 4. A scripted draft that is right with that probability
shows how much of it is left; then lookup on a task that repeats and on chat. Bytes per pass are the stream's own count.
"""

import argparse
import json
import random
import time

from specloop.controller import Auto, Fixed
from specloop.convert import cached_pack
from specloop.costs import measure_costs
from specloop.decode import decode
from specloop.drafts.lookup import LookupDraft
from specloop.faults import GuardedDraft
from specloop.formats.locate import find_model, open_checkpoint
from specloop.loader import load_pack
from specloop.measure import load_prompts
from specloop.options import check_request
from specloop.pair import Pair
from specloop.request import Request

ACCEPTANCE, K = 0.8, 4
SEEDS = 12  # texts of the scripted draft: one has too few rounds for its tokens per pass to be near their mean


class Scripted:
    """Proposes what is known to come, each token with probability ``acceptance``, else one that is wrong."""

    def __init__(self, script, vocab, acceptance, seed=0):
        self.script, self.vocab, self.acceptance = script, vocab, acceptance
        self.random = random.Random(seed)
        self.at = 0

    def begin(self, ids):
        self.at = len(ids)

    def append(self, ids):
        self.at += len(ids)

    def outlook(self):
        return 0, len(self.script) - self.at

    def propose(self, k):
        right = self.script[self.at : self.at + k]
        return [t if self.random.random() < self.acceptance else (t + 1) % self.vocab for t in right]


class Marked:
    """A controller that notes where each round begins."""

    def __init__(self, controller, note):
        self.controller, self.note, self.marks = controller, note, []

    def choose(self, outlook):
        self.marks.append(self.note())
        return self.controller.choose(outlook)

    def observe(self, *fate):
        self.controller.observe(*fate)

    def off_reason(self):
        return self.controller.off_reason()


def timed(model, ids, tokens, draft, controller):
    """Decodes, and counts from the second round to the last."""
    stats = lambda: model.weights.stream.stats
    marked = Marked(controller, lambda: (time.perf_counter(), len(request.ids), stats()))
    limit = len(ids) + tokens
    request = Request(list(ids), limit, model.new_cache(limit), GuardedDraft(draft, model.vocab_size), marked)
    for _ in decode(model, [request]):
        pass
    # The first round waits for the prompt's pass; with so few rounds that nothing else is left it has to do.
    (start, first, before), (end, last, after) = marked.marks[1 if len(marked.marks) > 2 else 0], marked.marks[-1]
    if last == first:
        raise SystemExit(f"--tokens: expected enough for two rounds, got {tokens}")
    return {
        "ids": request.ids,
        "seconds": end - start,
        "tokens": last - first,
        "passes": after.passes - before.passes,
        "bytes": after.streamed_bytes - before.streamed_bytes,
        "waiting": after.wait_seconds - before.wait_seconds,
    }


def ratios(runs):
    """Of several runs together."""
    total = {name: sum(run[name] for run in runs) for name in ("seconds", "tokens", "passes", "bytes", "waiting")}
    return {
        "seconds_per_token": total["seconds"] / total["tokens"],
        "tokens_per_pass": total["tokens"] / total["passes"],
        "bytes_per_pass": total["bytes"] / total["passes"],
        "wait": total["waiting"] / total["seconds"],
    }


def open_model(limit, budget):
    with open_checkpoint(find_model("smollm2")) as checkpoint:
        path = cached_pack(checkpoint)
    reader = {"limit": limit} if limit else {}
    return load_pack(
        path, dtype="int8", kv="int8", context=2048, device="cpu", memory_budget=budget, name="smollm2", reader=reader
    )


def smallest(path_budget=1):
    try:
        open_model(None, path_budget)
    except ValueError as error:
        return int(str(error).split("at least ")[1].split()[0])
    raise SystemExit("a budget of one byte was accepted")


def prompt_ids(pair, category):
    return pair.encode(load_prompts([category], 1)[0]["prompt"], check_request())


def measure(limit, tokens, seeds=SEEDS):
    model, tokenizer, template = open_model(limit, smallest() + (4 << 20))
    pair = Pair(lambda: (model, tokenizer, template), draft="none")
    costs = measure_costs(model)
    found = []

    def add(task, way, runs, base=None):
        row = ratios(runs) | {"task": task, "way": way, "speedup": None, "same": None}
        if base is not None:
            row["speedup"] = ratios([base])["seconds_per_token"] / row["seconds_per_token"]
            row["same"] = all(base["ids"] == run["ids"] for run in runs)
        found.append(row)

    for task in ("chat", "repeat"):
        ids = prompt_ids(pair, task)
        plain = timed(model, ids, tokens, None, Fixed(0))
        script = lambda acceptance, seed=0, plain=plain: Scripted(plain["ids"], model.vocab_size, acceptance, seed)
        add(task, "plain", [plain])
        if task == "chat":
            runs = [timed(model, ids, tokens, script(ACCEPTANCE, seed), Fixed(K)) for seed in range(seeds)]
            add(task, f"scripted, K = {K}", runs, plain)
            for k in (1, 8):
                add(task, f"always right, K = {k}", [timed(model, ids, tokens, script(1.0), Fixed(k))], plain)
        add(task, "lookup", [timed(model, ids, tokens, LookupDraft(max_tokens=len(costs)), Auto(costs))], plain)
    bytes_per_pass = model.weights.stream.plan.bytes_per_pass
    engine = model.weights.stream.stats.engine
    model.close()
    return {"bytes_per_pass": bytes_per_pass, "engine": engine, "limit": limit, "rows": found}


def table(report):
    size, limit = report["bytes_per_pass"], report["limit"]
    lines = [
        f"{size / 1e6:.1f} MB per pass by {report['engine']}, {limit / 1e6:.0f} MB/s: {size / limit * 1e3:.0f} ms",
        f"{'task':8}{'way':20}{'ms/token':>10}{'tok/pass':>10}{'speed-up':>10}{'MB/pass':>10}{'waiting':>9}{'same':>6}",
    ]
    for r in report["rows"]:
        speed = "-" if r["speedup"] is None else f"{r['speedup']:.2f}x"
        same = "-" if r["same"] is None else "yes" if r["same"] else "NO"
        lines.append(
            f"{r['task']:8}{r['way']:20}{r['seconds_per_token'] * 1e3:>10.1f}{r['tokens_per_pass']:>10.2f}{speed:>10}"
            f"{r['bytes_per_pass'] / 1e6:>10.1f}{r['wait']:>9.0%}{same:>6}"
        )
        if r["way"].startswith("scripted"):
            lines.append(f"{'':8}of what its tokens per pass allow: {r['speedup'] / r['tokens_per_pass']:.1%}")
    expected = (1 - ACCEPTANCE ** (K + 1)) / (1 - ACCEPTANCE)
    lines.append(f"by arithmetic, acceptance {ACCEPTANCE}, K = {K}: {expected:.2f} tokens per pass")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=float, default=500e6, help="bytes per second")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--quick", action="store_true", help="fewer tokens, a faster file")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.limit, options.tokens = 2e9, 32
    report = measure(options.limit, options.tokens, 1 if options.quick else SEEDS)
    print(json.dumps(report) if options.json else table(report))


if __name__ == "__main__":
    main()
