"""Seed prompts to ids, and what stands around a prompt that the target makes up."""

from __future__ import annotations

from functools import cached_property

from ..errors import OptionError, TemplateError
from ..text.prompt import Skeleton, encode_messages
from .seeds import Seed


class PromptIds:
    """``target``: what has a tokenizer, and a chat template or None: then a prompt is its turns, line by line."""

    def __init__(self, target):
        self._tokenizer, self._template = target.tokenizer, target.chat_template
        self._skeletons: dict[int, Skeleton | None] = {}  # by the number of turns

    def of(self, seed: Seed) -> list[int]:
        """The ids of a prompt, ready for an answer. Raises TemplateError."""
        if self._template is None:
            return self._beginning + self._tokenizer.encode("\n".join(seed.turns), special=False)
        skeleton = self._skeleton(len(seed.turns))
        if skeleton is None:
            return encode_messages(self._template, seed.messages, self._tokenizer)
        return skeleton.encode(seed.turns)

    @cached_property
    def opening(self) -> list[int]:
        """What stands in front of a user's turn."""
        return self._around[0]

    @cached_property
    def closing(self) -> list[int]:
        """What ends it, and opens the answer."""
        return self._around[1]

    def check_made_up(self) -> None:
        """Raises OptionError where the target can't make up prompts."""
        if self._template is None or self._skeleton(1) is None or not self.opening or not self.closing:
            raise OptionError("made_up: expected 0 for a target without a chat template that says where turns begin")
        end = self._tokenizer.decode(self.closing[:1])
        if end not in self._tokenizer.control_tokens:
            raise OptionError("made_up: expected 0 for a target whose chat template ends turns without a token for it")

    @property
    def _beginning(self):
        return [self._tokenizer.bos_id] if getattr(self._tokenizer, "add_bos", False) else []

    @cached_property
    def _around(self):
        return [self._tokenizer.encode(piece) for piece in self._skeleton(1).pieces]

    def _skeleton(self, turns):
        """None for a template that changes or repeats contents."""
        if turns not in self._skeletons:
            roles = [("user", "assistant")[i % 2] for i in range(turns)]
            try:
                self._skeletons[turns] = Skeleton(self._template, roles, self._tokenizer)
            except TemplateError:
                self._skeletons[turns] = None
        return self._skeletons[turns]
