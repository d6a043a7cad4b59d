"""dequantize_ggml: every backend gives the gguf package's bits, on random and on hostile blocks."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize

import specdec_kernels as sk
from guard import guarded, guarded_like
from specdec_kernels.ggml import BLOCKS

BACKENDS = ("reference", "cpu")
# f16 bit patterns: zeros, subnormals, ordinary, largest, infinities, NaNs.
HALVES = (
    0x0000,
    0x8000,
    0x0001,
    0x83FF,
    0x0400,
    0x3C00,
    0xBC01,
    0x7BFF,
    0xFBFF,
    0x7C00,
    0xFC00,
    0x7E00,
    0x7C01,
    0xFE12,
)
HALF_FIELDS = {"F16": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}


def random_blocks(kind, rows, blocks_per_row, seed=0, hostile=True):
    """uint8 [rows, row bytes]; half of the scales are special f16 values if hostile."""
    size = BLOCKS[kind][1]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows * blocks_per_row, size), dtype=np.uint8)
    for at in HALF_FIELDS.get(kind, ()) if hostile else ():
        special = rng.choice(np.array(HALVES, dtype="<u2"), len(data)).view(np.uint8).reshape(-1, 2)
        chosen = rng.random(len(data)) < 0.5
        data[chosen, at : at + 2] = special[chosen]
    return torch.from_numpy(data.reshape(rows, -1))


def oracle(blocks, kind):
    with np.errstate(all="ignore"):
        return torch.from_numpy(dequantize(blocks.numpy(), GGMLQuantizationType[kind]))


def assert_same_bits(got, want):
    assert got.shape == want.shape
    nan = want.isnan()
    assert torch.equal(got.isnan(), nan)
    assert torch.equal(got[~nan].view(torch.int32), want[~nan].view(torch.int32))


def usable(backend):
    if not sk.backends()[backend]["usable"]:
        pytest.skip(f"{backend}: {sk.backends()[backend]['reason']}")
    return sk.use_backend(backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", BLOCKS)
def test_equals_gguf(kind, backend):
    blocks = random_blocks(kind, 64, 5)
    with usable(backend):
        assert_same_bits(sk.dequantize_ggml(blocks, kind), oracle(blocks, kind))


@pytest.mark.parametrize("kind", BLOCKS)
def test_every_byte_value_in_every_place(kind):
    """No field is sign-extended or masked wrongly: all 256 values of each byte of a block."""
    size = BLOCKS[kind][1]
    blocks = torch.full((size, 256, size), 0x2A, dtype=torch.uint8)
    for at in range(size):
        blocks[at, :, at] = torch.arange(256, dtype=torch.uint8)
    want = oracle(blocks.reshape(-1, size), kind).view(size, 256, -1)
    for backend in BACKENDS:
        with usable(backend):
            assert_same_bits(sk.dequantize_ggml(blocks, kind), want)


@pytest.mark.parametrize("kind", BLOCKS)
def test_threads_and_split_change_nothing(kind):
    """Rows longer and shorter than a piece of work, one and two threads."""
    elements = BLOCKS[kind][0]
    before = torch.get_num_threads()
    for rows, row_elements in ((3, 131072), (700, 512)):
        blocks = random_blocks(kind, rows, row_elements // elements, seed=rows)
        results = []
        try:
            for threads in (1, 2):
                torch.set_num_threads(threads)
                results.append(sk.dequantize_ggml(blocks, kind))
        finally:
            torch.set_num_threads(before)
        assert_same_bits(results[0], oracle(blocks, kind))
        assert_same_bits(results[1], results[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", BLOCKS)
def test_strided_unaligned_and_out(kind, backend):
    elements, size = BLOCKS[kind]
    wide = torch.randint(0, 256, (7, 3 * size + 5), dtype=torch.uint8)
    blocks = wide[1:, 3 : 3 + 2 * size]  # odd addresses, odd row stride
    room = torch.full((6, 2 * elements + 3), -7.0)
    out = room[:, 1:-2]
    with usable(backend):
        assert sk.dequantize_ggml(blocks, kind, out=out) is out
    assert_same_bits(out, oracle(blocks.contiguous(), kind))
    assert (room[:, 0] == -7).all() and (room[:, -2:] == -7).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes(backend):
    blocks = random_blocks("Q8_0", 6, 2, hostile=False)
    want = oracle(blocks, "Q8_0")
    with usable(backend):
        assert torch.equal(sk.dequantize_ggml(blocks.view(2, 3, 68), "Q8_0"), want.view(2, 3, 64))
        assert torch.equal(sk.dequantize_ggml(blocks[1], "Q8_0"), want[1])
        assert sk.dequantize_ggml(blocks[:0], "Q8_0").shape == (0, 64)
        assert sk.dequantize_ggml(blocks[:, :0], "Q8_0").shape == (6, 0)


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ((torch.zeros(20), "Q4_1"), TypeError, "blocks: expected dtype uint8, got float32"),
        (([0] * 20, "Q4_1"), TypeError, "blocks: expected a torch.Tensor, got list"),
        (
            (torch.zeros(20, dtype=torch.uint8), "Q5_9"),
            ValueError,
            "kind: expected one of F32, .*, got 'Q5_9'",
        ),
        (
            (torch.zeros(21, dtype=torch.uint8), "Q4_1"),
            ValueError,
            r"whole Q4_1 blocks \(20 bytes each\), got 21 bytes",
        ),
        ((torch.zeros((), dtype=torch.uint8), "F32"), ValueError, "blocks: expected at least 1 dimension"),
        (
            (torch.zeros(4, 40, dtype=torch.uint8)[:, ::2], "Q4_1"),
            ValueError,
            "blocks: expected a contiguous last",
        ),
        ((torch.zeros(20, dtype=torch.uint8, device="meta"), "Q4_1"), ValueError, "blocks: .* meta"),
    ],
)
def test_bad_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        sk.dequantize_ggml(*arguments)


@pytest.mark.parametrize(
    "out, error, words",
    [
        (torch.zeros(32, dtype=torch.float16), TypeError, "out: expected dtype float32"),
        (torch.zeros(33), ValueError, r"out: expected shape \[32\], got \[33\]"),
        (torch.zeros(64)[::2], ValueError, "out: expected a contiguous last"),
    ],
)
def test_bad_out(out, error, words):
    with pytest.raises(error, match=words):
        sk.dequantize_ggml(torch.zeros(20, dtype=torch.uint8), "Q4_1", out=out)


@pytest.mark.parametrize("at", ["start", "end"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_touches_no_other_memory(kind, at):
    blocks = guarded_like(random_blocks(kind, 3, 3), at=at)
    out = guarded((3, 3 * BLOCKS[kind][0]), torch.float32, at=at)
    with usable("cpu"):
        sk.dequantize_ggml(blocks, kind, out=out)
    assert_same_bits(out, oracle(blocks, kind))


def test_can_be_recorded():
    blocks, out = random_blocks("Q4_K", 3, 2, hostile=False), torch.empty(3, 512)
    with usable("cpu"), sk.record() as recording:
        sk.dequantize_ggml(blocks, "Q4_K", out=out)
    blocks.copy_(random_blocks("Q4_K", 3, 2, seed=1, hostile=False))
    recording.run()
    assert_same_bits(out, oracle(blocks, "Q4_K"))


def test_out_must_not_overlap_blocks():
    memory = torch.zeros(64)
    with pytest.raises(ValueError, match=r"out: .* overlaps blocks"):
        sk.dequantize_ggml(memory.view(torch.uint8)[100:120], "Q4_1", out=memory[:32])
