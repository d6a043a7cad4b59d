"""Byte-level BPE from a GGUF's metadata.

The ``tokenizers`` library cuts a text into words, byte_pairs.py merges the characters of a word, and the vocabulary's
special tokens are handled here: whether they may be parsed out of a text is a property of the call (a chat template
writes them, a user's text must be able to not mean them).
"""

import codecs
import hashlib
import re
import struct
from collections.abc import Sequence
from functools import cached_property, lru_cache

import tokenizers
from tokenizers import normalizers, pre_tokenizers

from ..errors import FormatError, ModelError, PromptError, show
from ..formats.strings import Strings
from ..heap import give_back
from .byte_pairs import BytePairs

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5

# Control tokens that end a text in one model or another; the metadata names only one of them.
_ENDS = {
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "</s>",
}

# How text is cut into words before merging, by the name in the metadata: the models' published expressions.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2_words():
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _words_without_digits():
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_words()])


def _words_of(expression):
    split = pre_tokenizers.Split(tokenizers.Regex(expression), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS = {
    "gpt-2": _gpt2_words,
    "smollm": _words_without_digits,
    "llama-bpe": lambda: _words_of(_LLAMA3),
    "qwen2": lambda: _words_of(_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")),
}


def _byte_alphabet():
    """GPT-2's one character per byte: printable Latin-1 stands for itself, the rest for U+0100 onwards."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class Tokenizer:
    """Text to ids and back. Immutable; may be used from several threads."""

    def __init__(self, model, raw, added, *, vocab_size, bos_id, eos_id, pad_id, eos_ids, add_bos):
        self._model = model  # of the ordinary tokens: encode, id_to_token
        self._raw = raw  # id -> bytes of the tokens that are not made of byte characters
        self._always = _splitter(added[_USER_DEFINED])
        self._special = _splitter(added[_USER_DEFINED] | added[_CONTROL])
        self._added = added[_USER_DEFINED] | added[_CONTROL]
        self.vocab_size = vocab_size
        self.bos_id = bos_id  # None if the model has none
        self.pad_id = pad_id
        self.eos_id = eos_id  # the one that the chat template knows as eos_token, or None
        self.eos_ids = eos_ids  # frozenset of all ids that end a text
        self.add_bos = add_bos  # whether the model wants its BOS in front of a plain prompt

    @classmethod
    def from_gguf(cls, metadata):
        """Raises ModelError for a tokenizer of another kind, FormatError for malformed metadata."""
        kind = metadata.get("tokenizer.ggml.model")
        if kind != "gpt2":
            raise ModelError(f"tokenizer model {show(kind)} is not supported (byte-level BPE, 'gpt2', is)")
        pre = metadata.get("tokenizer.ggml.pre")
        if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
            raise ModelError(f"pre-tokenizer {show(pre)} is not supported (supported: {', '.join(_PRE_TOKENIZERS)})")
        built = cls._from_gguf(metadata, pre)
        give_back()  # 12 MB for 49,000 tokens
        return built

    @classmethod
    def _from_gguf(cls, metadata, pre):
        tokens = _strings(metadata, "tokenizer.ggml.tokens")
        types = _types(metadata, len(tokens))
        added = {_CONTROL: {}, _USER_DEFINED: {}}
        raw, vocab = {}, {}
        for id, (token, type) in enumerate(zip(tokens, types, strict=True)):
            if type in added:
                added[type][token] = id
                raw[id] = token.encode()
            elif type in (_UNKNOWN, _UNUSED):
                raw[id] = b""
            elif vocab.setdefault(token, id) != id:
                raise FormatError(f"tokenizer.ggml.tokens: {vocab[token]} and {id} are the same token {show(token)}")
        named = {name: _special_id(metadata, name, len(tokens)) for name in ("bos", "eos", "eot", "padding")}
        ends = {id for token, id in added[_CONTROL].items() if token in _ENDS} | {named["eos"], named["eot"]}
        add_bos = metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") is True
        return cls(
            _Model(_byte_pairs(metadata, tokens, vocab, pre), pre),
            raw,
            added,
            vocab_size=len(tokens),
            bos_id=named["bos"],
            pad_id=named["padding"],
            eos_id=named["eos"],
            eos_ids=frozenset(ends - {None}),
            add_bos=add_bos and named["bos"] is not None,
        )

    def encode(self, text, *, special=True):
        """The ids of the text. ``special=False`` takes control tokens in it for ordinary text.

        Adds nothing of its own (no BOS). Bytes that the vocabulary has no token for are dropped, as they are by the
        model's original tokenizer. Raises PromptError if ``text`` is not text.
        """
        if not isinstance(text, str):
            raise PromptError(f"text: expected a str, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"text: not valid Unicode (a lone surrogate at character {error.start})") from None
        return self._ids(text, special)

    def _ids(self, text, special):
        splitter = self._special if special else self._always
        ids = []
        for i, piece in enumerate(splitter.split(text) if splitter else [text]):
            if i % 2:
                ids.append(self._added[piece])
            elif piece:
                ids += self._model.encode(piece)
        return ids

    def decode(self, ids, *, special=True):
        """The text of the ids, U+FFFD where their bytes are not UTF-8. ``special=False`` leaves control tokens out."""
        return b"".join([self.token_bytes(id, special=special) for id in ids]).decode(errors="replace")

    def token_bytes(self, id, *, special=True):
        """The bytes that the token stands for; nothing for unused ids and, if not ``special``, for control tokens."""
        raw = self._raw.get(id)
        if raw is not None:
            return raw if special or id in self._user_defined else b""
        token = self._model.id_to_token(id) if 0 <= id < self.vocab_size else None
        if token is None:
            raise ValueError(f"token id: expected 0 <= id < {self.vocab_size}, got {id}")
        return self._spelled(token)

    def _spelled(self, token):
        """The bytes of an ordinary token."""
        try:
            return bytes([_BYTE_OF[c] for c in token])
        except KeyError:  # not spelled in byte characters: it stands for itself
            return token.encode()

    @cached_property
    def _user_defined(self):
        return frozenset(self._added[token] for token in (self._always.tokens if self._always else ()))

    @cached_property
    def control_tokens(self):
        """The texts that ``encode`` takes for control tokens unless told not to, longest first."""
        ordinary = self._user_defined
        return tuple(t for t in self._special.tokens if self._added[t] not in ordinary) if self._special else ()

    @cached_property
    def fingerprint(self):
        """Hex digest of what the ids mean: every id's bytes and the special ids. Equal means interchangeable.

        Unused ids at the end don't count: models of one family are filled up to different multiples.
        """
        digest, unused = hashlib.sha256(), b""
        for id in range(self.vocab_size):
            token = self.token_bytes(id)
            entry = struct.pack("<I?", len(token), id in self._raw) + token
            if token or id not in self._raw:
                digest.update(unused + entry)
                unused = b""
            else:
                unused += entry
        digest.update(repr((self.bos_id, self.pad_id, sorted(self.eos_ids))).encode())
        return digest.hexdigest()


class StreamDecoder:
    """Turns ids into text as they come: every ``push`` returns the text that is complete by then.

    The bytes of a character that is cut by the end of a token are held back. All that ``push`` and the final ``flush``
    returned is what ``decode`` makes of all the ids.
    """

    def __init__(self, tokenizer, *, special=True):
        self._tokenizer, self._options = tokenizer, {"special": special}
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, id):
        return self._decoder.decode(self._tokenizer.token_bytes(id, **self._options))

    def flush(self):
        """The end of the text: bytes still held back are not a character, so they become U+FFFD."""
        return self._decoder.decode(b"", final=True)


class _Splitter:
    """Cuts a text at tokens: the leftmost, of those the longest."""

    def __init__(self, tokens):
        self.tokens = sorted(tokens, key=len, reverse=True)
        self.split = re.compile(f"({'|'.join(map(re.escape, self.tokens))})").split


def _splitter(tokens):
    tokens = [token for token in tokens if token]
    return _Splitter(tokens) if tokens else None


class _Model:
    """A text without special tokens to ids: cut into words, and these merged. Words that come often are remembered."""

    REMEMBERED, LONGEST = 4096, 32  # words, and characters of one: at most a megabyte

    def __init__(self, pairs, pre):
        self.pre_tokenizer = _PRE_TOKENIZERS[pre]()
        self.normalizer = normalizers.NFC() if pre == "qwen2" else None
        self.id_to_token = pairs.id_to_token
        self._merged, self._remembered = pairs.encode, lru_cache(self.REMEMBERED)(pairs.encode)

    def encode(self, text):
        if self.normalizer is not None:
            text = self.normalizer.normalize_str(text)
        ids = []
        for word, _ in self.pre_tokenizer.pre_tokenize_str(text):
            ids += (self._remembered if len(word) <= self.LONGEST else self._merged)(word)
        return ids


def _byte_pairs(metadata, tokens, ids, pre):
    key = "tokenizer.ggml.merges"
    try:
        return BytePairs(tokens, ids, _strings(metadata, key), whole_words=pre == "llama-bpe")
    except ValueError as error:
        raise FormatError(f"{key}: {error}") from None


def _strings(metadata, key):
    values = metadata.get(key)
    if isinstance(values, Strings) and values:
        return values
    array = isinstance(values, Sequence) and not isinstance(values, str)
    if not array or not values or not all(isinstance(value, str) for value in values):
        raise FormatError(f"{key}: expected an array of strings, got {_kind(values)}")
    return values


def _types(metadata, count):
    key = "tokenizer.ggml.token_type"
    types = metadata.get(key)
    if types is None:
        return [_NORMAL] * count
    if not isinstance(types, list) or len(types) != count or not all(type(value) is int for value in types):
        raise FormatError(f"{key}: expected {count} integers, one per token, got {_kind(types)}")
    return types


def _special_id(metadata, name, count):
    key = f"tokenizer.ggml.{name}_token_id"
    id = metadata.get(key)
    if id is not None and (type(id) is not int or not 0 <= id < count):
        raise FormatError(f"{key}: expected 0 <= id < {count}, got {show(id)}")
    return id


def _kind(values):
    if values is None:
        return "nothing"
    return type(values).__name__ if isinstance(values, str | int | float) else f"an array of {len(values)}"
