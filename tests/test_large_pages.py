"""LargePages: pieces of their own, on cache lines, alive as long as they are used; the same weights in them."""

import gc
import io

import pytest
import torch

import specdec_kernels as sk
from specdec_kernels import large_pages


def test_pieces_are_apart_and_aligned():
    memory = sk.LargePages()
    shapes = [(3, 5), (7,), (0, 4), (1 << 20,), (2, 64)]
    pieces = [memory.empty(shape, dtype) for shape in shapes for dtype in (torch.uint8, torch.float32)]
    for i, piece in enumerate(pieces):
        piece.fill_(i)
    for i, piece in enumerate(pieces):
        assert (piece == i).all() and piece.is_contiguous()
        assert piece.numel() == 0 or piece.data_ptr() % 64 == 0
        assert piece.untyped_storage().nbytes() == piece.nbytes


def test_a_piece_larger_than_a_chunk_and_what_follows():
    memory = sk.LargePages()
    small, large = memory.empty((10,), torch.uint8), memory.empty((large_pages.CHUNK + 5,), torch.uint8)
    after = memory.empty((10,), torch.uint8)
    small.fill_(1), large.fill_(2), after.fill_(3)
    assert (small == 1).all() and (large == 2).all() and (after == 3).all()
    assert large.data_ptr() % large_pages.LARGE == 0


def test_tensors_outlive_the_object():
    memory = sk.LargePages()
    a, b = memory.empty((1000,), torch.float32).fill_(1), memory.empty((1000,), torch.float32).fill_(2)
    del memory
    gc.collect()
    del a
    gc.collect()
    assert (b == 2).all()


@pytest.mark.parametrize("advice", [None, -1])
def test_systems_without_large_pages(monkeypatch, advice):
    monkeypatch.setattr(large_pages, "_ADVICE", advice)  # -1: the kernel refuses
    assert (sk.LargePages().empty((3 << 20,), torch.uint8).fill_(7) == 7).all()


def test_weights_in_one_stretch():
    memory = sk.LargePages()
    w = torch.randn(3, 40, 64, generator=torch.Generator().manual_seed(0))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    weights = [sk.Int8Weight.empty(40, 64, 32, memory=memory) for _ in w]
    for weight, values in zip(weights, w, strict=True):
        weight.write_rows(0, values)
    for weight, values in zip(weights, w, strict=True):
        assert torch.equal(sk.linear_int8(x, weight), sk.linear_int8(x, sk.pack_int8(values, group_size=32)))
    addresses = [weight.codes.data_ptr() for weight in weights]
    assert addresses == sorted(addresses) and addresses[-1] - addresses[0] < 3 * (weights[0].nbytes + 128)
    file = io.BytesIO()
    torch.save(weights[1].state_dict(), file)
    assert file.tell() < 3 * weights[1].nbytes + 4096  # the matrix, not the memory that it lies in


def test_a_big_matrix_lies_on_large_pages():
    weight = sk.Int8Weight.empty(4096, 1024)
    assert weight.codes.data_ptr() % large_pages.LARGE == 0
    assert sk.Int8Weight.empty(16, 64).codes.data_ptr() % 64 == 0
