"""What tests of verify, verify_tree and sample share: backends to run on, requests built from lists, random calls."""

import contextlib
import importlib
import itertools
import math
import os
import random

import torch

import emulator
import specdec_kernels as sk
from instruction_sets import ISAS
from specdec_kernels import native, registry
from specdec_kernels.verify import RULES
from specdec_kernels.verify_tree import RULES as TREE_RULES

BACKENDS = ["reference", *(f"{isa}-{threads}" for isa in ISAS for threads in (1, 2))]
EMULATED = "emu-32-random-0"  # the GPU kernels on the emulator: wave, run order, chunks of a row (gpu/verify.py)
FEW_BACKENDS = [*BACKENDS[:2], *BACKENDS[2:][-1:], EMULATED]  # where every case of a long list runs
MANY = {"reference": 300, EMULATED: 200, "triton": 20}  # how many requests a statistical test can afford
if os.environ.get("TRITON_INTERPRET") == "1":  # this process is for the Triton kernels (tests/interpret)
    BACKENDS = FEW_BACKENDS = ["triton"]


@contextlib.contextmanager
def running(backend):
    """Everything inside runs on ``reference``, ``triton``, the cpu backend as ``isa-threads``, or the emulator as
    ``emu-wave-order-chunks``."""
    if backend in ("reference", "triton"):
        with sk.use_backend(backend):
            yield
        return
    if backend.startswith("emu-"):
        _, wave, order, chunks = backend.split("-")
        with emulator.serving(int(wave), order, int(chunks)):
            yield
        return
    isa, threads = backend.split("-")
    before = native.cpu.isa(), torch.get_num_threads()
    try:
        native.cpu.set_isa(isa)
        torch.set_num_threads(int(threads))
        with sk.use_backend("cpu"):
            yield
    finally:
        native.cpu.set_isa(before[0])
        torch.set_num_threads(before[1])


def logits_of(p):
    """Logits whose softmax is ``p``; 0 becomes -inf."""
    return torch.tensor(p, dtype=torch.float64).log().float()


def bounds(counts):
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)


def keys(requests, seed=0, position=0):
    """Seeds that differ per request, and one position for all."""
    return {
        "seed": torch.arange(requests, dtype=torch.int64) * 7919 + seed,
        "position": torch.full((requests,), position, dtype=torch.int64),
    }


def judge(rows, drafts, **options):
    """verify() of requests given as nested lists: ``rows`` [K_i + 1][V] per request, ``drafts`` [K_i] per request."""
    target = torch.cat([torch.as_tensor(r, dtype=torch.float32) for r in rows])
    tokens = torch.tensor([x for d in drafts for x in d], dtype=torch.int64)
    return sk.verify(target, tokens, bounds(map(len, drafts)), **{**keys(len(rows)), **options})


def repeated(n, rows, drafts, *, draft_logits=None, draft_probs=None, seed=0, **options):
    """The same request ``n`` times, each with its own seed. Rows of draft distributions are repeated, too."""
    rows = torch.as_tensor(rows, dtype=torch.float32)
    for name, q in (("draft_logits", draft_logits), ("draft_probs", draft_probs)):
        if q is not None:
            options[name] = torch.as_tensor(q, dtype=torch.float32).repeat(n, 1)
    counts = [len(drafts)] * n
    tokens = torch.tensor(drafts, dtype=torch.int64).repeat(n)
    return sk.verify(rows.repeat(n, 1), tokens, bounds(counts), **{**keys(n, seed), **options})


def emitted(verdict, b=0):
    return [x for x in verdict.tokens[b].tolist() if x >= 0]


def share(tokens, wanted):
    return (tokens == wanted).double().mean().item()


def near(share, p, n):
    """Within five standard deviations."""
    return abs(share - p) < 5 * math.sqrt(p * (1 - p) / n) + 1e-9


def captured(operation, *args, **options):
    """The operation's result and the normalised arguments that its backend got."""
    seen = []
    call = registry.call

    def record(name, device, *arguments):
        seen.append(arguments)
        return call(name, device, *arguments)

    registry.call = record
    try:
        return operation(*args, **options), seen[0]
    finally:
        registry.call = call


