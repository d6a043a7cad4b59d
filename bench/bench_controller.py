"""Does the automatic draft length find the best one, and never cost much? On the real model, with lookup.

    python bench/bench_controller.py [--tokens N] [--rounds N] [--cpu-time] [--quick] [--json]

1. Five workloads, each decoded plainly (twice: against itself it is the noise), with every fixed K and with K chosen
   automatically, all taking turns. Per way the median over all turns of its time per token, and the median of the
   pairs' ratios to the automatic one: above 1 = slower than it.
2. A draft that is always wrong, against plain decoding.
3. A text of two halves, one that repeats itself and one of random ids, said by the real model's passes with its logits
   replaced: after how many rounds K has followed.

``--cpu-time`` takes one thread and its own clock: on a machine that others use, where seconds say little.
``--texts FILE`` writes what plain decoding says in the five workloads instead: tests/test_draft_lengths.py plays it
with given costs, on which no other program on the machine has an influence.

Exit code 1 (not with --quick) if the best fixed K is more than 5 % faster than the automatic one, if plain decoding is
more than 3 % faster, if the wrong draft costs more than 5 %, or if K takes more than ten rounds.
"""

import argparse
import json
import pathlib
import random
import statistics
import sys
import time

import torch

from specloop.controller import Auto, Fixed
from specloop.costs import CostCurve, measure
from specloop.decode import decode
from specloop.drafts.lookup import LookupDraft
from specloop.faults import GuardedDraft
from specloop.measure import interval, load_prompts
from specloop.options import check_request
from specloop.pair import load
from specloop.request import Request

FIXED = (1, 2, 3, 4, 6, 8)
WITHIN, LEAST_SPEED, WRONG_COST, FOLLOWS = 1.05, 0.97, 1.05, 10
PHRASE = 16  # ids


def workloads(vocab_size):
    """name -> (prompts, options)."""
    of = lambda *categories: [p["prompt"] for p in load_prompts(categories)]
    ids = random.Random(0)
    noise = [[ids.randrange(200, vocab_size) for _ in range(100)] for _ in range(4)]
    return {
        "repeat and edit": (of("repeat", "edit"), {"temperature": 0.0}),
        "chat, T = 0": (of("chat"), {"temperature": 0.0}),
        "chat, T = 1": (of("chat"), {"temperature": 1.0}),
        "code": (of("code"), {"temperature": 0.0}),
        "random text": (noise, {"temperature": 1.0, "chat": False}),
    }


def plain_texts(pair, tokens=128):
    """workload -> [[ids of the prompt, ids of the text], ...]."""
    texts = {}
    for name, (prompts, options) in workloads(pair.model.vocab_size).items():
        texts[name] = []
        for seed, prompt in enumerate(prompts):
            text = pair.generate(prompt, max_new_tokens=tokens, seed=seed, draft="none", **options).tokens
            texts[name].append([pair.encode(prompt, check_request(**options)), text])
    return texts


def seconds_per_token(pair, prompt, clock, **options):
    """Of decoding, from the first token on."""
    stream = pair.stream(prompt, **options)
    next(stream)
    start = clock()
    tokens = sum(event.token is not None for event in stream)
    return (clock() - start) / max(tokens, 1)


def compare(pair, prompts, options, ways, rounds, tokens, clock):
    """way -> seconds per token of each turn."""
    taken = {name: [] for name in ways}
    names = list(ways)
    for n in range(-1 if rounds > 1 else 0, rounds):  # the first is a warm-up
        prompt = prompts[n % len(prompts)]
        for name in names[n % len(names) :] + names[: n % len(names)]:
            seconds = seconds_per_token(pair, prompt, clock, max_new_tokens=tokens, seed=n + 1, **options, **ways[name])
            if n >= 0:
                taken[name].append(seconds)
    return taken


