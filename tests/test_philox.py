"""The random number generator against published answers, and every implementation of it against the others."""

import pytest
import torch

from instruction_sets import ISAS
from specdec_kernels import native
from specdec_kernels.reference.philox import philox4x32, uniform

# Known answers of the Random123 distribution (kat_vectors, philox4x32 with 10 rounds): counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    assert philox4x32(key, counter) == words
    tensors = philox4x32(key, tuple(torch.tensor([c, c]) for c in counter))
    assert [t.tolist() for t in tensors] == [[w, w] for w in words]


@pytest.mark.skipif(native.cpu is None, reason="no compiled module")
def test_compiled_generator_agrees():
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        k0, k1, *counter = torch.randint(0, 2**32, (6,), generator=generator).tolist()
        assert native.cpu.philox4x32(k1 << 32 | k0, *counter) == philox4x32((k0, k1), counter)


@pytest.mark.parametrize("isa", ISAS)
def test_vectorised_words_agree(isa):
    before = native.cpu.isa()
    native.cpu.set_isa(isa)
    try:
        for seed, position, c2, first in ((5, 9, 3 << 24 | 7, 0), (2**64 - 3, 2**40 + 1, 2 << 24, 2**31 - 8)):
            words = native.cpu.philox_first_words(seed, position, c2, first)
            expected = [
                philox4x32((seed % 2**32, seed >> 32), (position % 2**32, position >> 32, c2, first + j))[0]
                for j in range(16)
            ]
            assert words == expected
    finally:
        native.cpu.set_isa(before)


def test_uniform_layout_of_key_and_counter():
    u = uniform(-3, 2**40 + 5, 2, 9, 77)
    words = philox4x32((0xFFFFFFFD, 0xFFFFFFFF), (5, 2**8, 2 << 24 | 9, 77))
    assert u == words[0] / 2**32
    assert uniform(-3, 2**40 + 5, 2, 9, torch.tensor([1, 77]))[1].item() == u


def test_every_part_of_the_key_matters():
    base = {"seed": 1, "position": 2, "stream": 3, "index": 4, "group": 5}
    changed = [{**base, name: value + 2**shift} for name, value in base.items() for shift in (0, 3)]
    changed += [{**base, "seed": 1 + 2**40}, {**base, "position": 2 + 2**40}]
    assert len({uniform(**c) for c in [base, *changed]}) == len(changed) + 1
