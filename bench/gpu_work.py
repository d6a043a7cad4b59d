"""What bench_gpu.py measures: calls on copies of their inputs, so that no copy is in the device's cache, and rivals."""

import itertools
from dataclasses import dataclass, field

import gpu_rivals as rivals
import torch
from bench_quantize import eager_dequantize, eager_quantize
from torch.nn.functional import scaled_dot_product_attention as sdpa
from verify_inputs import DRAFTS, Inputs

import specdec_kernels as sk

BF16, F32 = torch.bfloat16, torch.float32
NAMES = {BF16: "bf16", F32: "f32"}
MODES = {"T=0.7": 1.0, "T=0.7 top-p 0.9": 0.9}  # name -> top_p


@dataclass
class Work:
    """One operation on one shape: each function takes the number of a copy of the inputs."""

    operation: str
    name: str
    copies: int
    bytes: int  # per call
    ours: callable
    rivals: dict = field(default_factory=dict)
    right: callable = lambda result: True


def copies_of(gpu, *tensors):
    """Lists of copies of each tensor, as many as keep the device's cache cold."""
    size = sum(t.numel() * t.element_size() for t in tensors)
    count = max(2, min(64, -(-gpu.cold // size)))
    return count, [[t.to(gpu.device, copy=True) for _ in range(count)] for t in tensors], size


class Drafted:
    """A call of verify whose drafts are all accepted, and its rivals."""

    def __init__(self, gpu, requests, vocabulary, dtype):
        self.gpu, self.vocabulary = gpu, vocabulary
        inputs = Inputs(requests, vocabulary, dtype, accept=True)
        self.target, self.draft_probs = inputs.targets[0], inputs.drafts("draft_probs")[0].float()
        self.ids, self.tokens, self.cu = (t.to(gpu.device) for t in (inputs.ids, inputs.tokens, inputs.cu))
        self.keys = {"seed": inputs.seed.to(gpu.device), "position": inputs.position.to(gpu.device)}
        self.shape = f"B={requests} K={DRAFTS} V={vocabulary} {NAMES[dtype]}"

    def work(self):
        yield from self.point_masses()
        yield from self.distributions()

    def verify(self, rows, **options):
        rows = rows.view(-1, self.vocabulary)
        return sk.verify(rows, self.tokens, self.cu, max_drafts=DRAFTS, **options, **self.keys)

    def point_masses(self):
        count, (targets,), size = copies_of(self.gpu, self.target)

        def work(name, options, others):
            ours = lambda i: self.verify(targets[i], **options)
            return Work("verify", f"{self.shape} {name}", count, size, ours, others, all_accepted)

        yield work("greedy", {"temperature": 0.0}, {"eager": lambda i: rivals.greedy(targets[i], self.ids)})
        for name, top_p in MODES.items():
            eager = lambda i, top_p=top_p: rivals.token_rule(targets[i], self.ids, 0.7, top_p)
            yield work(name, {"temperature": 0.7, "top_p": top_p}, {"eager": eager})
        block = lambda i: self.verify(targets[i], temperature=0.7, rule="block")
        yield Work("verify", f"{self.shape} T=0.7 block", count, size, block)

    def distributions(self):
        count, (targets, drafts), size = copies_of(self.gpu, self.target, self.draft_probs)
        flat = [q.view(-1, self.vocabulary) for q in drafts]
        flashinfer = rivals.flashinfer_rule(self.gpu.device) if self.gpu.device.type == "cuda" else None
        for name, top_p in MODES.items():
            options = {"temperature": 0.7, "top_p": top_p}
            ours = lambda i, options=options: self.verify(targets[i], draft_probs=flat[i], **options)
            eager = lambda i, p=top_p: rivals.token_rule(targets[i], self.ids, 0.7, p, drafts[i])
            others = {"eager": eager}
            if flashinfer:
                others["flashinfer"] = lambda i, p=top_p: flashinfer(targets[i], self.ids.int(), 0.7, p, drafts[i])
            yield Work("verify", f"{self.shape} {name}, draft_probs", count, size, ours, others, all_accepted)


def all_accepted(verdict):
    return bool((verdict.num_accepted == DRAFTS).all())


def sample_work(gpu, requests, vocabulary, dtype):
    rows = Inputs(requests, vocabulary, dtype, accept=True).targets[0][:, 0]
    count, (copies,), size = copies_of(gpu, rows)
    seed = torch.arange(requests, device=gpu.device)
    keys = {"seed": seed, "position": seed + 7}
    for name, top_p in MODES.items():
        ours = lambda i, p=top_p: sk.sample(copies[i], temperature=0.7, top_p=p, **keys)
        eager = {"eager": lambda i, p=top_p: rivals.sample(copies[i], 0.7, p)}
        yield Work("sample", f"B={requests} V={vocabulary} {NAMES[dtype]} {name}", count, size, ours, eager)


def quantize_work(gpu, rows, cols, dtype):
    count, (x,), size = copies_of(gpu, torch.randn(rows, cols).to(dtype))
    made = [sk.quantize_int8(c) for c in x]
    total = size + rows * cols + 4 * rows
    name = f"{rows}x{cols} {NAMES[dtype]}"
    ours = lambda i: sk.quantize_int8(x[i], out=made[i])
    yield Work("quantize_int8", name, count, total, ours, {"eager": lambda i: eager_quantize(x[i])})
    eager = {"eager": lambda i: eager_dequantize(*made[i], dtype)}
    yield Work("dequantize_int8", name, count, total, lambda i: sk.dequantize_int8(*made[i], dtype=dtype), eager)


def linear_work(gpu, n, k, rows):
    """A lap goes through copies of the weights; the rivals' weights are as cold."""
    w, x = torch.randn(n, k), torch.randn(max(rows), k).to(gpu.device, BF16)
    packed = sk.pack_int8(w)
    count, (codes, scales), size = copies_of(gpu, packed.codes, packed.scale)
    weights = [sk.Int8Weight(n, k, k, *pair) for pair in zip(codes, scales, strict=True)]
    plain = [w.to(gpu.device, BF16) for _ in range(count)]
    columns = [sk.quantize_int8(p)[0].t() for p in plain]
    want = x.float() @ plain[0].float().t()
    for m in rows:
        some, out = x[:m], torch.empty(m, n, dtype=BF16, device=gpu.device)
        others = {"F.linear bf16": lambda i, some=some: torch.nn.functional.linear(some, plain[i])}
        if m > 16:  # as the operation demands; it gets x quantised and leaves its sums unscaled
            q = sk.quantize_int8(some)[0]
            others["_int_mm alone"] = lambda i, q=q: torch._int_mm(q, columns[i])
        ours = lambda i, some=some, out=out: sk.linear_int8(some, weights[i], out=out)
        total = size + some.nbytes + out.nbytes
        near = lambda y, m=m: bool((y.float() - want[:m]).norm() < 0.03 * want[:m].norm())
        yield Work("linear_int8", f"{n}x{k} M={m} bf16", count, total, ours, others, near)


def expand_work(gpu, n, k, group=64):
    """As the model stores it: groups of 64, rotated. The rival has no rotation and its codes in ordinary order."""
    w = torch.randn(n, k)
    packed = sk.pack_int8(w, group_size=group, rotate=True)
    count, (codes, scales), size = copies_of(gpu, packed.codes, packed.scale)
    weights = [sk.Int8Weight(n, k, group, *pair, True) for pair in zip(codes, scales, strict=True)]
    rows = sk.pack_int8(w, group_size=group).unpack()
    _, plain, _ = copies_of(gpu, rows[0].view(n, -1, group), rows[1].unsqueeze(-1))
    out, want = torch.empty(n, k, dtype=BF16, device=gpu.device), packed.dequantize().to(BF16)
    eager = {"eager, not rotated": lambda i: (plain[0][i % len(plain[0])] * plain[1][i % len(plain[1])]).to(BF16)}
    ours = lambda i: sk.expand(weights[i], out=out)
    same = lambda y: torch.equal(y.cpu(), want)
    yield Work("expand", f"{n}x{k} rotated bf16", count, size + out.nbytes, ours, eager, same)


def attend_work(gpu, requests, keys, rows):
    """32 query heads on 8 kv heads of 128, pages of 16 in any order; the rival gets its keys side by side in bf16."""
    heads, kv_heads, dim, page = 32, 8, 128, 16
    pages = requests * keys // page
    table = torch.randperm(pages).view(requests, -1).int().to(gpu.device)
    lengths = torch.full((requests,), keys, dtype=torch.int32, device=gpu.device)
    caches = [torch.randn(pages, page, kv_heads, dim) for _ in range(2)]
    q = torch.randn(requests, rows, heads, dim).to(gpu.device, BF16)
    seen = torch.ones(rows, keys, dtype=torch.bool, device=gpu.device).tril(keys - rows)

    def dense(k, v, q):
        sides = [c[table.long()].flatten(1, 2).transpose(1, 2).contiguous() for c in (k, v)]
        return lambda: sdpa(q.transpose(1, 2), *sides, attn_mask=seen, enable_gqa=True).transpose(1, 2)

    want = dense(*(c.to(gpu.device) for c in caches), q.float())()
    near = lambda y: bool((y.float() - want).norm() < 0.03 * want.norm())
    count, floats, _ = copies_of(gpu, *(c.to(BF16) for c in caches))
    rival = [dense(k, v, q) for k, v in zip(*floats, strict=True)]
    for name, cache in (("int8", [sk.quantize_int8(c) for c in caches]), ("bf16", None)):
        out = torch.empty_like(q)
        if cache:
            (k, ks), (v, vs) = cache
            _, parts, size = copies_of(gpu, k, ks.squeeze(-1), v, vs.squeeze(-1))
            some = list(zip(*parts, strict=True))
        else:
            some, size = [(k, None, v, None) for k, v in zip(*floats, strict=True)], 2 * floats[0][0].nbytes
        copies = min(len(some), count)
        ours = lambda i, some=some, out=out: sk.attend_int8(q, *some[i], table, lengths, out=out)
        title = f"B={requests} R={rows} keys={keys} q bf16 cache {name}"
        others = {"SDPA bf16, no pages": lambda i: rival[i]()}
        yield Work("attend_int8", title, copies, size + 2 * q.nbytes, ours, others, near)


def everything(gpu):
    """Most telling first: a run that is short of time ends early."""
    if gpu.device.type == "cpu":
        yield from Drafted(gpu, 2, 1000, F32).work()
        yield from sample_work(gpu, 2, 1000, F32)
        yield from quantize_work(gpu, 8, 256, BF16)
        yield from linear_work(gpu, 64, 256, (1, 32))
        yield from expand_work(gpu, 64, 256)
        yield from attend_work(gpu, 2, 64, 5)
        return
    yield from Drafted(gpu, 8, 151_936, BF16).work()
    yield from quantize_work(gpu, 4096, 8192, BF16)
    yield from linear_work(gpu, 4096, 4096, (1, 4, 8, 16, 32))
    yield from expand_work(gpu, 4096, 4096)
    yield from attend_work(gpu, 8, 4096, 5)
    yield from sample_work(gpu, 8, 151_936, BF16)
    for requests in (1, 64):
        yield from Drafted(gpu, requests, 151_936, BF16).work()
    for requests, dtype in itertools.product((8, 1, 64), (BF16, F32)):
        yield from Drafted(gpu, requests, 49_152, dtype).work()
    yield from quantize_work(gpu, 16, 4096, BF16)
    yield from sample_work(gpu, 64, 49_152, BF16)
    yield from attend_work(gpu, 1, 8192, 1)
