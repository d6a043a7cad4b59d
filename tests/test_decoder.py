"""The decoder's fused calls: the bits of the single operations that they consist of, and rows that are on their own."""

import pytest
import torch

import specdec_kernels as sk
from int8_backends import CPU, DTYPES, randn, same, torch_threads
from verify_cases import running

EPS = 1e-5
BACKENDS = ["reference", *CPU]
ROWS = (0, 1, 5, 9, 65)
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def spaced(*shape, seed=0, dtype=torch.float32):
    """Rows that lie apart."""
    return randn(shape[0], shape[1] + 5, seed=seed, dtype=dtype)[:, 2:-3]


def weight(n, k, kind, seed=0):
    w = randn(n, k, seed=seed) * k**-0.5
    if kind in ("f32", "bf16"):
        w = torch.cat([w, w], 1)[:, :k]  # rows further apart than they are long
        return w if kind == "f32" else w.bfloat16()
    return sk.pack_int8(w, group_size=16 if kind == "rotated" else 24, rotate=kind == "rotated")


def product(x, w, bias=None):
    return sk.linear_int8(x, w, bias) if isinstance(w, sk.Int8Weight) else sk.linear_f32(x, w)


def residuals(x):
    """Per way to give a residual: a fresh x and the options."""
    r = randn(*x.shape, seed=7, dtype=x.dtype)
    yield x, {}
    yield x, {"residual": r}
    yield x, {"residual": r, "residual_out": torch.empty_like(r)}
    mine = r.clone()
    yield x, {"residual": mine, "residual_out": mine}
    mine = x.clone()
    yield mine, {"residual": r, "residual_out": mine}


def normed(x, norm_weight, options):
    """(rms_norm of copies, the sum with the residual or nothing)."""
    if not options:
        return sk.rms_norm(x, norm_weight, EPS), ()
    y, h = sk.rms_norm(x.clone(), norm_weight, EPS, residual=options["residual"].clone())
    return y, (h,)


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


def kinds(dtype):
    return ("plain", "rotated", "f32", "bf16") if dtype is torch.float32 else ("plain", "rotated")


@each_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_linear_is_rms_norm_then_linear(backend, dtype):
    k, norm_weight = 48, randn(48, seed=1, dtype=dtype)
    with running(backend):
        for kind in kinds(dtype):
            w = weight(37, k, kind)
            for rows in ROWS:
                for x, options in residuals(spaced(rows, k, dtype=dtype)):
                    bias = None if rows % 2 else randn(37, seed=2)
                    y, h = normed(x, norm_weight, options)
                    same(
                        as_tuple(sk.rms_norm_linear(x, norm_weight, EPS, w, bias=bias, **options)),
                        (product(y, w, bias), *h),
                    )


@each_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_mlp_is_its_four_steps(backend, dtype):
    k, width, norm_weight = 48, 96, randn(48, seed=1, dtype=dtype)
    with running(backend):
        for kind in kinds(dtype):
            gate_up, down = weight(2 * width, k, kind, 3), weight(k, width, kind, 4)
            for rows in ROWS:
                for x, options in residuals(spaced(rows, k, dtype=dtype)):
                    y, h = normed(x, norm_weight, options)
                    want = product(sk.silu_mul(product(y, gate_up)), down)
                    same(as_tuple(sk.gated_mlp(x, norm_weight, EPS, gate_up, down, **options)), (want, *h))


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize(("width", "groups"), [(320, (64, 64)), (512, (32, 256)), (512, (32, 512))], ids=str)
def test_gated_mlp_in_groups_on_any_number_of_threads(backend, width, groups):
    """Groups of the second product are made by one thread each, unless they are long."""
    norm_weight = randn(64, seed=1)
    gate_up = sk.pack_int8(randn(2 * width, 64, seed=3), group_size=groups[0], rotate=True)
    down = sk.pack_int8(randn(48, width, seed=4), group_size=groups[1], rotate=True)
    with running(backend):
        for rows in (1, 3, 9, 70):
            x = spaced(rows, 64)
            want = product(sk.silu_mul(product(sk.rms_norm(x, norm_weight, EPS), gate_up)), down)
            for threads in (1, 2, 5):
                with torch_threads(threads):
                    same((sk.gated_mlp(x, norm_weight, EPS, gate_up, down),), (want,))


