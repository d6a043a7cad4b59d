"""What the lossy rule "threshold" costs in truth and brings in speed, on the real model with lookup.

    python bench/bench_threshold.py [--prompts N] [--edits N] [--tokens N] [--quick] [--json]

1. Agreement: the share of emitted tokens that are the target's argmax given the text before them, over the shipped
   prompts. Nothing of the decoder is believed: a plain pass over prompt and answer gives the row before each token.
   With it the mean gap in log-probability between that argmax and the token that was emitted.
2. Speed over the lossless rule: tokens per second of decoding, taking turns, the median of the pairs' ratios. Lossless
   against itself, taken the same way, is the noise.
3. BLEU of the lossy and of the lossless texts on the shipped copy edits, which have references; their difference with
   a bootstrap interval over edits (both texts of an edit are drawn together).

Exit code 1 if agreement is below 98 % or the BLEU of the texts differs by 0.3 points or more.
"""

import argparse
import json
import random
import statistics
import sys
from importlib import resources

import torch

from specloop.bench import interval
from specloop.options import check_request
from specloop.pair import load

SET_POINT, MOST_BLEU = 0.98, 0.3
CHUNK = 256  # rows per pass over a prompt


def shipped(name):
    return json.loads(resources.files("specloop").joinpath(f"data/{name}.json").read_text(encoding="utf-8"))


