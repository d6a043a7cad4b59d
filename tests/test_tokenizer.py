"""The tokenizer: against a slow BPE written from its definition, against published ids, and piece by piece."""

import itertools
import subprocess
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specloop.errors import FormatError, ModelError, PromptError
from specloop.formats.gguf import GGUF
from specloop.text import tokenizer as module
from specloop.text.tokenizer import StreamDecoder, Tokenizer


@pytest.fixture(scope="module")
def real(smollm2):
    with GGUF.open(smollm2) as g:
        return g.metadata, Tokenizer.from_gguf(g.metadata)


# ---- an independent tokenizer, from the definitions


def byte_characters():
    """Byte -> character, in the words of GPT-2's encoder."""
    keep = (
        list(range(ord("!"), ord("~") + 1)) + list(range(ord("¡"), ord("¬") + 1)) + list(range(ord("®"), ord("ÿ") + 1))
    )
    out, n = {b: chr(b) for b in keep}, 0
    for b in range(256):
        if b not in out:
            out[b] = chr(256 + n)
            n += 1
    return out


SPACES = set("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | {chr(c) for c in range(0x2000, 0x200B)}


def kind(c):
    return "s" if c in SPACES else unicodedata.category(c)[0] if unicodedata.category(c)[0] in "LN" else "o"


def gpt2_words(text):
    """'s|'t|'re|'ve|'m|'ll|'d| ?letters| ?numbers| ?others|spaces not before a non-space|spaces"""
    words, i = [], 0
    while i < len(text):
        end = next((i + len(s) for s in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d") if text.startswith(s, i)), None)
        if end is None:
            start = i + (text[i] == " " and i + 1 < len(text) and kind(text[i + 1]) != "s")
            end = start + 1
            while end < len(text) and kind(text[end]) == kind(text[start]):
                end += 1
            if kind(text[start]) == "s" and end < len(text) and end - start > 1:
                end -= 1  # leave the last space to the word that follows
        words.append(text[i:end])
        i = end
    return words


def smollm_words(text):
    """Every number character alone, then GPT-2's words of what is between."""
    pieces, run = [], ""
    for c in text:
        if kind(c) == "N":
            pieces += [*gpt2_words(run), c]
            run = ""
        else:
            run += c
    return pieces + gpt2_words(run)


class SlowBPE:
    def __init__(self, metadata, words):
        self.ids = {t: i for i, t in enumerate(metadata["tokenizer.ggml.tokens"])}
        self.ranks = {tuple(m.split(" ")): i for i, m in enumerate(metadata["tokenizer.ggml.merges"])}
        self.words, self.chars = words, byte_characters()

    def encode(self, text):
        ids = []
        for word in self.words(text):
            parts = [self.chars[b] for b in word.encode()]
            while len(parts) > 1:
                rank, i = min((self.ranks.get(pair, 1 << 30), i) for i, pair in enumerate(itertools.pairwise(parts)))
                if rank == 1 << 30:
                    break
                parts[i : i + 2] = [parts[i] + parts[i + 1]]
            ids += [self.ids[p] for p in parts if p in self.ids]
        return ids


TEXTS = [
    "",
    " ",
    "Hello, world!",
    "It's they're we'll I'd I've 'S 'quoted'",
    "  two  spaces   three\t\ttabs \n\n newlines \r\n end  ",
    "1234567890 3.14159 x2 ²³ Ⅷ ٣٤ 12a34",
    "def f(x):\n    return x ** 2  # square\n",
    "Grüße, naïve façade — “quotes” … ŒÆ",
    "日本語のテキスト、中文文本。한국어",
    "مرحبا עברית हिन्दी ไทย",
    "👩‍👩‍👧‍👦 🎉🏽 e\u0301\u200d\ufeff",
    "a\u00a0b\u2003c\u3000d\u2028e",
    "\x00\x01\x7f\x1b[0m",
    "https://example.org/a_b-c?d=e&f=%20#g",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 5,
    "<|not_special|> < |im_end| >",
]


@pytest.mark.parametrize("text", TEXTS)
def test_equals_slow_bpe(real, text):
    metadata, tokenizer = real
    assert tokenizer.encode(text) == SlowBPE(metadata, smollm_words).encode(text)


@given(
    st.text(
        st.one_of(st.sampled_from("ab 1'\n\tstremld.é½"), st.characters(exclude_categories=["Cs", "Cn"])), max_size=40
    )
)
def test_equals_slow_bpe_on_random_text(slow_and_real, text):
    slow, tokenizer = slow_and_real
    assert tokenizer.encode(text, special=False) == slow.encode(text)


@pytest.fixture(scope="module")
def slow_and_real(real):
    return SlowBPE(real[0], smollm_words), real[1]


def test_published_ids(real):
    """The start of every SmolLM2 chat prompt, as the model's own tokenizer gives it."""
    text = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    ids = [
        1,
        9690,
        198,
        2683,
        359,
        253,
        5356,
        5646,
        11173,
        3365,
        3511,
        308,
        34519,
        28,
        7018,
        411,
        407,
        19712,
        8182,
        2,
        198,
    ]
    assert real[1].encode(text) == ids
    assert real[1].decode(ids) == text
    assert real[1].decode(ids, special=False) == text.replace("<|im_start|>", "").replace("<|im_end|>", "")


def test_special_ids(real):
    tokenizer = real[1]
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.pad_id, tokenizer.add_bos) == (49152, 1, 2, False)
    assert tokenizer.eos_ids == {0, 2}
    assert tokenizer.encode("a<|im_end|>b") == [*tokenizer.encode("a"), 2, *tokenizer.encode("b")]
    assert not {0, 1, 2} & set(tokenizer.encode("a<|im_end|>b<|im_start|>", special=False))


def test_round_trip_of_all_that_the_vocabulary_can_spell(real):
    metadata, tokenizer = real
    for text in TEXTS:
        chars = byte_characters()
        have = set(metadata["tokenizer.ggml.tokens"])
        kept = bytes(b for b in text.encode() if chars[b] in have)
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == kept


def test_every_token(real):
    metadata, tokenizer = real
    byte_of = {c: b for b, c in byte_characters().items()}
    for id, token in enumerate(metadata["tokenizer.ggml.tokens"]):
        want = token.encode() if id < 17 else bytes(byte_of[c] for c in token)
        assert tokenizer.token_bytes(id) == want
    for bad in (-1, 49152, 2**40):
        with pytest.raises(ValueError, match="token id: expected 0 <= id < 49152"):
            tokenizer.token_bytes(bad)


# ---- streams


@pytest.mark.parametrize("special", [True, False])
@given(data=st.data())
def test_stream_equals_decode(real, special, data):
    """Also for ids whose bytes are no UTF-8: half characters, stray continuation bytes."""
    tokenizer = real[1]
    some = st.sampled_from([*tokenizer.encode("🎉 日本 é 👩\u200d x"), 0, 2, *range(100, 270)])
    ids = data.draw(st.lists(st.one_of(some, st.integers(0, tokenizer.vocab_size - 1)), max_size=30))
    stream = StreamDecoder(tokenizer, special=special)
    parts = [stream.push(id) for id in ids]
    assert "".join(parts) + stream.flush() == tokenizer.decode(ids, special=special)


def test_stream_holds_back_half_characters(real):
    tokenizer = real[1]
    ids = tokenizer.encode("🦤")
    assert len(ids) > 1
    stream = StreamDecoder(tokenizer)
    assert [stream.push(id) for id in ids] == [""] * (len(ids) - 1) + ["🦤"]
    assert stream.flush() == ""
    stream = StreamDecoder(tokenizer)
    assert [stream.push(id) for id in ids[:-1]] == [""] * (len(ids) - 1)
    assert stream.flush() == "\ufffd"


# ---- small vocabularies, other kinds, bad ones


def small(**changes):
    """A vocabulary of all 256 bytes, four merges, and some special tokens."""
    tokens = [*byte_characters().values(), "he", "ll", "hell", "hello", "<s>", "</s>", "<tool>", "[PAD]", "<tool>x"]
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1] * 260 + [3, 3, 4, 5, 4],
        "merges": ["h e", "l l", "he ll", "hell o"],
        "bos_token_id": 260,
        "eos_token_id": 261,
    } | changes
    return {f"tokenizer.ggml.{k}": v for k, v in metadata.items() if v is not None}


