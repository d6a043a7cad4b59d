"""Chat messages to token ids, so that only the template can write control tokens.

A message that contains the text of one, say "<|im_end|>", means these characters; parsed as the token it would let a
message end its turn and begin another speaker's. So a mark goes into every such text before the template renders it,
and the result is cut at the marks before it is encoded: what is cut in two is no token's text any more.
"""

from ..errors import TemplateError
from .chat import chat_prompt

MARK = "\ufdd0"  # a noncharacter: no text that is meant to be read has it
PLACE = "\ufdd1{}\ufdd1"  # another, around the number of a content


def encode_messages(template, messages, tokenizer):
    """The ids of the rendered messages, ready for an answer. Raises TemplateError, PromptError."""
    marked = [_marked(message, tokenizer.control_tokens) for message in messages]
    return _ids(_rendered(template, marked, tokenizer), tokenizer)


class Skeleton:
    """What a template writes around the contents of messages with these roles, in ``pieces``: rendered once for many
    messages: the first rendering takes 0.1 s, others some milliseconds.

    Raises TemplateError, also for a template that does not write every content once, in order.
    """

    def __init__(self, template, roles, tokenizer):
        self._tokenizer, self.pieces = tokenizer, []
        places = [PLACE.format(i) for i in range(len(roles))]
        messages = [{"role": role, "content": place} for role, place in zip(roles, places, strict=True)]
        rest = _rendered(template, messages, tokenizer)
        for i, place in enumerate(places):
            before, found, rest = rest.partition(place)
            if not found or place in rest:
                raise TemplateError(f"chat template: expected it to write message {i} once, behind those before")
            self.pieces.append(before)
        self.pieces.append(rest)

    def encode(self, contents):
        """What ``encode_messages`` makes of messages with these contents, if they begin and end without spaces."""
        text = self.pieces[0]
        for content, piece in zip(contents, self.pieces[1:], strict=True):
            text += _apart(content, self._tokenizer.control_tokens) + piece
        return _ids(text, self._tokenizer)


def _rendered(template, messages, tokenizer):
    bos, eos = ("" if id is None else tokenizer.decode([id]) for id in (tokenizer.bos_id, tokenizer.eos_id))
    return chat_prompt(template, messages, bos=bos, eos=eos)


def _ids(text, tokenizer):
    return [token for part in text.split(MARK) for token in tokenizer.encode(part)]


def _marked(message, control_tokens):
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": _apart(content, control_tokens)}


def _apart(content, control_tokens):
    content = content.replace(MARK, "")
    for token in control_tokens:
        if len(token) > 1:
            content = content.replace(token, token[0] + MARK + token[1:])
    return content
