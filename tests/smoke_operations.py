"""Calls every operation of the cpu backend on awkward shapes, under each instruction set, with one and two threads.

A script for test_sanitized.py. The results are other tests' business; here only memory errors and undefined behaviour
count, so sizes are odd, tensors end where their allocation ends, and values include the extremes of their types.
"""

import torch

import specdec_kernels as sk
from specdec_kernels import native, registry
from specdec_kernels.ggml import BLOCKS

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def floats(*shape, dtype=torch.float32, hostile=True):
    x = torch.randn(*shape)
    if hostile and x.numel() > 8:
        x.view(-1)[:8] = torch.tensor([0.0, -0.0, 1e-45, 3e38, -3e38, torch.inf, -torch.inf, torch.nan])
    return x.to(dtype)


def quantize_int8():
    for dtype in FLOATS:
        for rows, cols, group in ((0, 5, None), (1, 1, None), (3, 37, None), (5, 96, 32), (2, 130, 13)):
            x = floats(rows, cols, dtype=dtype)
            sk.quantize_int8(x, group_size=group)
            sk.quantize_int8(x, group_size=group, symmetric=False)
            sk.quantize_int8(x, group_size=group, stochastic_seed=-1, stochastic_offset=2**40 + 3)
            sk.quantize_int8(x, scale=torch.tensor([0.01]), return_sums=True)
            sk.quantize_int8(floats(rows, cols + 3, dtype=dtype)[:, 1:-2])


def dequantize_int8():
    for dtype in FLOATS:
        for rows, cols, groups in ((0, 4, 1), (3, 37, 1), (4, 130, 10)):
            q = torch.randint(-128, 128, (rows, cols), dtype=torch.int8)
            sk.dequantize_int8(q, floats(rows, groups), dtype=dtype)
            sk.dequantize_int8(q, floats(rows, groups), torch.full((rows, groups), -(2**31)).int(), dtype=dtype)


def norms():
    for dtype in FLOATS:
        for rows, cols in ((0, 8), (1, 1), (3, 37), (2, 576)):
            x, residual, weight = (
                floats(rows, cols, dtype=dtype),
                floats(rows, cols, dtype=dtype),
                floats(cols).to(dtype),
            )
            for add in ({}, {"residual": residual}):
                sk.rms_norm(x, weight, 1e-5, **add)
                sk.rms_norm_quantize_int8(x, weight, 1e-5, return_sums=True, **add)
                sk.layer_norm(x, weight, 1e-5, bias=weight, **add)
                sk.layer_norm_quantize_int8(x, weight, 1e-5, return_sums=True, **add)


def gates():
    for dtype in FLOATS:
        for rows, cols in ((0, 8), (1, 1), (3, 37), (2, 576)):
            x = floats(rows, 2 * cols, dtype=dtype)
            sk.silu_mul(x)
            sk.silu_mul_quantize_int8(x, return_sums=True)
            for approximate in ("none", "tanh"):
                sk.gelu_mul(x, approximate=approximate)
                sk.gelu_mul_quantize_int8(x, approximate=approximate, return_sums=True)


def linear_int8():
    for n, k, group, rotate in (
        (1, 1, None, True),
        (17, 6, 3, False),
        (33, 130, None, False),
        (64, 192, 64, False),
        (9, 256, 128, True),
    ):
        weight = sk.pack_int8(floats(n, k, hostile=False), group_size=group, rotate=rotate)
        weight.unpack()
        weight.rows(torch.tensor([0, n - 1, 0]))
        for dtype in FLOATS:
            sk.expand(weight, dtype=dtype)
        for rows in (0, 1, 2, 3, 5, 9, 17):
            for dtype in FLOATS:
                sk.linear_int8(floats(rows, k, dtype=dtype), weight, floats(n))
            if not rotate:
                sk.linear_int8(sk.quantize_int8(floats(rows, k), group_size=group), weight)


def linear_f32():
    for n, k in ((1, 1), (17, 6), (33, 130), (64, 192)):
        for rows in (0, 1, 2, 3, 5, 9, 17):
            sk.linear_f32(floats(rows, k), floats(n, k))
            sk.linear_f32(floats(rows, k), floats(n, k, dtype=torch.bfloat16), floats(n))


