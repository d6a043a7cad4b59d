"""Grammars that an answer has to follow, with the help of ``llguidance`` or ``xgrammar``, whichever is installed.

A matcher of either library has a state that moves forward by one id and back by one id. ``Cursor`` makes a function of
it: asked what may follow an answer, it goes back to where that answer and the last one part and forward from there. So
the rows of a round may come in any order, those of a tree included, and drafts that are refused leave no trace. It
never moves behind an end of the text, and where nothing but the end can follow the matcher is not asked any more.
"""

from __future__ import annotations

import importlib
import json
import weakref
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .errors import OptionError, show

KINDS = ("regex", "lark", "ebnf")
# Numbers: torch spreads more over threads and waits for all of them, for long if others want the CPU, too.
PIECE = 16384
MOST_COMPILED = 64 << 20  # bytes of grammars that xgrammar keeps for the next request
_TRUTH = bytes([0] + [1] * 255)  # of llguidance's bytes
_BITS = torch.tensor([1 << i for i in range(31)] + [-(1 << 31)], dtype=torch.int32)  # of xgrammar's words


class Grammar(NamedTuple):
    kind: str  # "json" (a schema), "regex", "lark" or "ebnf"
    text: str


def parse(grammar) -> Grammar:
    """``grammar``: "json" (any object), a JSON schema (a dict or its text), "regex:...", "lark:..." or "ebnf:..."."""
    try:
        if isinstance(grammar, dict):
            return Grammar("json", json.dumps(grammar))
        if grammar == "json":
            return Grammar("json", '{"type": "object"}')
        if isinstance(grammar, str) and grammar.lstrip().startswith("{"):
            return Grammar("json", json.dumps(json.loads(grammar)))
    except (TypeError, ValueError) as error:
        raise OptionError(f"grammar: expected a JSON schema, got one that is not JSON: {error}") from None
    if isinstance(grammar, str):
        kind, _, text = grammar.partition(":")
        if kind in KINDS and text:
            return Grammar(kind, text)
    kinds = ", ".join(f"'{kind}:...'" for kind in KINDS)
    raise OptionError(f"grammar: expected 'json', a JSON schema, {kinds}, got {show(grammar)}")


class Vocabulary(NamedTuple):
    """What a library is told of the model's ids. Ids without bytes (control tokens, padding) are never allowed."""

    tokens: list[bytes]
    eos_ids: list[int]
    encode: object  # text -> ids

    @classmethod
    def of(cls, tokenizer, vocab_size, eos_ids):
        known = min(getattr(tokenizer, "vocab_size", vocab_size), vocab_size)
        tokens = [tokenizer.token_bytes(token, special=False) for token in range(known)]
        tokens += [b""] * (vocab_size - known)
        for token in eos_ids:
            tokens[token] = b""
        held = weakref.ref(tokenizer)  # or what is kept by tokenizer would keep it
        return cls(tokens, sorted(eos_ids), lambda text: held().encode(text, special=False))


class Matcher(Protocol):
    """Where one answer is in one grammar."""

    def forward(self, token: int) -> bool:
        """Whether the id may follow; it then has."""

    def back(self, count: int) -> None:
        """Takes back so many ids."""

    def mask(self) -> Tensor | None:
        """bool [V]: what may follow, an end included; None = only an end."""


class Guidance:
    """With llguidance: JSON schemas, regular expressions, its Lark, and GBNF as "ebnf"."""

    library, kinds = "llguidance", ("json", "regex", "lark", "ebnf")

    @staticmethod
    def prepare(library, words: Vocabulary):
        wrapper = library.TokenizerWrapper(_Words(words))
        return library.LLTokenizer(wrapper, n_vocab=len(words.tokens), eos_token=words.eos_ids)

    def __init__(self, library, tokenizer, grammar: Grammar):
        self.inner = library.LLMatcher(tokenizer, library.grammar_from(*grammar), log_level=0)
        self._check()

    def _check(self):
        if self.inner.is_error():
            raise ValueError(self.inner.get_error())

    def forward(self, token):
        return self.inner.try_consume_tokens([token]) == 1

    def back(self, count):
        if not self.inner.rollback(count):
            raise ValueError(self.inner.get_error())

    def mask(self):
        if self.inner.is_stopped():
            self._check()
            return None
        mask = self.inner.compute_logit_bias()  # a byte per id: 0, or something else
        self._check()
        return torch.frombuffer(bytearray(mask.translate(_TRUTH)), dtype=torch.bool)