def test_small_vocabulary():
    tokenizer = Tokenizer.from_gguf(small())
    assert tokenizer.encode("hello") == [259]
    assert tokenizer.encode("<s>hello</s>") == [260, 259, 261]
    assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.pad_id) == ({261}, 260, None)
    # User-defined tokens are always found, and the longest wins; control tokens only where they may be.
    assert tokenizer.encode("<tool><tool>x<s>", special=False) == [262, 264, *map(ord_id, "<s>")]
    assert tokenizer.decode([260, 262, 263, 259], special=False) == "<tool>hello"
    assert tokenizer.token_bytes(263) == b""


def ord_id(c):
    return list(byte_characters().values()).index(c)


WORDS = "I'LL go\n\n  far 12345 ab.\ncd !?\n"
CUTS = {
    "gpt-2": ["I", "'", "LL", " go", "\n\n ", " far", " 12345", " ab", ".", "\n", "cd", " !?", "\n"],
    "smollm": ["I", "'", "LL", " go", "\n\n ", " far", " ", *"12345", " ab", ".", "\n", "cd", " !?", "\n"],
    "llama-bpe": ["I", "'LL", " go", "\n\n", " ", " far", " ", "123", "45", " ab", ".\n", "cd", " !?\n"],
    "qwen2": ["I", "'LL", " go", "\n\n", " ", " far", " ", *"12345", " ab", ".\n", "cd", " !?\n"],
}