def spread(items, n):
    """``n`` of them, evenly."""
    return items if n >= len(items) else [items[i * len(items) // n] for i in range(n)]


def judge(pair, ids, tokens):
    """Per token whether it is the argmax of the row before it, and how much more log-probability the argmax has."""
    model, text = pair.model, [*ids, *tokens[:-1]]
    cache, first = model.new_cache(len(text)), len(ids) - 1
    for start in range(0, first, CHUNK):
        model.forward(text[start : min(start + CHUNK, first)], cache, last=0)
    agreed, gaps = [], []
    for start in range(first, len(text), CHUNK):
        part = text[start : start + CHUNK]
        logs = torch.log_softmax(model.forward(part, cache, last=len(part)).float(), -1)
        said = torch.tensor(tokens[start - first : start - first + len(part)])
        agreed += (logs.argmax(-1) == said).tolist()
        gaps += (logs.max(-1).values - logs.gather(1, said[:, None])[:, 0]).tolist()
    return agreed, gaps


def rate(result):
    seconds = result.stats.timing.decode_seconds
    return len(result.tokens) / seconds if result.tokens and seconds else None


def play(pair, prompts, tokens, draft):
    """Each prompt lossless, lossy and lossless again, in turning order."""
    sides = {"lossless": {}, "lossy": {"rule": "threshold"}, "again": {}}
    names, played = list(sides), []
    for i, prompt in enumerate(prompts):
        results = {}
        for name in names[i % 3 :] + names[: i % 3]:
            most = tokens[i] if isinstance(tokens, list) else tokens
            results[name] = pair.generate(prompt, max_new_tokens=most, temperature=0.0, draft=draft, **sides[name])
        played.append(results)
    return played


def agreement(pair, prompts, played):
    agreed, gaps, claimed, leniently = [], [], [], 0
    for prompt, results in zip(prompts, played, strict=True):
        lossy = results["lossy"]
        if not lossy.tokens:
            continue
        ids = pair.encode(prompt, check_request())
        hits, gap = judge(pair, ids, lossy.tokens)
        agreed.append(hits)
        gaps += gap
        leniently += len(hits) - sum(hits)
        threshold = lossy.stats.speculation.threshold
        claimed.append((threshold.agreement, sum(hits) / len(hits)))
    every = [hit for hits in agreed for hit in hits]
    return {
        "prompts": len(agreed),
        "tokens": len(every),
        "agreement": sum(every) / len(every),
        "least_of_a_prompt": min(sum(hits) / len(hits) for hits in agreed),
        "changed_tokens": leniently,
        "mean_gap": statistics.fmean(gaps),
        "largest_gap": max(gaps),
        "same_texts": sum(r["lossy"].tokens == r["lossless"].tokens for r in played),
        "largest_error_of_the_statistics": max(abs(a - b) for a, b in claimed if a is not None),
    }


def speed(played):
    def ratios(name, base):
        pairs = [(rate(results[name]), rate(results[base])) for results in played]
        return [a / b for a, b in pairs if a and b]

    def summary(values):
        return {"ratio": statistics.median(values), "interval": interval(values)}

    passes = {name: [r[name].stats.speculation.tokens_per_pass for r in played] for name in ("lossless", "lossy")}
    return {
        "lossy_over_lossless": summary(ratios("lossy", "lossless")),
        "noise": summary(ratios("again", "lossless")),
        **{
            f"tokens_per_pass_{name}": statistics.fmean(x for x in values if x is not None)
            for name, values in passes.items()
        },
    }


def bleu(edits, played, draws):
    """None without sacrebleu."""
    try:
        from sacrebleu.metrics import BLEU
    except ImportError:
        return None
    metric = BLEU()
    texts = {name: [results[name].text.strip() for results in played] for name in ("lossless", "lossy")}
    wanted = [edit["reference"] for edit in edits]

    def score(name, which):
        return metric.corpus_score([texts[name][i] for i in which], [[wanted[i] for i in which]]).score

    every, rng = range(len(edits)), random.Random(0)
    differences = []
    for _ in range(draws):
        which = rng.choices(every, k=len(edits))
        differences.append(score("lossy", which) - score("lossless", which))
    differences.sort()
    scores = {name: score(name, every) for name in texts}
    return {
        "edits": len(edits),
        "same_texts": sum(a == b for a, b in zip(*texts.values(), strict=True)),
        "lossless": scores["lossless"],
        "lossy": scores["lossy"],
        "difference": scores["lossy"] - scores["lossless"],
        "interval": [differences[int(0.025 * draws)], differences[int(0.975 * draws)]],
        "signature": str(metric.get_signature()),
    }


def measure(prompts, edits, tokens, draws, draft="lookup"):
    pair = load("smollm2", draft)
    chosen = [p["prompt"] for p in spread(shipped("agreement_prompts"), prompts)]
    edits = spread(shipped("copy_edit"), edits)
    asked = [f"{edit['instruction']}\n\n{edit['input']}" for edit in edits]
    room = [min(tokens * 2, len(pair.tokenizer.encode(edit["reference"])) * 5 // 4 + 8) for edit in edits]
    play(pair, chosen[:1], 8, draft)  # the first of each kind pays for what is made once
    open_ended, copied = play(pair, chosen, tokens, draft), play(pair, asked, room, draft)
    return {
        "agreement": agreement(pair, chosen, open_ended),
        "agreement_on_edits": agreement(pair, asked, copied),
        "speed": speed(open_ended),
        "speed_on_edits": speed(copied),
        "bleu": bleu(edits, copied, draws),
        "settings": copied[0]["lossy"].stats.settings,
    }


def holds(report):
    quality = report["bleu"]
    return report["agreement"]["agreement"] >= SET_POINT and (quality is None or abs(quality["difference"]) < MOST_BLEU)


def table(report):
    lines = []
    for title, agreed, fast in (
        ("prompts", report["agreement"], report["speed"]),
        ("copy edits", report["agreement_on_edits"], report["speed_on_edits"]),
    ):
        part = lambda x: f"{x['ratio']:.3f} ({x['interval'][0]:.3f} to {x['interval'][1]:.3f})"
        lines += [
            f"{title}: {agreed['prompts']} texts, {agreed['tokens']} tokens, of which {agreed['agreement']:.2%} are "
            f"the target's argmax (least of one text: {agreed['least_of_a_prompt']:.1%})",
            f"  mean gap {agreed['mean_gap']:.4f}, largest {agreed['largest_gap']:.2f}; {agreed['same_texts']} texts "
            "are as without the rule",
            f"  speed over lossless {part(fast['lossy_over_lossless'])}; lossless against itself {part(fast['noise'])}",
            f"  tokens per pass {fast['tokens_per_pass_lossless']:.2f} -> {fast['tokens_per_pass_lossy']:.2f}",
        ]
    b = report["bleu"]
    if b is None:
        return "\n".join([*lines, "BLEU: needs sacrebleu (pip install 'specdec-kernels[bench]')"])
    low, high = b["interval"]
    lines += [
        f"BLEU on {b['edits']} edits: lossless {b['lossless']:.2f}, lossy {b['lossy']:.2f}, difference "
        f"{b['difference']:+.3f} ({low:+.3f} to {high:+.3f})",
        f"  {b['same_texts']} texts are the same; {b['signature']}",
    ]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=1000, help="at most so many; all by default")
    parser.add_argument("--edits", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=64, help="most per prompt")
    parser.add_argument("--draws", type=int, default=400, help="of the bootstrap")
    parser.add_argument("--quick", action="store_true", help="a few short texts")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.edits, options.tokens, options.draws = 6, 4, 24, 40
    report = measure(options.prompts, options.edits, options.tokens, options.draws)
    print(json.dumps(report) if options.json else table(report))
    sys.exit(0 if options.quick or holds(report) else 1)


if __name__ == "__main__":
    main()