def attention():
    for dtype in (torch.float32, torch.int8):
        for dim, page, rows in ((8, 4, 1), (64, 16, 5), (64, 80, 40), (6, 3, 2)):
            pages, kv_heads, heads, batch = 5, 2, 6, 2
            caches = [torch.zeros(pages, page, kv_heads, dim, dtype=dtype) for _ in range(2)]
            scales = [torch.zeros(pages, page, kv_heads) if dtype is torch.int8 else None for _ in range(2)]
            tokens = pages * page
            k, v = floats(tokens, kv_heads, dim), floats(tokens, kv_heads, dim)
            slots = torch.arange(tokens)
            slots[-1] = -1
            angles = floats(tokens, dim // 2)
            caches = caches[0], scales[0], caches[1], scales[1]
            sk.rope_write_kv_int8(k, v, angles, angles, *caches, slots, q=floats(tokens, heads, dim))
            table = torch.tensor([[0, 3], [4, 1]], dtype=torch.int32)
            lengths = torch.tensor([rows, 2 * page], dtype=torch.int32)
            mask = torch.eye(rows, dtype=torch.bool).expand(batch, rows, rows).contiguous()
            sk.attend_int8(floats(batch, rows, heads, dim), *caches, table, lengths)
            sk.attend_int8(floats(batch, rows, heads, dim), *caches, table, lengths, mask=mask)
    for x in FLOATS:  # values of another size than keys, a head's tokens together
        for dtype in (torch.int8, *FLOATS):
            by_token = lambda *shape, dtype=torch.float32: torch.zeros(shape, dtype=dtype).transpose(1, 2)
            scales = [by_token(3, 2, 5) if dtype is torch.int8 else None for _ in range(2)]
            caches = by_token(3, 2, 5, 16, dtype=dtype), scales[0], by_token(3, 2, 5, 17, dtype=dtype), scales[1]
            q, k, v = floats(15, 4, 16, dtype=x), floats(15, 2, 16, dtype=x), floats(15, 2, 17, dtype=x)
            angles, slots = floats(15, 8), torch.arange(14, -1, -1)
            sk.rope_write_kv_int8(k, v, angles, angles, *caches, slots, q=q, hadamard=True)
            table, lengths = torch.tensor([[2, 0, 1]], dtype=torch.int32), torch.tensor([15], dtype=torch.int32)
            sk.attend_int8(q[None], *caches, table, lengths)


def decoder():
    for dtype in FLOATS:
        for n, k, group in ((2, 1, None), (34, 6, 3), (66, 130, None), (64, 192, 64)):
            gate_up = sk.pack_int8(floats(n, k, hostile=False), group_size=group, rotate=group == 64)
            down = sk.pack_int8(floats(k, n // 2, hostile=False))
            for rows in (0, 1, 5, 17, 65):
                x, weight, residual = floats(rows, k, dtype=dtype), floats(k, dtype=dtype), floats(rows, k, dtype=dtype)
                sk.rms_norm_linear(x, weight, 1e-5, gate_up, bias=floats(n))
                sk.rms_norm_linear(x, weight, 1e-5, gate_up, residual=residual, residual_out=x)
                sk.gated_mlp(x, weight, 1e-5, gate_up, down, residual=residual, activation="gelu")
                if dtype is torch.float32:
                    sk.gated_mlp(x, weight, 1e-5, floats(n, k), floats(k, n // 2))
    for dtype in (torch.float32, torch.int8):
        heads, kv_heads, dim, page, rows = 6, 2, 6, 3, 5
        caches = [torch.zeros(2, page, kv_heads, dim, dtype=dtype) for _ in range(2)]
        scales = [torch.zeros(2, page, kv_heads) if dtype is torch.int8 else None for _ in range(2)]
        q, k, v = (floats(rows, h, dim) for h in (heads, kv_heads, kv_heads))
        angles = floats(rows, dim // 2)
        caches = caches[0], scales[0], caches[1], scales[1]
        table, lengths = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([rows], dtype=torch.int32)
        sk.rope_attend(q, k, v, angles, angles, *caches, torch.tensor([3, 4, 5, 0, -1]), table, lengths)


def verify():
    cu = torch.tensor([0, 0, 3, 4], dtype=torch.int32)
    seed, position = torch.tensor([1, -(2**63), 2**63 - 1]), torch.tensor([0, 5, 2**62])
    for dtype in FLOATS:
        for vocab in (1, 63, 65, 1000):
            logits, drafts = floats(7, vocab, dtype=dtype), torch.randint(0, vocab, (4,))
            common = {"seed": seed, "position": position}
            filters = {"temperature": torch.tensor([0.0, 0.7, 1.3]), "top_k": torch.tensor([0, 1, 7]), "top_p": 0.9}
            sk.verify(logits, drafts, cu, **common)
            sk.verify(logits, drafts, cu, temperature=0)
            sk.verify(logits, drafts, cu, draft_logits=floats(4, vocab), min_p=0.1, **filters, **common)
            ids = torch.arange(0, vocab, 2, dtype=torch.int32)
            probs = torch.softmax(floats(4, len(ids), hostile=False), 1)
            sk.verify(logits, drafts, cu, draft_probs=probs, draft_ids=ids, return_logprobs=True, **filters, **common)
    verify_rules()


def verify_rules():
    cu = torch.tensor([0, 0, 3, 4], dtype=torch.int32)
    keys = {"seed": torch.tensor([1, -(2**63), 2**63 - 1]), "position": torch.tensor([0, 5, 2**62])}
    for dtype in FLOATS:
        for vocab in (1, 63, 65, 1000):
            logits, drafts = floats(7, vocab, dtype=dtype), torch.randint(0, vocab, (4,))
            q = floats(4, vocab, hostile=False)
            for rule in ("token", "block", "typical", "threshold"):
                options = {"rule": rule, "theta": 0.5, "return_logprobs": True, **keys}
                sk.verify(logits, drafts, cu, **options)
                sk.verify(logits, drafts, cu, draft_logits=q, top_k=40, **options)
                sk.verify(logits, drafts, cu, draft_probs=q.softmax(1), temperature=torch.tensor([0, 1, 2]), **options)


def verify_tree():
    cu = torch.tensor([0, 0, 7, 9], dtype=torch.int32)
    parents = torch.tensor([-1, 0, 0, -1, 3, 3, 1, -1, -1], dtype=torch.int32)
    keys = {"seed": torch.tensor([1, -(2**63), 2**63 - 1]), "position": torch.tensor([0, 5, 2**62])}
    for dtype in FLOATS:
        for vocab in (2, 63, 65, 1000):
            logits, q = floats(12, vocab, dtype=dtype), floats(9, vocab, hostile=False).softmax(1)
            tokens = torch.tensor([0, 0, vocab - 1, vocab - 1, 0, 1, -1, 1, 0])
            for rule in ("token", "traversal", "typical", "threshold"):
                options = {"rule": rule, "theta": 0.5, "return_logprobs": True, **keys}
                sk.verify_tree(logits, tokens, parents, cu, **options)
                sk.verify_tree(logits, tokens, parents, cu, draft_probs=q, top_p=0.9, **options)
                sk.verify_tree(logits, tokens, parents, cu, draft_probs=q.to(dtype), temperature=0, **options)


def sample():
    for dtype in FLOATS:
        for vocab in (1, 63, 65, 1000):
            seeds = {"seed": torch.arange(3), "position": torch.arange(3)}
            sk.sample(floats(3, vocab, dtype=dtype), top_k=5, top_p=0.5, return_logprobs=True, **seeds)
            sk.sample(floats(3, vocab, dtype=dtype), stream=0, index=torch.arange(3), **seeds)
            sk.sample(floats(0, vocab, dtype=dtype), temperature=0)


def dequantize_ggml():
    for kind, (_, size) in BLOCKS.items():
        for rows, blocks in ((0, 1), (1, 1), (3, 5)):
            sk.dequantize_ggml(torch.randint(0, 256, (rows, blocks * size), dtype=torch.uint8), kind)
        sk.dequantize_ggml(torch.randint(0, 256, (3, 2 * size + 3), dtype=torch.uint8)[:, 1:-2], kind)


CALLS = {
    "quantize_int8": quantize_int8,
    "dequantize_int8": dequantize_int8,
    "rms_norm": norms,
    "rms_norm_quantize_int8": norms,
    "layer_norm": norms,
    "layer_norm_quantize_int8": norms,
    "silu_mul": gates,
    "silu_mul_quantize_int8": gates,
    "gelu_mul": gates,
    "gelu_mul_quantize_int8": gates,
    "pack_int8": linear_int8,
    "rows_int8": linear_int8,
    "expand": linear_int8,
    "linear_int8": linear_int8,
    "linear_f32": linear_f32,
    "rope_write_kv_int8": attention,
    "attend_int8": attention,
    "rms_norm_linear": decoder,
    "rope_attend": decoder,
    "gated_mlp": decoder,
    "verify": verify,
    "verify_tree": verify_tree,
    "sample": sample,
    "dequantize_ggml": dequantize_ggml,
}


def main():
    served = sk.backends()["cpu"]["operations"]
    missing = [operation for operation in served if operation not in CALLS]
    assert not missing, f"no smoke call for {', '.join(missing)}"
    assert set(served) <= set(registry.OPERATIONS) and served, sk.backends()["cpu"]
    torch.manual_seed(0)
    for isa in native.ISA_NAMES:
        if not native.cpu.set_isa(isa):
            continue
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for call in dict.fromkeys(CALLS[operation] for operation in served):
                with sk.use_backend("cpu"):
                    call()
            print(isa, threads, flush=True)
    print("done", *served)


if __name__ == "__main__":
    main()
