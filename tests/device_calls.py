"""Calls for the device tests: (public function, its tensors, its options), made on the CPU from a number."""

import functools
import itertools
import random

import torch

import specdec_kernels as sk
from attention_cases import LAYOUTS, make_cache, tables
from specdec_kernels.tree import tree_depth
from verify_cases import bounds, keys, random_call, random_tree_call

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def verify(number):
    """A random call of any rule; the width is given, since no device can be asked for the longest request."""
    target, tokens, cu, options = random_call(number)
    longest = int(cu.diff().max()) if len(cu) > 1 else 0
    return sk.verify, (target, tokens, cu), {"max_drafts": longest + number % 2, **options}


def verify_tree(number):
    target, tokens, parents, cu, options = random_tree_call(number)
    spans = itertools.pairwise(cu.tolist())
    deepest = max(
        (tree_depth(tokens[a:b].tolist(), parents[a:b].tolist(), target.shape[1]) for a, b in spans), default=0
    )
    return sk.verify_tree, (target, tokens, parents, cu), {"max_depth": deepest + number % 2, **options}


def wide(number, requests, vocabulary=151_936, dtype=torch.bfloat16):
    """Few requests with long, spaced rows: where a kernel may split the vocabulary."""
    generator = torch.Generator().manual_seed(number)
    rows = torch.randn(4 * requests, vocabulary + 24, generator=generator).mul(3).to(dtype)[:, :vocabulary]
    judged = rows.unflatten(0, (requests, 4))[:, :3].flatten(0, 1).float()
    q = (judged + torch.randn(judged.shape, generator=generator)).softmax(1)
    tokens = q.multinomial(1, generator=generator)[:, 0]
    options = {"draft_probs": q, "max_drafts": 3, "temperature": 0.8, "top_p": 0.9, **keys(requests, number)}
    return sk.verify, (rows, tokens, bounds([3] * requests)), options


def sample(number):
    rng, generator = random.Random(number), torch.Generator().manual_seed(number)
    requests, vocabulary = rng.choice([1, 3, 8]), rng.choice([1, 63, 64, 1000, 4097, 49152])
    logits = torch.randn(requests, vocabulary, generator=generator).mul(rng.choice([0.3, 1, 5])).to(rng.choice(FLOATS))
    if rng.random() < 0.2:
        logits[0, 0] = rng.choice([torch.nan, torch.inf, -torch.inf])
    options = {
        "temperature": rng.choice([0.0, 0.5, 1.0]),
        "top_k": rng.choice([0, 1, 40]),
        "top_p": rng.choice([1.0, 0.9, 0.1]),
        "min_p": rng.choice([0.0, 0.1]),
        "stream": rng.choice([0, 3]),
        "index": rng.choice([0, 5, torch.arange(requests, dtype=torch.int32)]),
        "return_logprobs": True,
        **keys(requests, number, rng.randrange(2**40)),
    }
    return sk.sample, (logits,), options


def quantize_int8(number):
    rng, generator = random.Random(number), torch.Generator().manual_seed(number)
    rows, cols = rng.choice([0, 1, 3, 17]), rng.choice([1, 8, 65, 576, 2100, 9001])
    x = torch.randn(rows, cols + 5, generator=generator).mul(rng.choice([1e-3, 1, 1e4])).to(rng.choice(FLOATS))
    x = x[:, 3:-2] if rng.random() < 0.3 else x[:, :cols].contiguous()  # rows of any alignment
    if rows and rng.random() < 0.3:
        x[0, rng.randrange(cols)] = rng.choice([torch.nan, torch.inf, -torch.inf])
    options = {"symmetric": rng.random() < 0.5}
    if cols == 576:
        options["group_size"] = rng.choice([None, 1, 64, 192])
    if rng.random() < 0.3:
        options |= {"stochastic_seed": rng.getrandbits(64), "stochastic_offset": rng.choice([0, 5, 2**34 - 1])}
    if rng.random() < 0.3:
        options["scale"] = rng.choice([0.05, torch.rand(rows, 1, generator=generator) + 0.01])
        options.pop("group_size", None)
        if not options["symmetric"]:
            options["zero_point"] = rng.choice([7, -(2**31)])
    return sk.quantize_int8, (x,), options


