"""Chat messages to token ids, so that only the template can write control tokens.

A message that contains the text of one, say "<|im_end|>", means these characters; parsed as the token it would let a
message end its turn and begin another speaker's. So a mark goes into every such text before the template renders it,
and the result is cut at the marks before it is encoded: what is cut in two is no token's text any more.
"""

from .chat import chat_prompt

MARK = "\ufdd0"  # a noncharacter: no text that is meant to be read has it


def encode_messages(template, messages, tokenizer):
    """The ids of the rendered messages, ready for an answer. Raises TemplateError, PromptError."""
    bos, eos = ("" if id is None else tokenizer.decode([id]) for id in (tokenizer.bos_id, tokenizer.eos_id))
    marked = [_marked(message, tokenizer.control_tokens) for message in messages]
    text = chat_prompt(template, marked, bos=bos, eos=eos)
    return [token for part in text.split(MARK) for token in tokenizer.encode(part)]


def _marked(message, control_tokens):
    content = message.get("content")
    if not isinstance(content, str):
        return message
    content = content.replace(MARK, "")
    for token in control_tokens:
        if len(token) > 1:
            content = content.replace(token, token[0] + MARK + token[1:])
    return {**message, "content": content}
