"""Memory against sequence length: weights, key-value cache, workspace, for f32, bf16/f16 and int8, in one table.

    python bench/bench_memory.py [--tokens 256 512 ...] [--model smollm2] [--json]

weights and kv are the bytes of the objects that were allocated. workspace is the activations, logits and
rotary tables, which are float32 in every kind. resident is by how much the process's anonymous memory really grew for
kv and workspace with a full cache and passes of 128 and 9 rows over it. The kernels' scratch memory, kept per thread
between calls, shows there when it grows: a megabyte or two.
"""

import argparse
import gc
import json
from pathlib import Path

from specloop.heap import give_back
from specloop.loader import load_model
from specloop.models.buffers import CHUNK
from specloop.models.llama import Llama

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
KINDS = {"f32": ("f32", "f32"), "bf16": ("bf16", "f16"), "int8": ("int8", "int8")}  # of weights and cache


def resident():
    """Bytes of anonymous memory that this process holds, or None where the system doesn't say."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon")), None)


def workspace(model):
    """Bytes of what a pass needs besides weights and keys and values."""
    tensors = (*vars(model._buffers).values(), model._logits, model._rotary)
    return sum(t.nbytes for t in tensors)


def measure(model, kv, tokens):
    """The same weights with a context of ``tokens``, full: bytes of kv, workspace, and growth of the process."""
    gc.collect()
    give_back()  # malloc keeps what is free, and what grows into it would not show
    before = resident()
    other = Llama(model.config, model.weights, context=tokens, kv=kv)
    cache = other.new_cache(tokens)
    for layer in cache.pool.layers:
        for tensor in layer:
            if tensor is not None:
                tensor[cache.pages] = 1  # pages become resident when they are written
    for rows in (min(CHUNK, tokens), 9):
        cache.length = tokens - rows
        other.forward([1] * rows, cache, last=1)
    after = resident()
    sizes = {"kv": cache.nbytes, "workspace": workspace(other)}
    return sizes | {"resident": None if before is None else after - before}


def rows(name, lengths):
    loaded, model = None, None
    for kind, (dtype, kv) in KINDS.items():
        if dtype != loaded:
            model = None  # the old weights go before the new ones come
            model, loaded = load_model(name, dtype=dtype, kv=kv, context=max(lengths))[0], dtype
        for tokens in lengths:
            if tokens <= model.config.context:
                yield {"tokens": tokens, "kind": kind, "weights": model.nbytes} | measure(model, kv, tokens)


def table(found):
    """One line per length, the kinds side by side; MB = 10^6 bytes."""
    columns = ("weights", "kv", "workspace", "total", "resident")
    mb = lambda value: "-" if value is None else f"{value / 1e6:.1f}"
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in found)]
    width = 9
    lines = [
        " " * 7 + "".join(f" | {kind:^{len(columns) * (width + 1) - 1}}" for kind in kinds),
        f"{'tokens':>7}" + "".join(" | " + " ".join(f"{name:>{width}}" for name in columns) for _ in kinds),
    ]
    for tokens in sorted({row["tokens"] for row in found}):
        cells = ""
        for kind in kinds:
            row = next(r for r in found if (r["tokens"], r["kind"]) == (tokens, kind))
            row = row | {"total": row["weights"] + row["kv"] + row["workspace"]}
            cells += " | " + " ".join(f"{mb(row[name]):>{width}}" for name in columns)
        lines.append(f"{tokens:>7}" + cells)
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, or the path of a GGUF file")
    parser.add_argument("--tokens", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = list(rows(options.model, options.tokens))
    print(json.dumps(found) if options.json else table(found))


if __name__ == "__main__":
    main()