def dequantize_int8(number):
    rng, generator = random.Random(number), torch.Generator().manual_seed(number)
    rows, cols = rng.choice([0, 1, 5]), rng.choice([1, 64, 130, 5000])
    groups = rng.choice([1, 2]) if cols % 2 == 0 else 1
    q = torch.randint(-128, 128, (rows, cols), dtype=torch.int8, generator=generator)
    scale = torch.rand(rows, groups, generator=generator)
    zero_point = torch.randint(-(2**31), 2**31, (rows, groups), generator=generator).int()
    arguments = rng.choice([(q, scale), (q, scale, zero_point), (q, 0.5, -3)])
    return sk.dequantize_int8, arguments, {"dtype": rng.choice(FLOATS)}


def linear_int8(number):
    rng, generator = random.Random(number), torch.Generator().manual_seed(number)
    k, group = rng.choice([(1, None), (33, None), (64, 64), (100, 4), (390, 130), (576, 64), (4096, 64), (4100, None)])
    n, rows = rng.choice([1, 16, 17, 65]), rng.choice([0, 1, 2, 8, 9, 16, 33])
    w = torch.randn(n, k, generator=generator)
    weight = sk.pack_int8(w, group_size=group, rotate=group in (4, 64) and rng.random() < 0.5)
    dtype = rng.choice(FLOATS)
    x = torch.randn(rows, k + 3, generator=generator).to(dtype)
    x = x[:, 2:-1] if rng.random() < 0.3 else x[:, :k].contiguous()  # rows of any alignment
    if rows and rng.random() < 0.3:
        x[-1, rng.randrange(k)] = rng.choice([torch.nan, torch.inf, 0.0])
    if not weight.rotated and rng.random() < 0.3:
        x = sk.quantize_int8(x, group_size=rng.choice([None, group]))
    bias = rng.choice([None, torch.randn(n, generator=generator), torch.randn(n, generator=generator).to(dtype)])
    return sk.linear_int8, (x, weight, bias), {}


def attend_int8(number):
    """With float caches: int8 ones are served by Triton alone."""
    rng, generator = random.Random(number), torch.Generator().manual_seed(number)
    batch, rows, page, width = rng.choice([1, 3]), rng.choice([1, 4, 9]), rng.choice([1, 16]), 12
    kv_heads, shared, dim, values = rng.choice([(1, 1, 64, 64), (3, 3, 64, 64), (2, 4, 80, 24), (2, 1, 46, 46)])
    q = torch.randn(batch, rows, kv_heads * shared, dim, generator=generator)
    k = torch.randn(40, page, kv_heads, dim, generator=generator)
    v = torch.randn(40, page, kv_heads, values, generator=generator)
    table = torch.randint(40, (batch, width), generator=generator).int()
    lengths = torch.randint(rows, width * page + 1, (batch,), generator=generator).int()
    mask = torch.rand(batch, rows, rows, generator=generator) < 0.7 if rng.random() < 0.5 else None
    return sk.attend_int8, (q, k, None, v, None, table, lengths), {"mask": mask}


def norm_call(name, number):
    """A random call of a norm; the same for the plain and the quantising form."""
    rng, generator = random.Random(number), torch.Generator().manual_seed(number)
    dtype, rows = rng.choice(FLOATS), rng.choice([0, 1, 3, 17])
    cols, group = rng.choice([(1, 1), (46, 23), (576, 64), (577, None), (2100, 1), (4104, 9), (17000, 1000)])

    def random_rows(step):
        wide = torch.randn(rows, cols + 7, generator=generator).mul(step).to(dtype)
        return wide[:, 3:-4] if rng.random() < 0.3 else wide[:, :cols].contiguous()

    x, residual = random_rows(rng.choice([1e-3, 1, 100])), random_rows(1)
    if rows and rng.random() < 0.2:
        x[0, rng.randrange(cols)] = rng.choice([torch.nan, torch.inf])
    weight, bias = torch.randn(2, cols, generator=generator).to(dtype)
    options = {"residual": residual} if rng.random() < 0.5 else {}
    if name.startswith("layer") and rng.random() < 0.5:
        options["bias"] = bias
    if name.endswith("quantize_int8"):
        options |= {"group_size": rng.choice([None, group]), "return_sums": rng.random() < 0.5}
    return getattr(sk, name), (x, weight, rng.choice([0.0, 1e-5])), options