def same(a, b):
    """Two verdicts agree: everything exactly, logprobs to rounding."""
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in a._fields if name != "logprobs") and (
        a.logprobs is None or torch.allclose(a.logprobs, b.logprobs, rtol=1e-6, atol=1e-6, equal_nan=True)
    )


def fragile_differences(number, operation, *tensors, **options):
    """Runs a call on every backend; returns how many differ from the reference, as only a fragile call may."""
    before = [t.clone() for t in tensors]
    with running("reference"):
        expected, arguments = captured(operation, *tensors, **options)
    count = 0
    for backend in BACKENDS[1:]:
        with running(backend):
            got = operation(*tensors, **options)
        if not same(got, expected):
            message = f"call {number}, {options} on {backend}: {got} instead of {expected}"
            reference = importlib.import_module(f"specdec_kernels.reference.{operation.__name__}")
            assert any(reference.fragile(*arguments)), message
            count += 1
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, tensors, strict=True))  # I7
    return count


def random_call(number, rule=None):
    """A call of verify() with everything in it: (target_logits, draft_tokens, cu_drafts, options)."""
    rng = random.Random(number)
    generator = torch.Generator().manual_seed(number)
    requests, vocabulary = rng.choice([1, 1, 2, 3, 5]), rng.choice([1, 2, 5, 63, 64, 65, 200, 1000, 4097])
    counts = [rng.choice([0, 1, 2, 3, 4]) for _ in range(requests)]
    drafts, rows = sum(counts), sum(counts) + requests
    target = _target_rows(rng, generator, rows, vocabulary)
    options = _options(rng, generator, requests, vocabulary)
    bonus = set(bounds([k + 1 for k in counts])[1:].sub(1).tolist())
    judged = target[[r for r in range(rows) if r not in bonus]].float().nan_to_num(-5, 5, -5)
    form = rng.choice(["point", "draft_logits", "draft_probs"]) if drafts else "point"
    tokens = judged.argmax(1) if drafts else torch.zeros(0, dtype=torch.int64)
    if form != "point":
        q, ids = _draft_rows(rng, generator, judged), None
        if rng.random() < 0.4:
            ids = torch.randperm(vocabulary, generator=generator)[: rng.randint(1, vocabulary)].sort().values
            q, options["draft_ids"] = q[:, ids], ids.int()
        chosen = q.softmax(1).multinomial(1, generator=generator)[:, 0]
        tokens = chosen if ids is None else ids[chosen]
        q = (q if form == "draft_logits" else q.softmax(1)).to(rng.choice([torch.float32, torch.bfloat16]))
        options[form] = _hard(rng, q.clone(), (torch.nan, torch.inf, -torch.inf, -0.1))
        if rng.random() < 0.3:
            options["draft_kind"] = torch.rand(drafts, generator=generator) < 0.5
    for i in range(drafts):
        if rng.random() < 0.15:
            tokens[i] = rng.choice([-1, rng.randrange(vocabulary)])
    return target, tokens, bounds(counts), _with_rule(rng, options, requests, rule, RULES)