def report(name, taken):
    base, ratios = taken["auto"], {}
    for way, seconds in taken.items():
        pairs = [b / a for a, b in zip(base, seconds, strict=True)]
        ratios[way] = {"ms_per_token": 1e3 * statistics.median(seconds), "ratio": statistics.median(pairs)}
        ratios[way]["interval"] = interval(pairs)
    noise = [a / b for a, b in zip(taken["plain"], taken["again"], strict=True)]
    best = min((way for way in ratios if way.isdigit() or way == "plain"), key=lambda way: ratios[way]["ratio"])
    return {
        "workload": name,
        "best": best,
        "auto_over_best": 1 / ratios[best]["ratio"],
        "speed_over_plain": ratios["plain"]["ratio"],
        "plain_interval": ratios["plain"]["interval"],
        "noise": interval(noise),
        "ways": ratios,
    }


class Prescribed:
    """The model's passes, and a text that it says whatever they result in."""

    def __init__(self, model, text):
        self.model, self.text = model, text
        self.vocab_size, self.context, self.eos_ids, self.name = model.vocab_size, model.context, frozenset(), "text"

    def new_cache(self, capacity):
        return self.model.new_cache(capacity)

    def forward(self, tokens, cache, *, last):
        logits = self.model.forward(tokens, cache, last=last)
        for row, at in enumerate(range(cache.length - last + 1, cache.length + 1)):
            logits[row, self.text[at] if at < len(self.text) else 0] = 1e4
        return logits


class Wrong:
    """Proposes what the text does not say."""

    name, timely = "wrong", True

    def __init__(self, text, vocab_size):
        self.text, self.vocab_size, self.at = text, vocab_size, 0

    def begin(self, ids):
        self.at = len(ids)

    def append(self, ids):
        self.at += len(ids)

    def outlook(self):
        return 0, 8

    def propose(self, k):
        following = self.text[self.at : self.at + k]
        return [(token + 1) % self.vocab_size for token in following]


class Noted(Auto):
    """Remembers (emitted ids before the round, K)."""

    def __init__(self, costs):
        super().__init__(costs)
        self.rounds, self.at = [], 0

    def observe(self, outlook, proposed, accepted, *cost):
        super().observe(outlook, proposed, accepted, *cost)
        self.rounds.append((self.at, proposed))
        self.at += accepted + 1


def say(model, text, draft, controller, tokens, clock=time.perf_counter):
    """(seconds, request) of making ``tokens`` ids of the text after its first."""
    limit = min(1 + tokens, len(text))
    guarded = GuardedDraft(draft, model.vocab_size)
    request = Request([text[0]], limit, model.new_cache(limit), guarded, controller, max_fallbacks=limit)
    start = clock()
    for _ in decode(Prescribed(model, text), [request]):
        pass
    return clock() - start, request


def wrong_draft(pair, rounds, tokens, clock):
    model, rng = pair.model, random.Random(1)
    text = [rng.randrange(200, model.vocab_size) for _ in range(tokens + 1)]
    ratios, noise = [], []
    for n in range(-1, rounds):
        plainly = lambda: say(model, text, None, Fixed(0), tokens, clock)
        drafted = lambda: say(model, text, Wrong(text, model.vocab_size), Auto(pair.costs), tokens, clock)
        runs = [plainly, drafted, plainly] if n % 2 else [drafted, plainly, plainly]
        seconds = [run()[0] for run in runs]
        a, b, c = seconds if n % 2 else (seconds[1], seconds[0], seconds[2])
        if n >= 0:
            ratios.append(b / a)
            noise.append(c / a)
    return {"cost": statistics.median(ratios), "interval": interval(ratios), "noise": interval(noise)}


