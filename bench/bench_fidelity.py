"""How close the int8 model is to its own float32 self: agreement of the argmax, and KL divergence, teacher-forced.

    python bench/bench_fidelity.py [--tokens N] [--quick] [--json]

The float32 model answers some of the shipped prompts greedily; then both models read the same ids. It is a property of
the rounding of weights and activations, not of the machine.
"""

import argparse
import json

import torch

from specloop.bench import load_prompts
from specloop.pair import load


def answers(pair, prompts, tokens):
    """(ids of prompt and answer, number of prompt ids) per prompt."""
    result = []
    for prompt in prompts:
        stream = pair.generate(prompt, draft="none", max_new_tokens=tokens)
        ids = pair.encode(prompt, chat_options())
        result.append((ids + stream.tokens, len(ids)))
    return result


def chat_options():
    from specloop.options import check_request

    return check_request()


def rows(model, texts):
    """The logits that predict each answer token."""
    found = []
    for ids, start in texts:
        logits = model.forward(ids[:-1], model.new_cache(len(ids)), last=len(ids) - 1)
        found.append(logits[start - 1 :].clone())
    return torch.cat(found).double()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--quick", action="store_true", help="one prompt per category, 32 tokens")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    prompts = [p["prompt"] for p in load_prompts(most=1 if options.quick else 2)]
    exact = load("smollm2", dtype="f32")
    texts = answers(exact, prompts, 32 if options.quick else options.tokens)
    p = torch.log_softmax(rows(exact.model, texts), -1)
    q = torch.log_softmax(rows(load("smollm2", dtype="int8").model, texts), -1)
    report = {
        "name": "int8 against float32",
        "tokens": len(p),
        "argmax_agreement": (p.argmax(-1) == q.argmax(-1)).double().mean().item(),
        "mean_kl": (p.exp() * (p - q)).sum(-1).mean().item(),
    }
    if options.json:
        print(json.dumps(report))
    else:
        print(
            f"{report['tokens']} tokens of {len(prompts)} answers: argmax agreement {report['argmax_agreement']:.3f}, "
            f"mean KL {report['mean_kl']:.4f} nats"
        )


if __name__ == "__main__":
    main()