def gate_call(name, number):
    """A random call of a gate; the same for the plain and the quantising form."""
    rng, generator = random.Random(number), torch.Generator().manual_seed(number)
    rows = rng.choice([0, 1, 3, 17])
    cols, group = rng.choice([(1, 1), (46, 23), (576, 64), (577, None), (1536, 256), (17000, 1000)])
    gate_up = torch.randn(rows, 2 * cols + 7, generator=generator).mul(rng.choice([0.1, 1, 6])).to(rng.choice(FLOATS))
    gate_up = gate_up[:, 3:-4] if rng.random() < 0.3 else gate_up[:, : 2 * cols].contiguous()
    options = {"approximate": rng.choice(["none", "tanh"])} if name.startswith("gelu") else {}
    if name.endswith("quantize_int8"):
        options |= {"group_size": rng.choice([None, group]), "return_sums": rng.random() < 0.5}
    return getattr(sk, name), (gate_up,), options


def rope_write_kv_int8(number):
    """In copies, so that a call can be repeated: gives q and the four parts of the cache."""
    rng, generator = random.Random(number), torch.Generator().manual_seed(number)
    tokens, heads, dim = rng.choice([0, 1, 5, 33]), rng.choice([1, 3]), rng.choice([2, 46, 64, 128])
    values, page = rng.choice([dim, 24]), rng.choice([1, 16])
    x, dtype = rng.choice(FLOATS), rng.choice([torch.int8, torch.int8, *FLOATS])
    cache = make_cache(40 // page + 1, page, heads, dim, dtype, values=values, layout=rng.choice(LAYOUTS))
    slots = torch.randint(-1, 40, (tokens,), generator=generator)
    widths = [3 * heads * dim, heads * dim, heads * values]
    parts = torch.randn(tokens, sum(widths) + 3, generator=generator).to(x)[:, 3:].split(widths, 1)
    q, k, v = (part.unflatten(1, (n, -1)) for part, n in zip(parts, (3 * heads, heads, heads), strict=True))

    def rope_write_kv_int8(k, v, cos, sin, *cache, slots, q):
        q, *cache = (None if t is None else t.clone(memory_format=torch.preserve_format) for t in (q, *cache))
        sk.rope_write_kv_int8(k, v, cos, sin, *cache, slots, q=q)
        return q, *cache

    return rope_write_kv_int8, (k, v, *tables(tokens, dim), *cache), {"slots": slots, "q": q}


def rows_int8(number):
    rng, generator = random.Random(number), torch.Generator().manual_seed(number)
    n, (k, group) = rng.choice([1, 16, 37]), rng.choice([(1, 1), (46, 23), (128, 64), (576, 576), (2048, 1024)])
    rotate = group & (group - 1) == 0 and rng.random() < 0.5
    weight = sk.pack_int8(torch.randn(n, k, generator=generator), group_size=group, rotate=rotate)

    def rows_int8(ids, weight):
        return weight.rows(ids)

    return rows_int8, (torch.randint(0, n, (rng.choice([0, 1, 9]),), generator=generator), weight), {}


def expand(number):
    rng, generator = random.Random(number), torch.Generator().manual_seed(number)
    n, dtype = rng.choice([1, 16, 37]), rng.choice(FLOATS)
    k, group = rng.choice([(1, 1), (46, 23), (96, 32), (320, 64), (128, 128), (576, 576), (2048, 1024)])
    rotate = group & (group - 1) == 0 and rng.random() < 0.5
    weight = sk.pack_int8(torch.randn(n, k, generator=generator), group_size=group, rotate=rotate)
    return sk.expand, (weight,), {"dtype": dtype}


MAKERS = {
    f.__name__: f
    for f in (
        verify,
        verify_tree,
        sample,
        quantize_int8,
        dequantize_int8,
        linear_int8,
        rope_write_kv_int8,
        attend_int8,
        rows_int8,
        expand,
    )
}
NORMS = ("rms_norm", "rms_norm_quantize_int8", "layer_norm", "layer_norm_quantize_int8")
GATES = ("silu_mul", "silu_mul_quantize_int8", "gelu_mul", "gelu_mul_quantize_int8")
MAKERS |= {name: functools.partial(norm_call, name) for name in NORMS}
MAKERS |= {name: functools.partial(gate_call, name) for name in GATES}