class XGrammar:
    """With xgrammar: JSON schemas, regular expressions and its EBNF."""

    library, kinds = "xgrammar", ("json", "regex", "ebnf")

    @staticmethod
    def prepare(library, words: Vocabulary):
        info = library.TokenizerInfo(words.tokens, vocab_size=len(words.tokens), stop_token_ids=words.eos_ids)
        return library.GrammarCompiler(info, max_threads=1, cache_limit_bytes=MOST_COMPILED), len(words.tokens)

    def __init__(self, library, prepared, grammar: Grammar):
        compiler, self.vocab_size = prepared
        compiled = {
            "json": compiler.compile_json_schema,
            "regex": compiler.compile_regex,
            "ebnf": compiler.compile_grammar,
        }[grammar.kind](grammar.text)
        self.inner = library.GrammarMatcher(compiled)
        self.bits = library.allocate_token_bitmask(1, self.vocab_size)

    def forward(self, token):
        return self.inner.accept_token(token)

    def back(self, count):
        self.inner.rollback(count)

    def mask(self):
        self.inner.fill_next_token_bitmask(self.bits)
        words = self.bits[0, :, None].split(PIECE // 32)
        return torch.cat([(part & _BITS).bool().flatten() for part in words])[: self.vocab_size]


class _Words:
    """A vocabulary in the form that llguidance wraps."""

    def __init__(self, words: Vocabulary):
        self.eos_token_id, self.bos_token_id, self.tokens = words.eos_ids[0], None, words.tokens
        self.special_token_ids = words.eos_ids
        self._encode = words.encode

    def __call__(self, text):
        return self._encode(text.decode(errors="replace") if isinstance(text, bytes) else text)


MATCHERS = (Guidance, XGrammar)
_prepared: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by tokenizer: it takes a while


def make_matcher(grammar, vocab_size: int, eos_ids: Collection[int], tokenizer) -> Matcher:
    """With the first library that is installed and knows this kind of grammar."""
    grammar, missing = parse(grammar), []
    if not eos_ids:
        raise OptionError("grammar: expected a model that can end a text, got one without an end-of-sequence id")
    for kind in MATCHERS:
        if grammar.kind not in kind.kinds:
            continue
        try:
            library = importlib.import_module(kind.library)
        except ImportError as error:
            missing.append(f"{kind.library} ({error})")
            continue
        try:
            matcher = kind(library, _prepare(kind, library, tokenizer, vocab_size, eos_ids), grammar)
        except (ValueError, RuntimeError) as error:
            raise OptionError(f"grammar: {kind.library} refuses {show(grammar.text)}: {_line(error)}") from None
        matcher.tokenizer = tokenizer  # stays as long as the matcher, which may ask for ids of a text
        return matcher
    raise OptionError(
        f"grammar: expected a library for {grammar.kind!r} to be installed, got no {', no '.join(missing)}"
    )


def _prepare(kind, library, tokenizer, vocab_size, eos_ids):
    known = _prepared.setdefault(tokenizer, {})
    key = kind, vocab_size, frozenset(eos_ids)
    if key not in known:
        known[key] = kind.prepare(library, Vocabulary.of(tokenizer, vocab_size, eos_ids))
    return known[key]


def _line(error) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class Cursor:
    """``allowed(ids)``: what may follow the answer, that is all ids but the first ``prompt_tokens``; bool [V]."""

    def __init__(self, matcher: Matcher, prompt_tokens: int, vocab_size: int, eos_ids: Collection[int]):
        self.matcher, self.prompt_tokens = matcher, prompt_tokens
        self.end = torch.zeros(vocab_size, dtype=torch.bool)
        self.end[sorted(eos_ids)] = True
        self._at: list[int] = []  # the answer so far, for the matcher

    def allowed(self, ids: Sequence[int]) -> Tensor:
        try:
            return self._allowed(list(ids[self.prompt_tokens :]))
        except OptionError:
            raise
        except (ValueError, RuntimeError) as error:  # of the library: a text that it can't go on with
            raise OptionError(
                f"grammar: nothing can follow {len(self._at)} ids of this answer: {_line(error)}"
            ) from None

    def _allowed(self, answer: list[int]) -> Tensor:
        same = len(self._at)
        if answer[:same] != self._at:
            same = next(i for i, token in enumerate(self._at) if i == len(answer) or answer[i] != token)
            self.matcher.back(len(self._at) - same)
            del self._at[same:]
        for token in answer[same:]:
            if not self.matcher.forward(token):
                raise OptionError(f"grammar: token {token} can't follow {len(self._at)} others of this answer")
            self._at.append(token)
        mask = self.matcher.mask()
        return self.end if mask is None else mask