def random_tree_call(number, rule=None):
    """A call of verify_tree(): (target_logits, tree_tokens, parents, cu_nodes, options)."""
    rng = random.Random(number)
    generator = torch.Generator().manual_seed(number)
    requests, vocabulary = rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 5, 5, 8, 16, 64, 65, 200, 1000, 4097])
    counts = [rng.choice([0, 2, 4, 6, 9]) for _ in range(requests)]
    cu, target = bounds(counts), _target_rows(rng, generator, sum(counts) + requests, vocabulary)
    options = _options(rng, generator, requests, vocabulary)
    tokens, parents = torch.zeros(sum(counts), dtype=torch.int64), torch.zeros(sum(counts), dtype=torch.int64)
    drawn = torch.empty(sum(counts), vocabulary)
    for b, start in enumerate(cu[:-1].tolist()):
        kids = {}
        for j in range(counts[b]):  # bushy, or long
            parent = rng.choice([-1, j - 1, int(parents[start + j - 1]) if j else -1, rng.randrange(-1, j)])
            parents[start + j] = parent
            kids.setdefault(parent, []).append(start + j)
        for parent, mine in kids.items():
            row = target[start + b + 1 + parent].float().nan_to_num(-5, 5, -5)
            q = _draft_rows(rng, generator, row, [0.001, 1.0, 4.0]).softmax(0)
            for j in mine[vocabulary:]:
                tokens[j] = -1
            mine = mine[:vocabulary]
            drawn[kids[parent]] = q
            tokens[mine] = (q + 1e-30).multinomial(len(mine), generator=generator)
            for j in mine:
                other = rng.choice([-1, rng.randrange(vocabulary)])
                if rng.random() < 0.1 and (other < 0 or other not in tokens[mine]):
                    tokens[j] = other
    if len(tokens) and rng.random() < 0.8:
        dtype = rng.choice([torch.float32, torch.bfloat16])
        options["draft_probs"] = _hard(rng, drawn.to(dtype), (torch.nan, torch.inf, -0.1, 0.0))
    return target, tokens, parents.int(), cu, _with_rule(rng, options, requests, rule, TREE_RULES)


def _target_rows(rng, generator, rows, vocabulary):
    target = torch.randn(rows, vocabulary, generator=generator) * rng.choice([0.3, 1, 3, 10])
    if rng.random() < 0.3:
        target = target.round()  # many ties
    return _hard(rng, target.to(rng.choice([torch.float32, torch.float16, torch.bfloat16])))


def _parameter(rng, requests, values, dtype=torch.float32):
    """One value for all, or one each."""
    return rng.choice(values) if rng.random() < 0.5 else torch.tensor(rng.choices(values, k=requests), dtype=dtype)


def _options(rng, generator, requests, vocabulary):
    mild = rng.random() < 0.6  # distributions, not mostly one or two tokens
    return {
        "temperature": _parameter(rng, requests, [0.7, 1.0, 2.0] if mild else [0.0, 0.3, 0.7, 1.0, 2.0, 1e-6]),
        "top_k": _parameter(rng, requests, [0, 50] if mild else [0, 1, 3, 50, vocabulary], torch.int32),
        "top_p": _parameter(rng, requests, [1.0, 0.95] if mild else [1.0, 0.9, 0.5, 0.1, 0.0]),
        "min_p": _parameter(rng, requests, [0.0, 0.01] if mild else [0.0, 0.05, 0.5, 1.0]),
        "seed": torch.randint(-(2**62), 2**62, (requests,), generator=generator),
        "position": torch.randint(0, 2**40, (requests,), generator=generator),
        "return_logprobs": rng.random() < 0.5,
    }


def _with_rule(rng, options, requests, rule, rules):
    options["rule"] = rule or rng.choice(rules)
    if options["rule"] == "threshold":
        options["theta"] = _parameter(rng, requests, [0.0, 0.2, 0.7, 1.0, 3.0])
    if options["rule"] == "typical" and rng.random() < 0.7:
        options["typical"] = rng.choice([0.0, 0.01, 0.3, 1.0]), rng.choice([0.0, 0.1, 1.0, 10.0])
    return options


def sampling(options):
    """Of a call's options those that sample() has, too."""
    others = ("draft", "rule", "theta", "typical")
    return {name: value for name, value in options.items() if not name.startswith(others)}


def _hard(rng, x, values=(torch.nan, torch.inf, -torch.inf)):
    if len(x) and rng.random() < 0.25:
        for _ in range(rng.choice([1, 5])):
            x[rng.randrange(x.shape[0]), rng.randrange(x.shape[1])] = rng.choice(values)
    if len(x) and rng.random() < 0.08:
        x[rng.randrange(x.shape[0])] = rng.choice(values)
    return x


def _draft_rows(rng, generator, target, noises=(0.001, 0.5, 2.0)):
    """Logits near the target's, so that drafts are accepted often, and refused with a residual."""
    noise = torch.randn(target.shape, generator=generator)
    return (target + noise * rng.choice(noises)).clamp(-30, 30)
