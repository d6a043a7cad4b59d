"""What a feature head costs on SmolLM2-135M (int8): a guess, the round's first pass, the features that it reads.

    python bench/bench_draft.py [--draft FILE] [--past N] [--ids N] [--pairs N] [--json]

Without ``--draft`` the head has random weights and ``--ids`` ids to say: it costs what a trained one does. Times are
the least and the median of many; "python" is what a guess takes besides the compiled calls. The last figures compare
the target's pass over one and four rows with features against the same without, in turn.
"""

import argparse
import json
import os
import statistics
import tempfile
import time

import ab
import torch

from specloop.draft_loader import load_draft
from specloop.drafts.feature import FeatureDraft
from specloop.fingerprint import fingerprint
from specloop.formats.draft_file import packed, write_draft
from specloop.layout import layer_shapes
from specloop.pair import load
from specloop.request import Sampling
from specloop.train.networks import feature_config
from specloop.versions import Place, Version


def random_head(path, target, count):
    """Writes a head of random weights for a target (a Version) to ``path``."""
    g = torch.Generator().manual_seed(0)
    c = target.model.config
    config = feature_config(c)
    ids = sorted(torch.randperm(c.vocab, generator=g)[:count].tolist())
    matrix = lambda n, k: packed(torch.randn(n, k, generator=g) * k**-0.5)
    weights = {"norm": torch.ones(c.hidden), "embedding_norm": torch.ones(c.hidden)}
    weights |= {"fc": matrix(c.hidden, 2 * c.hidden), "head": matrix(count, c.hidden)}
    for name, shape in layer_shapes(config).items():
        weights[f"layer.0.{name}"] = matrix(*shape) if len(shape) == 2 else torch.ones(shape)
    about = {"name": target.name, "fingerprint": fingerprint(target.model, target.tokenizer)}
    known = {"target": about, "vocabulary": target.tokenizer.fingerprint, "recipe": "random"}
    write_draft(path, kind="feature", config=config, draft_ids=ids, weights=weights, **known)
    return path


def times(run, count):
    """Milliseconds: the least, the median."""
    found = []
    for _ in range(count):
        start = time.perf_counter()
        run()
        found.append((time.perf_counter() - start) * 1e3)
    return {"least_ms": min(found), "median_ms": statistics.median(found)}


def measure(target, path, past, count):
    head, *_ = load_draft(path, target, kv="int8", context=past + 64)
    model, own, place = target.model, Place(), Place()
    own.version, place.version = Version(head, target.tokenizer, None, "head"), target
    seat, prompt = place.seat(past + 32), [(7 * i) % model.vocab_size for i in range(past)]
    seat.keep_features()
    with place.lock:
        seat.forward(prompt[:-1], seat, last=0)
    ids = None if head.draft_ids is None else torch.tensor(head.draft_ids, dtype=torch.int32)
    report = {"past": past, "bytes": head.weights_nbytes, "of_the_target": head.weights_nbytes / model.weights_nbytes}
    kept = head.cache_nbytes(2048) + model.cache_nbytes(2048, features=True) - model.cache_nbytes(2048)
    report["with_2048_tokens"] = (head.memory_nbytes + kept) / model.weights_nbytes
    report["propose"] = []
    for temperature in (0.0, 1.0):
        drafting = Sampling(temperature=temperature, seed=1)
        draft = FeatureDraft(own.seat(past + 32), seat, model.vocab_size, 8, drafting, ids=ids)
        start = time.perf_counter()
        draft.begin(prompt)
        report.setdefault("prompt_ms", (time.perf_counter() - start) * 1e3)
        for k in (1, 2, 3, 4):
            found = times(lambda draft=draft, k=k: draft.propose(k), count)
            report["propose"].append({"temperature": temperature, "k": k} | found)
    cache = head.new_cache(past + 8)
    cache.given = seat.features[0], past - 1
    head.forward(prompt, cache, last=1)

    def guess():
        cache.truncate(past)
        head.forward([5], cache, last=1)

    report["row"] = times(guess, count)
    passes = next(reversed(head._shapes.values())).passes
    kept = dict(passes)
    passes.update(dict.fromkeys(passes, lambda: None))
    report["python"] = times(guess, count)
    passes.update(kept)
    return report


def with_features(model, past, rows, pairs):
    """The target's pass with features against one without."""
    caches = [model.new_cache(past + rows, features=kept) for kept in (True, False)]

    def passing(cache):
        cache.truncate(past)
        model.forward([5] * rows, cache, last=rows)

    for cache in caches:
        model.forward([(7 * i) % model.vocab_size for i in range(past)], cache, last=0)
    run = [lambda cache=cache: passing(cache) for cache in caches]
    return ab.aa(run[1], pairs=pairs), ab.compare(*run, pairs=pairs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", help="a draft file of kind feature")
    parser.add_argument("--past", type=int, default=256, help="tokens in the caches")
    parser.add_argument("--ids", type=int, default=8192)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    pair = load("smollm2", draft="none")
    pair.ready()
    target = pair.place.get()
    with tempfile.TemporaryDirectory() as folder:
        path = options.draft or random_head(os.path.join(folder, "head.safetensors"), target, options.ids)
        report = {"name": "draft", "threads": torch.get_num_threads()} | measure(target, path, options.past, 200)
    report["features"] = []
    for rows in (1, 4):
        noise, found = with_features(target.model, options.past, rows, options.pairs)
        report["features"].append(
            {"rows": rows, "aa": noise.interval, "ratio": found.ratio, "interval": found.interval}
        )
    if options.json:
        print(json.dumps(report))
        return
    print(
        f"{report['threads']} threads, {options.past} tokens before; {report['bytes'] / 1e6:.1f} MB, "
        f"{report['of_the_target']:.1%} of the target, {report['with_2048_tokens']:.1%} with what 2048 tokens need"
    )
    print(f"prompt {report['prompt_ms']:.1f} ms")
    for name in ("row", "python"):
        print(f"{name:<16} least {report[name]['least_ms']:.3f} ms, median {report[name]['median_ms']:.3f} ms")
    for line in report["propose"]:
        each = [line[key] / line["k"] for key in ("least_ms", "median_ms")]
        name = f"T={line['temperature']:g} K={line['k']}"
        print(f"{name:<16} per guess: least {each[0]:.3f} ms, median {each[1]:.3f} ms")
    for line in report["features"]:
        low, high = line["interval"]
        a, b = line["aa"]
        print(f"features, {line['rows']} rows: {line['ratio']:.3f} ({low:.3f} to {high:.3f}; A/A {a:.3f} to {b:.3f})")


if __name__ == "__main__":
    main()
