"""Memory budgets, kept and proven: what a process owns at most, sampled from another one, and the text it makes.

    python bench/bench_budget.py [--tokens N] [--quick] [--json]

First, SmolLM2 in int8 with an int8 cache of 512 tokens under budgets of 30, 50 and 90 % of its weights, against the
same model resident: peak of anonymous and shared memory over that of a process that imported torch and tokenizers and
ran one operation; the ids have to be the same. Then the headline: bf16 resident, int8 resident and int8 streamed with a
context of 2,048, half of which is read as a prompt; MB = 10^6 bytes. Speed is that of decoding after the prompt, plain.
At last, what a second process over the same pack adds to the memory of the machine (PSS), beyond what a bare one adds.
"""

import argparse
import json
from contextlib import ExitStack
from statistics import median

from watched import BARE, private, shares, waiting, watch

from specloop.convert import cached_pack
from specloop.formats.locate import find_model, open_checkpoint

SLACK = 60e6  # bytes over the bare process that a budget need not count: interpreter, tokenizer, code

RUN = """
import json, sys
import specloop
options, prompt, tokens = json.loads(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
pair = specloop.load("smollm2", draft="none", **options)
result = pair.generate(prompt, max_new_tokens=tokens, chat=False if isinstance(prompt, list) else None)
print(json.dumps(result.as_dict() | {"weights": pair.model.weights_nbytes}))
"""

LONG = list(range(1000, 2000)) + list(range(1000, 1024))  # 1,024 ids: half of the context


def run(options, prompt, tokens):
    seen = watch(RUN, json.dumps(options), json.dumps(prompt), tokens)
    return seen, json.loads(seen.output)


def budgets(bare, tokens):
    prompt = "Write one sentence about the sea."
    options = {"context": 512, "kv": "int8"}
    seen, resident = run(options, prompt, tokens)
    weights = resident["weights"]
    yield row("resident", None, seen, bare, resident, True)
    for share in (0.3, 0.5, 0.9):
        budget = int(share * weights)
        seen, result = run(options | {"memory_budget": budget}, prompt, tokens)
        yield row(f"{share:.0%}", budget, seen, bare, result, result["tokens"] == resident["tokens"])


def headline(bare, tokens):
    ways = {
        "bf16 resident": {"dtype": "bf16", "kv": "f16"},
        "int8 resident": {},
        "int8 streamed": {"memory_budget": "55MB"},
    }
    for name, options in ways.items():
        seen, result = run({"context": 2048, "kv": "int8"} | options, LONG, tokens)
        yield row(name, result["memory"]["budget"], seen, bare, result, None)


SHARE = """
import sys
import specloop
pair = specloop.load(sys.argv[1], draft="none", context=512)
pair.generate("Write one sentence about the sea.", max_new_tokens=8)
"""


PASSES = """
import sys, torch
from specdec_kernels import Int8Weight, linear_int8
from specdec_kernels.stream import WeightStream, plan
stream = WeightStream(sys.argv[1], plan(sys.argv[1]))
for block in stream.blocks():
    for weight in block.tensors.values():
        if isinstance(weight, Int8Weight):
            linear_int8(torch.ones(1, weight.k), weight)
"""


def sharing(rounds=5):
    """{"weights", "decoder", "passes"}: bytes of the pack, and what one more process adds beyond a bare one.

    A whole decoder; one that only multiplies by the weights. Medians of (PSS of all together, its private pages).
    """
    with open_checkpoint(find_model("smollm2")) as checkpoint:
        pack = cached_pack(checkpoint)
    added = {"decoder": [], "passes": []}
    with ExitStack() as running:
        pids = [running.enter_context(waiting(BARE)), running.enter_context(waiting(SHARE, pack))]
        for _ in range(rounds):
            total = {}
            for name, code in (("decoder", SHARE), ("passes", PASSES), ("bare", BARE)):
                with waiting(code, pack) as pid:
                    total[name] = shares(*pids, pid), private(pid)
            for name, values in added.items():
                values.append([more - bare for more, bare in zip(total[name], total["bare"], strict=True)])
    medians = {name: [median(column) for column in zip(*values, strict=True)] for name, values in added.items()}
    return {"weights": pack.stat().st_size} | medians


def row(name, budget, seen, bare, result, same):
    return {
        "name": name,
        "budget": budget,
        "owned": seen.owned - bare.owned,
        "resident": seen.resident - bare.resident,
        "kept": None if budget is None else seen.owned - bare.owned <= budget + SLACK,
        "same_ids": same,
        "streamed_bytes": result["memory"]["streamed_bytes"],
        "tokens_per_second": result["timing"]["tokens_per_second"],
    }


def table(rows):
    mb = lambda value: "-" if not value else f"{value / 1e6:.1f}"
    yes = lambda value: "-" if value is None else "yes" if value else "NO"
    lines = [f"{'':14}{'budget':>9}{'owned':>9}{'resident':>10}{'streamed':>10}{'tok/s':>8}{'kept':>6}{'same':>6}"]
    for r in rows:
        speed = r["tokens_per_second"]
        lines.append(
            f"{r['name']:14}{mb(r['budget']):>9}{mb(r['owned']):>9}{mb(r['resident']):>10}"
            f"{mb(r['streamed_bytes']):>10}{speed:>8.1f}{yes(r['kept']):>6}{yes(r['same_ids']):>6}"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=48, help="tokens to make")
    parser.add_argument("--quick", action="store_true", help="fewer tokens")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tokens = 8 if options.quick else options.tokens
    bare = min((watch(BARE) for _ in range(3)), key=lambda seen: seen.owned)
    kept, ways, shared = list(budgets(bare, tokens)), list(headline(bare, tokens)), sharing()
    if options.json:
        print(json.dumps({"bare": bare.owned, "budgets": kept, "headline": ways, "sharing": shared}))
        return
    print(f"bare process: owns {bare.owned / 1e6:.1f} MB; below in MB over it\n")
    print(table(kept), table(ways), sep="\n\n")
    most = ways[0]["owned"]
    shares = ", ".join(f"{r['name']} {r['owned'] / most:.0%}" for r in ways[1:])
    print(f"\nof {ways[0]['name']}: {shares}; int8 / bf16 in tokens per second:", end=" ")
    print(f"{ways[1]['tokens_per_second'] / ways[0]['tokens_per_second']:.2f}")
    print("\na second process over the same pack, beyond what a bare one adds:")
    for name, what in (("decoder", "a whole decoder"), ("passes", "one that only multiplies by the weights")):
        more, own = shared[name]
        print(f"  {what}: {more / 1e6:.1f} MB, {more / shared['weights']:.1%} of the weights", end="; ")
        print(f"private pages {own / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
