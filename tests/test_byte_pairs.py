"""Merging against the library's, over made-up vocabularies and real ones; and what the tables may cost."""

import subprocess
import sys
import time
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import library_bpe
from specloop.formats.gguf import GGUF
from specloop.text.byte_pairs import BytePairs
from specloop.text.tokenizer import Tokenizer
from test_tokenizer import TEXTS, small


@st.composite
def vocabularies(draw):
    """(ids, merges): some of the letters, then tokens that merges make of the tokens so far, merges in any order."""
    tokens = draw(st.permutations("abcd"))[: draw(st.integers(1, 4))]
    merges = []
    for _ in range(draw(st.integers(0, 14))):
        left, right = draw(st.sampled_from(tokens)), draw(st.sampled_from(tokens))
        merges.append(f"{left} {right}")
        if left + right not in tokens:
            tokens.append(left + right)
    ids = draw(st.permutations(range(len(tokens))))
    return dict(zip(tokens, ids, strict=True)), draw(st.permutations(merges))


@settings(max_examples=200, deadline=None)
@given(vocabularies(), st.lists(st.text("abcde", max_size=20), max_size=8), st.booleans())
def test_equals_the_library(vocabulary, words, whole_words):
    """Also with letters that are no token, merges that are there twice, and tokens to which no merge leads."""
    ids, merges = vocabulary
    tokens = sorted(ids, key=ids.get)
    ours = BytePairs(tokens, ids, merges, whole_words=whole_words)
    theirs = library_bpe.model(ids, merges, whole_words=whole_words)
    for word in [*words, *tokens]:
        assert list(ours.encode(word)) == [token.id for token in theirs.tokenize(word)]


def test_order_of_merges():
    ids = {"a": 0, "b": 1, "aa": 2, "ab": 3, "aab": 4}
    pairs = lambda *merges: BytePairs(list(ids), ids, merges)
    assert pairs("a a", "a b").encode("aab") == (2, 1)
    assert pairs("a b", "a a").encode("aab") == (0, 3)
    assert pairs("a a").encode("aaa") == (2, 0)  # leftmost first
    assert pairs("a a", "aa b", "a b").encode("aabab") == (4, 3)
    assert pairs("a a", "a b", "a a").encode("aab") == (0, 3)  # of equals the later counts
    assert pairs().encode("aab") == (0, 0, 1)
    assert pairs("a b").encode("axb") == (3,)  # what is no token is not there
    assert pairs("a b").encode("") == pairs("a b").encode("xyz") == ()


@pytest.fixture(scope="module")
def real(smollm2):
    with GGUF.open(smollm2) as g:
        return dict(g.metadata)


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
@settings(max_examples=20, deadline=None)
@given(text=st.lists(st.one_of(st.text(max_size=12), st.sampled_from([*TEXTS, *"eé"])), max_size=6).map("".join))
def test_real_vocabulary_equals_the_library(built, pre, text):
    ours, theirs = built[pre]
    assert ours.encode(text, special=False) == theirs.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def built(real):
    found = {}
    for pre in ("smollm", "gpt-2", "llama-bpe", "qwen2"):
        metadata = real | {"tokenizer.ggml.pre": pre}
        found[pre] = Tokenizer.from_gguf(metadata), library_bpe.of_metadata(metadata)
    return found


def test_prose_equals_the_library(built, prose):
    ours, theirs = built["smollm"]
    for text in (prose, prose.upper(), prose[::-1], prose.replace(" ", ""), unicodedata.normalize("NFD", prose)):
        assert ours.encode(text, special=False) == theirs.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def prose():
    from importlib.resources import files

    return (files("specloop") / "data" / "prose.txt").read_text()


def test_words_of_any_length(built):
    """The time grows as n log n: a word of 60,000 letters in seconds (with n squared it would be an hour)."""
    ours, theirs = built["smollm"]
    text = "abcdefgh" * 7500
    started = time.process_time()
    ids = ours.encode(text)
    assert time.process_time() - started < 20
    assert ids == theirs.encode(text, add_special_tokens=False).ids


def test_words_that_come_often_are_remembered_and_long_ones_not():
    tokenizer = Tokenizer.from_gguf(small())
    assert [tokenizer.encode("hello"), tokenizer.encode("hello")] == [[259], [259]]
    tokenizer.encode("h" * 33)
    assert tokenizer._model._remembered.cache_info()[:1] + tokenizer._model._remembered.cache_info()[3:] == (1, 1)


def test_memory_that_stays(smollm2):
    """Over SmolLM2's vocabulary a tokenizer keeps three and a half MB; the library's takes 11 and a half."""
    code = f"""
import re, sys
import torch, specdec_kernels
from specloop.heap import give_back
from specloop.formats.gguf import GGUF
from specloop.text.tokenizer import Tokenizer
def owned():
    give_back()
    return int(re.search(r"RssAnon:\\s*(\\d+)", open("/proc/self/status").read())[1])
def build():
    with GGUF.open({str(smollm2)!r}) as g:
        return Tokenizer.from_gguf(g.metadata)
build().encode("hello")  # what the first one makes the interpreter keep
before = owned()
tokenizer = build()
tokenizer.encode("hello")
print(owned() - before)
"""
    used = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert used < 6000, f"{used} kB"  # pages come and go by the dozen on a busy machine