def followed(pair, half):
    """order -> rounds until K has followed: it is 4 at least, or 0 in 9 of 10 rounds."""
    model, found = pair.model, {}
    rng = random.Random(2)
    phrase = [rng.randrange(200, model.vocab_size) for _ in range(PHRASE)]
    repeats = (phrase * (half // PHRASE + 1))[:half]
    noise = [rng.randrange(200, model.vocab_size) for _ in range(half)]
    for name, text in (("repeats, then random", repeats + noise), ("random, then repeats", noise + repeats)):
        controller = Noted(pair.costs)
        say(model, [0, *text], LookupDraft(), controller, 2 * half)
        turn = half + (PHRASE if name.startswith("random") else 0)  # nothing to find before the second time
        ks = [k for at, k in controller.rounds if turn <= at < 2 * half - 9]  # the end leaves no room for more
        if name.startswith("random"):
            done = next((i for i, k in enumerate(ks) if k >= 4 and min(ks[i:]) >= 3), None)
        else:
            done = next((i for i in range(len(ks)) if ks[i:].count(0) >= 0.9 * len(ks[i:])), None)
        found[name] = {"rounds": done, "ks": ks[:20]}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--workload", action="append", help="only this one; may be repeated")
    parser.add_argument("--cpu-time", action="store_true", help="one thread, by its own clock")
    parser.add_argument("--texts", help="write the workloads' texts to this file")
    parser.add_argument("--quick", action="store_true", help="a few tokens, to see that it works")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rounds, tokens, fixed = (1, 8, (2,)) if given.quick else (given.rounds, given.tokens, FIXED)
    clock = time.process_time if given.cpu_time else time.perf_counter
    pair = load("smollm2", threads=1 if given.cpu_time else None)
    pair.ready()
    if given.cpu_time:
        pair._target.version.costs = CostCurve.given(measure(pair.model, budget=2.0, clock=clock)[0])
    if given.texts:
        pathlib.Path(given.texts).write_text(json.dumps(plain_texts(pair), separators=(",", ":")), encoding="ascii")
        return
    ways = {"plain": {"draft": "none"}, "again": {"draft": "none"}, **{str(k): {"k": k} for k in fixed}, "auto": {}}
    result = {"costs_ms": [1e3 * s for s in pair.costs.measured], "workloads": []}
    if not given.json:
        print("ms per rows: " + "  ".join(f"{n}: {ms:.2f}" for n, ms in enumerate(result["costs_ms"], 1)))
    for name, (prompts, options) in workloads(pair.model.vocab_size).items():
        if (given.workload and name not in given.workload) or (given.quick and "chat" in name):
            continue
        row = report(name, compare(pair, prompts, options, ways, rounds, tokens, clock))
        result["workloads"].append(row)
        if not given.json:
            low, high = row["noise"]
            times = "  ".join(f"{way}: {w['ms_per_token']:.2f} ({w['ratio']:.2f})" for way, w in row["ways"].items())
            print(f"{name}: plain against itself {low:.3f} to {high:.3f}; best fixed K: {row['best']}, automatic")
            print(f"  takes {row['auto_over_best']:.3f} of its time, {row['speed_over_plain']:.3f} times plain's speed")
            print(f"  ms per token (over the automatic one's): {times}")
    result["wrong draft"] = wrong_draft(pair, rounds, tokens, clock)
    result["follows"] = followed(pair, 64 if given.quick else 200)
    bad = [row["workload"] for row in result["workloads"] if row["auto_over_best"] > WITHIN]
    bad += [row["workload"] for row in result["workloads"] if row["speed_over_plain"] < LEAST_SPEED]
    bad += ["wrong draft"] if result["wrong draft"]["cost"] > WRONG_COST else []
    bad += [n for n, f in result["follows"].items() if f["rounds"] is None or f["rounds"] > FOLLOWS]
    if given.json:
        print(json.dumps(result | {"missed": bad}))
    else:
        cost = result["wrong draft"]
        low, high = cost["interval"]
        print(f"a draft that is always wrong takes {cost['cost']:.3f} ({low:.3f} to {high:.3f}) of plain's time")
        for name, found in result["follows"].items():
            print(f"{name}: K follows after {found['rounds']} rounds: {found['ks']}")
        print(f"missed: {', '.join(dict.fromkeys(bad)) or 'nothing'}")
    sys.exit(1 if bad and not given.quick else 0)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
