"""Grammars that the answer has to follow: what a caller may give."""

from __future__ import annotations

import json
from typing import NamedTuple

from .errors import OptionError, show

KINDS = ("regex", "lark", "ebnf")


class Grammar(NamedTuple):
    kind: str  # "json" (a schema, as text), "regex", "lark" or "ebnf"
    text: str


def parse(grammar) -> Grammar:
    """ "json" (any object), a JSON schema (a dict, or its text), "regex:...", "lark:..." or "ebnf:..."."""
    if isinstance(grammar, dict):
        try:
            return Grammar("json", json.dumps(grammar))
        except (TypeError, ValueError) as error:
            raise OptionError(f"grammar: expected a JSON schema, got one that is not JSON: {error}") from None
    if isinstance(grammar, str):
        kind, colon, text = grammar.partition(":")
        if grammar == "json":
            return Grammar("json", '{"type": "object"}')
        if grammar.lstrip().startswith("{"):
            try:
                return Grammar("json", json.dumps(json.loads(grammar)))
            except ValueError as error:
                raise OptionError(f"grammar: expected a JSON schema, got text that is not JSON: {error}") from None
        if colon and kind in KINDS and text:
            return Grammar(kind, text)
    kinds = ", ".join(f"'{kind}:...'" for kind in KINDS)
    raise OptionError(f"grammar: expected 'json', a JSON schema, {kinds}, got {show(grammar)}")