@pytest.mark.parametrize("pre", CUTS)
def test_pre_tokenizers(pre):
    tokenizer = Tokenizer.from_gguf(small(pre=pre))
    assert "".join(CUTS[pre]) == WORDS
    cut = [WORDS[a:b] for _, (a, b) in tokenizer._model.pre_tokenizer.pre_tokenize_str(WORDS)]
    assert cut == CUTS[pre]
    assert tokenizer.decode(tokenizer.encode(WORDS)) == WORDS


def test_llama_bpe_takes_whole_words_of_the_vocabulary():
    """ignore_merges: a word that is a token is that token, even if no merge leads to it."""
    merges = ["h e", "l l"]
    assert Tokenizer.from_gguf(small(pre="llama-bpe", merges=merges)).encode("hello") == [259]
    assert len(Tokenizer.from_gguf(small(pre="gpt-2", merges=merges)).encode("hello")) == 3
    assert Tokenizer.from_gguf(small(pre="llama-bpe")).add_bos and not Tokenizer.from_gguf(small()).add_bos


def test_fingerprint():
    one = Tokenizer.from_gguf(small()).fingerprint
    assert one == Tokenizer.from_gguf(small()).fingerprint
    swapped = small()
    tokens = swapped["tokenizer.ggml.tokens"]
    tokens[3], tokens[4] = tokens[4], tokens[3]
    others = [Tokenizer.from_gguf(m).fingerprint for m in (swapped, small(eos_token_id=260), small(bos_token_id=None))]
    longer = small(tokens=[*small()["tokenizer.ggml.tokens"], "<x>"], token_type=[1] * 260 + [3, 3, 4, 5, 4, 3])
    assert len({one, *others, Tokenizer.from_gguf(longer).fingerprint}) == 5


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"model": "llama"}, ModelError, "tokenizer model 'llama' is not supported"),
        ({"model": None}, ModelError, "tokenizer model None"),
        ({"pre": "dbrx"}, ModelError, "pre-tokenizer 'dbrx' is not supported .*smollm"),
        ({"pre": ["smollm"]}, ModelError, r"pre-tokenizer \['smollm'\]"),
        ({"pre": None}, ModelError, "pre-tokenizer None"),
        ({"tokens": None}, FormatError, r"ggml\.tokens: expected an array of strings, got nothing"),
        ({"tokens": [1, 2]}, FormatError, r"ggml\.tokens: expected an array of strings, got an array of 2"),
        ({"tokens": "abc", "token_type": None}, FormatError, r"ggml\.tokens: expected an array of strings, got str"),
        ({"tokens": []}, FormatError, r"ggml\.tokens: expected an array of strings"),
        ({"tokens": ["a", "a"], "token_type": None}, FormatError, "0 and 1 are the same token 'a'"),
        ({"token_type": [1]}, FormatError, "expected 265 integers, one per token, got an array of 1"),
        ({"token_type": ["x"] * 265}, FormatError, "expected 265 integers"),
        ({"merges": ["he"]}, FormatError, "merges: number 0 is not two tokens"),
        ({"merges": ["h e", "q qq"]}, FormatError, r"ggml\.merges: number 1: 'qq' is not a token$"),
        ({"eos_token_id": 265}, FormatError, r"eos_token_id: expected 0 <= id < 265, got 265"),
        ({"bos_token_id": "1"}, FormatError, r"bos_token_id: expected"),
        ({"bos_token_id": True}, FormatError, r"bos_token_id: expected"),
    ],
)
def test_bad_metadata(changes, error, words):
    with pytest.raises(error, match=words) as caught:
        Tokenizer.from_gguf(small(**changes))
    assert "\n" not in str(caught.value)


def test_bad_text():
    tokenizer = Tokenizer.from_gguf(small())
    with pytest.raises(PromptError, match="a lone surrogate at character 2"):
        tokenizer.encode("ab\udcff")
    with pytest.raises(PromptError, match="expected a str, got bytes"):
        tokenizer.encode(b"ab")


def test_memory(smollm2):
    """Opening the file and building the tokenizer costs at most 28 MB at its peak; pages of files, which the kernel
    maps as it sees fit, not counted."""
    code = f"""
import torch, specdec_kernels, specloop.errors
def kilobytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
peak, files = kilobytes("VmHWM"), kilobytes("RssFile")
from specloop.formats.gguf import GGUF
from specloop.text.tokenizer import Tokenizer
with GGUF.open({str(smollm2)!r}) as g:
    t = Tokenizer.from_gguf(g.metadata)
t.encode("hello")
print(kilobytes("VmHWM") - peak - (kilobytes("RssFile") - files))
"""
    used = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert used < 28000, f"{used} kB"


def test_the_byte_alphabet():
    assert {c: b for b, c in byte_characters().items()} == module._BYTE_OF
