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

from specloop.measure import interval
from specloop.options import check_request
from specloop.pair import load

SET_POINT, MOST_BLEU = 0.98, 0.3
K = 8  # drafts per round where quality is judged: the more there are, the more can be lent
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


def together(pair, prompts, room):
    """The lossless texts; their requests share passes, which changes no token."""
    each = [{"max_new_tokens": most} for most in room]
    return pair.generate_batch(prompts, each=each, temperature=0.0, draft="lookup", batch_size=8)


def one(pair, prompt, most, **options):
    return pair.generate(prompt, max_new_tokens=most, temperature=0.0, draft="lookup", **options)


def lossy(pair, prompts, room):
    """With a K that nothing but the option decides: so these texts are the same on every machine."""
    return [one(pair, prompt, most, rule="threshold", k=K) for prompt, most in zip(prompts, room, strict=True)]


def agreement(pair, prompts, lossless, lossy):
    agreed, gaps, claimed = [], [], []
    for prompt, result in zip(prompts, lossy, strict=True):
        if not result.tokens:
            continue
        hits, gap = judge(pair, pair.encode(prompt, check_request()), result.tokens)
        agreed.append(hits)
        gaps += gap
        claimed.append(abs(result.stats.speculation.threshold.agreement - sum(hits) / len(hits)))
    every = [hit for hits in agreed for hit in hits]
    return {
        "prompts": len(agreed),
        "tokens": len(every),
        "agreement": sum(every) / len(every),
        "least_of_a_prompt": min(sum(hits) / len(hits) for hits in agreed),
        "other_tokens": len(every) - sum(every),
        "lent": sum(result.stats.speculation.threshold.lent for result in lossy),
        "mean_gap": statistics.fmean(gaps),
        "largest_gap": max(gaps),
        "same_texts": sum(a.tokens == b.tokens for a, b in zip(lossless, lossy, strict=True)),
        "largest_error_of_the_statistics": max(claimed),
    }


def speed(pair, prompts, room, k):
    """Each prompt lossless, lossy and lossless again, in turning order."""
    sides = {"lossless": {}, "lossy": {"rule": "threshold"}, "again": {}}
    names, ratios, noise, passes = list(sides), [], [], {"lossless": [], "lossy": []}
    for i, (prompt, most) in enumerate(zip(prompts, room, strict=True)):
        results = {name: one(pair, prompt, most, k=k, **sides[name]) for name in names[i % 3 :] + names[: i % 3]}
        rates = {name: rate(result) for name, result in results.items()}
        if all(rates.values()):
            ratios.append(rates["lossy"] / rates["lossless"])
            noise.append(rates["again"] / rates["lossless"])
            for name, some in passes.items():
                some.append(results[name].stats.speculation.tokens_per_pass)
    return {
        "texts": len(ratios),
        "lossy_over_lossless": {"ratio": statistics.median(ratios), "interval": interval(ratios)},
        "noise": {"ratio": statistics.median(noise), "interval": interval(noise)},
        **{f"tokens_per_pass_{name}": statistics.fmean(some) for name, some in passes.items()},
    }


def bleu(edits, lossless, lossy, draws):
    """None without sacrebleu."""
    try:
        from sacrebleu.metrics import BLEU
    except ImportError:
        return None
    metric = BLEU()
    texts = {"lossless": [r.text.strip() for r in lossless], "lossy": [r.text.strip() for r in lossy]}
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


def measure(prompts, edits, tokens, draws, timed, k):
    pair = load("smollm2", "lookup")
    chosen = [p["prompt"] for p in spread(shipped("agreement_prompts"), prompts)]
    edits = spread(shipped("copy_edit"), edits)
    asked = [f"{edit['instruction']}\n\n{edit['input']}" for edit in edits]
    # An answer has room for its reference and a quarter more.
    room = [len(pair.tokenizer.encode(edit["reference"])) * 5 // 4 + 8 for edit in edits]
    report, texts = {}, {}
    for name, questions, most in (("prompts", chosen, [tokens] * len(chosen)), ("edits", asked, room)):
        texts[name] = together(pair, questions, most), lossy(pair, questions, most)
        some = spread(range(len(questions)), timed)
        report[name] = {
            "agreement": agreement(pair, questions, *texts[name]),
            "speed": speed(pair, [questions[i] for i in some], [most[i] for i in some], k) if some else None,
        }
    report["bleu"] = bleu(edits, *texts["edits"], draws)
    report["settings"] = texts["edits"][1][0].stats.settings
    return report


def holds(report):
    quality = report["bleu"]
    return report["prompts"]["agreement"]["agreement"] >= SET_POINT and (
        quality is None or abs(quality["difference"]) < MOST_BLEU
    )


def table(report):
    lines = []
    for title, name in (("prompts", "prompts"), ("copy edits", "edits")):
        agreed, fast = report[name]["agreement"], report[name]["speed"]
        part = lambda x: f"{x['ratio']:.3f} ({x['interval'][0]:.3f} to {x['interval'][1]:.3f})"
        lines += [
            f"{title}: {agreed['prompts']} texts, {agreed['tokens']} tokens, of which {agreed['agreement']:.2%} are "
            f"the target's argmax (least of one text: {agreed['least_of_a_prompt']:.1%})",
            f"  {agreed['lent']} were lent; mean gap {agreed['mean_gap']:.4f}, largest {agreed['largest_gap']:.2f}; "
            f"{agreed['same_texts']} texts are as without the rule",
        ]
        if fast is not None:
            lines += [
                f"  speed over lossless on {fast['texts']} of them {part(fast['lossy_over_lossless'])}; "
                f"lossless against itself {part(fast['noise'])}",
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
    parser.add_argument("--timed", type=int, default=24, help="so many of each for the speed; 0 = none")
    parser.add_argument("--k", type=lambda text: text if text == "auto" else int(text), default="auto", help="for it")
    parser.add_argument("--draws", type=int, default=400, help="of the bootstrap")
    parser.add_argument("--quick", action="store_true", help="a few short texts")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.edits, options.tokens, options.draws = 2, 1, 56, 40
        options.timed = 1
    report = measure(options.prompts, options.edits, options.tokens, options.draws, options.timed, options.k)
    print(json.dumps(report) if options.json else table(report))
    sys.exit(0 if options.quick or holds(report) else 1)


if __name__ == "__main__":
    main()
