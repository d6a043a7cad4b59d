"""How close int8 models are to the float32 model of the same file: teacher-forced, on chat and on prose.

    python bench/bench_fidelity.py [--tokens N] [--quick] [--json]

Chat: the float32 model answers shipped prompts greedily, then every model reads prompts and answers. Prose: the shipped
text, paragraph by paragraph. Per model the share of positions with the same argmax, the change of perplexity, and the
KL divergence. These are properties of the rounding of weights, activations and cache, not of the machine.
"""

import argparse
import json
import math
from importlib import resources

import torch

import specdec_kernels as sk
from specloop.measure import load_prompts
from specloop.models.llama import Llama
from specloop.models.weights import Layer, Resident
from specloop.options import check_request
from specloop.pair import load

# name, values per scale of weights and activations (None: a row), rotated before quantising, what the cache holds
VARIANTS = (
    ("a scale per row, f32 cache (baseline)", None, False, "f32"),
    ("groups of 64, f32 cache", 64, False, "f32"),
    ("groups of 64 rotated, f32 cache", 64, True, "f32"),
)
SHIPPED = "shipped default"


def quantised(exact, group, rotate, kv):
    """The float32 model with its matrices packed in another way."""
    pack = lambda matrix: sk.pack_int8(matrix, group_size=group, rotate=rotate)
    weights = exact.weights
    layers = [
        Layer(**{name: pack(value) if value.dim() == 2 else value for name, value in layer.parts().items()})
        for layer in weights.layers
    ]
    head = pack(weights.head)
    embedding = head if weights.embedding is weights.head else pack(weights.embedding)
    return Llama(exact.config, Resident(embedding, layers, weights.norm, head), context=exact.context, kv=kv)


def answers(pair, prompts, tokens):
    """(ids of prompt and answer, number of prompt ids) per prompt."""
    result = []
    for prompt in prompts:
        answer = pair.generate(prompt, draft="none", max_new_tokens=tokens)
        ids = pair.encode(prompt, check_request())
        result.append((ids + answer.tokens, len(ids)))
    return result


def paragraphs(pair, most=None):
    text = resources.files("specloop").joinpath("data/prose.txt").read_text(encoding="utf-8")
    return [(list(pair.tokenizer.encode(paragraph)), 1) for paragraph in text.strip().split("\n\n")[:most]]


def log_probabilities(model, texts):
    """Of the rows that predict the tokens after each text's start: float64 [positions, vocab]."""
    found = []
    for ids, start in texts:
        logits = model.forward(ids[:-1], model.new_cache(len(ids)), last=len(ids) - 1)
        found.append(torch.log_softmax(logits[start - 1 :].double(), -1))
    return torch.cat(found)


def compared(exact, model, texts):
    """What the model's predictions are against the exact ones (from ``log_probabilities``) on the same texts."""
    actual = torch.cat([torch.tensor(ids[start:]) for ids, start in texts])[:, None]
    q = log_probabilities(model, texts)
    return {
        "agreement": (exact.argmax(-1) == q.argmax(-1)).double().mean().item(),
        "perplexity": math.exp(exact.gather(1, actual).mean() - q.gather(1, actual).mean()) - 1,
        "kl": (exact.exp() * (exact - q)).sum(-1).mean().item(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=80, help="of each answer")
    parser.add_argument("--quick", action="store_true", help="3 answers of 32 tokens, 3 paragraphs, shipped model only")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    pair = load("smollm2", dtype="f32", kv="f32", draft="none")
    prompts = [p["prompt"] for p in load_prompts(most=1 if options.quick else 2)][: 3 if options.quick else None]
    texts = {
        "chat": answers(pair, prompts, 32 if options.quick else options.tokens),
        "prose": paragraphs(pair, 3 if options.quick else None),
    }
    exact = {name: log_probabilities(pair.model, text) for name, text in texts.items()}
    positions = {name: len(rows) for name, rows in exact.items()}
    report = {}
    for name, *format in () if options.quick else VARIANTS:
        model = quantised(pair.model, *format)
        report[name] = {part: compared(exact[part], model, text) for part, text in texts.items()}
        del model
    del pair
    shipped = load("smollm2", draft="none").model
    report[SHIPPED] = {part: compared(exact[part], shipped, text) for part, text in texts.items()}
    if options.json:
        print(json.dumps({"name": "fidelity", "positions": positions, "models": report}))
        return
    counts = " and ".join(f"{count} positions of {part}" for part, count in positions.items())
    print(f"against the float32 model of the same file, teacher-forced, {counts}")
    print(f"{'':38}" + "".join(f"{part + ': same argmax':>20}{'perplexity':>12}{'KL':>9}" for part in texts))
    for name, parts in report.items():
        cells = (f"{x['agreement']:>19.1%} {x['perplexity']:>+11.2%} {x['kl']:>8.4f}" for x in parts.values())
        print(f"{name:38}" + "".join(cells))


if __name__ == "__main__":
    main()