@each_backend
def test_gated_mlp_with_gelu_and_mixed_weights(backend):
    x, norm_weight = randn(5, 48), randn(48, seed=1)
    gate_up, down = weight(192, 48, "rotated", 3), weight(48, 96, "f32", 4)
    with running(backend):
        hidden = product(sk.rms_norm(x, norm_weight, EPS), gate_up)
        for activation, approximate in (("gelu", "none"), ("gelu_tanh", "tanh")):
            got = sk.gated_mlp(x, norm_weight, EPS, gate_up, down, activation=activation)
            same((got,), (product(sk.gelu_mul(hidden, approximate=approximate), down),))


def attention_call(requests, rows, cache_dtype, seed=0):
    """Arguments of rope_attend up to lengths; 6 query heads, 2 of keys, dimension 16, pages of 4."""
    heads, kv_heads, dim, page, width = 6, 2, 16, 4, 8
    tokens, pages = requests * rows, requests * width + 1
    qkv = randn(tokens, (heads + 2 * kv_heads) * dim, seed=seed)
    q, k, v = (t.unflatten(1, (-1, dim)) for t in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], 1))
    angles = randn(tokens, dim // 2, seed=seed + 1)
    if cache_dtype is torch.int8:
        g = torch.Generator().manual_seed(seed + 2)
        caches = [torch.randint(-127, 128, (pages, page, kv_heads, dim), generator=g).to(torch.int8) for _ in range(2)]
        scales = [randn(pages, page, kv_heads, seed=seed + 3).abs() / 99 for _ in range(2)]
    else:
        caches = [randn(pages, page, kv_heads, dim, seed=seed + i, dtype=cache_dtype) for i in range(2)]
        scales = [None, None]
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))[: requests * width].int()
    table = table.view(requests, width)
    lengths = torch.tensor([rows + 7 * b % 12 for b in range(requests)], dtype=torch.int32)
    position = lengths[:, None] - rows + torch.arange(rows)
    slots = (table.gather(1, position // page) * page + position % page).flatten().long()
    return [q, k, v, angles.cos(), angles.sin(), caches[0], scales[0], caches[1], scales[1], slots, table, lengths]


def copied(arguments):
    return [None if a is None else a.clone() for a in arguments]


@each_backend
@pytest.mark.parametrize("cache_dtype", [torch.int8, *DTYPES])
def test_rope_attend_is_the_write_and_then_attention(backend, cache_dtype):
    with running(backend):
        for requests, rows in ((1, 1), (1, 5), (1, 9), (3, 2), (2, 3), (1, 0), (0, 0)):
            for masked in (False, True):
                arguments = attention_call(requests, rows, cache_dtype)
                fused = copied(arguments)
                single = copied(arguments)
                mask = randn(requests, rows, rows).gt(0) | torch.eye(rows, dtype=torch.bool) if masked else None
                got = sk.rope_attend(*fused, mask=mask, scale=0.3)
                sk.rope_write_kv_int8(*single[1:10], q=single[0])
                queries = single[0].view(requests, rows, *single[0].shape[1:])
                want = sk.attend_int8(queries, *single[5:9], *single[10:], mask=mask, scale=0.3)
                same((got,), (want.flatten(0, 1),))
                for a, b in zip(fused, single, strict=True):
                    assert a is None or torch.equal(a, b)  # caches, and the queries turned in place


@each_backend
def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(backend):
    x, residual, norm_weight = randn(9, 48), randn(9, 48, seed=5), randn(48, seed=1)
    gate_up, down = weight(192, 48, "rotated", 3), weight(48, 96, "plain", 4)
    with running(backend):
        whole = None
        for threads in (1, 2):
            with torch_threads(threads):
                y = sk.rms_norm_linear(x, norm_weight, EPS, gate_up, residual=residual)
                z = sk.gated_mlp(x, norm_weight, EPS, gate_up, down, residual=residual)
                if whole is not None:
                    same((*y, *z), whole)
                whole = (*y, *z)
        for i in range(9):
            one = slice(i, i + 1)
            y = sk.rms_norm_linear(x[one], norm_weight, EPS, gate_up, residual=residual[one])
            z = sk.gated_mlp(x[one], norm_weight, EPS, gate_up, down, residual=residual[one])
            same((*y, *z), tuple(t[one] for t in whole))


def test_recorded_calls_run_again():
    x, norm_weight, w, down = randn(3, 48), randn(48, seed=1), weight(192, 48, "rotated"), weight(48, 96, "plain")
    call = copied(attention_call(1, 3, torch.int8))
    outs = torch.empty(3, 192), torch.empty(3, 48), torch.empty(3, 6, 16)
    with sk.use_backend("cpu"), sk.record() as recording:
        sk.rms_norm_linear(x, norm_weight, EPS, w, out=outs[0])
        sk.gated_mlp(x, norm_weight, EPS, w, down, out=outs[1])
        sk.rope_attend(*call, out=outs[2])
    assert recording.complete and len(recording.program) == 3
    x.copy_(randn(3, 48, seed=9))
    call[0].copy_(randn(3, 6, 16, seed=9))
    again = copied(call)
    recording.run()
    same(outs[:2], (sk.rms_norm_linear(x, norm_weight, EPS, w), sk.gated_mlp(x, norm_weight, EPS, w, down)))
    same(outs[2:], (sk.rope_attend(*again),))


X, NORM = randn(3, 48), randn(48)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "x: expected 2 dim", lambda: sk.rms_norm_linear(X[None], NORM, EPS, weight(8, 48, "plain"))),
        (ValueError, "norm_weight: expected shape", lambda: sk.rms_norm_linear(X, NORM[:5], EPS, X)),
        (TypeError, "weight: expected an Int8Weight", lambda: sk.rms_norm_linear(X, NORM, EPS, None)),
        (ValueError, "weight: expected rows of 48", lambda: sk.rms_norm_linear(X, NORM, EPS, weight(8, 96, "plain"))),
        (ValueError, "weight: expected a contiguous", lambda: sk.rms_norm_linear(X, NORM, EPS, randn(48, 8).T)),
        (ValueError, "bias: expected shape", lambda: sk.rms_norm_linear(X, NORM, EPS, X, bias=randn(99))),
        (TypeError, "weight: expected dtype float32 or bf", lambda: sk.rms_norm_linear(X, NORM, EPS, X.half())),
        (
            ValueError,
            "bias: expected shape",
            lambda: sk.rms_norm_linear(X, NORM, EPS, weight(8, 48, "plain"), bias=X[0]),
        ),
        (TypeError, "x: expected float32", lambda: sk.rms_norm_linear(X.half(), NORM.half(), EPS, X)),
        (ValueError, "out: expected shape", lambda: sk.rms_norm_linear(X, NORM, EPS, X, out=X)),
        (ValueError, "out: .*overlaps x", lambda: sk.gated_mlp(X, NORM, EPS, randn(6, 48), randn(48, 3), out=X)),
        (ValueError, "gate_up: expected an even", lambda: sk.gated_mlp(X, NORM, EPS, randn(7, 48), randn(48, 3))),
        (ValueError, "down: expected rows of 3", lambda: sk.gated_mlp(X, NORM, EPS, randn(6, 48), randn(48, 6))),
        (
            ValueError,
            "activation: expected one of silu, gelu, gelu_tanh, got 'relu'",
            lambda: sk.gated_mlp(X, NORM, EPS, randn(6, 48), randn(48, 3), activation="relu"),
        ),
        (
            ValueError,
            "page_table: expected a number of requests that divides 4",
            lambda: sk.rope_attend(
                *attention_call(2, 2, torch.int8)[:10], torch.zeros(3, 8).int(), torch.zeros(3).int()
            ),
        ),
        (
            ValueError,
            "out: expected shape",
            lambda: sk.rope_attend(*attention_call(2, 2, torch.int8), out=torch.empty(2, 2, 6, 16)[0]),
        ),
        (
            ValueError,
            "slots",
            lambda: sk.rope_attend(
                *attention_call(1, 1, torch.int8)[:9], torch.tensor([99]), *attention_call(1, 1, torch.int8)[10:]
            ),
        ),
    ],
)
def test_errors(error, message, call):
    with pytest.raises(error, match=message):
        call()
