"""What a caller may give as a prompt, as token ids."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import OptionError, PromptError


def prompt_ids(prompt, chat, version, context) -> list[int]:
    """The ids of ``prompt``: a string, messages, or ids. ``chat``: True, False, or None (if there is a template).

    ``version``: a loaded model with its tokenizer. Raises PromptError if there are no ids or if they leave no room for
    an answer in ``context`` tokens.
    """
    ids, vocab_size = _ids(prompt, chat, version), version.model.vocab_size
    if not ids:
        raise PromptError("prompt: expected at least one token, got none")
    bad = next((token for token in ids if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise PromptError(f"prompt: expected token ids in [0, {vocab_size}), got {bad}")
    if len(ids) >= context:
        raise PromptError(f"prompt: expected fewer tokens than the context of {context}, got {len(ids)}")
    return ids


def _ids(prompt, chat, version):
    tokenizer, template, messages = version.tokenizer, version.chat_template, None
    if isinstance(prompt, str):
        if chat is None:
            chat = template is not None
        if chat:
            messages = [{"role": "user", "content": prompt}]
    elif not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise PromptError(f"prompt: expected a string, token ids or messages, got {type(prompt).__name__}")
    elif prompt and all(isinstance(part, dict) for part in prompt):
        messages = list(prompt)
    elif all(type(part) is int for part in prompt):
        return list(prompt)
    else:
        raise PromptError(f"prompt: expected a string, token ids or messages, got {type(prompt).__name__}")
    if messages is None:
        bos = [tokenizer.bos_id] if getattr(tokenizer, "add_bos", False) else []
        return bos + tokenizer.encode(prompt, special=False)
    if template is None:
        raise OptionError("chat: the model has no chat template")
    from .text.prompt import encode_messages

    return encode_messages(template, messages, tokenizer)
