"""A model folder's tokenizer.json, through the ``tokenizers`` library: byte-level BPE, and SentencePiece's with bytes.

The library does what the file says. Two things are decided here: whether special tokens in a text are parsed, which is
a property of the call, and what bytes a token stands for, so that text can be decoded token by token. SentencePiece's
tokens carry the space in front of their word, and a text's first word gets one, too: that of ``decode`` is kept, since
what a model writes goes on where its prompt ended.
"""

import json
import re
import threading

import tokenizers

from ..errors import FormatError, ModelError, show
from ..heap import give_back
from .tokenizer import _CONTROL, _ENDS, _USER_DEFINED, Tokenizer

MAX_VOCAB = 1 << 22
_SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class FolderTokenizer(Tokenizer):
    """See :class:`Tokenizer`. Ids below ``vocab_size`` that the file has no token for stand for nothing."""

    def __init__(self, model, *, byte_level, **options):
        super().__init__(model, **options)
        self._byte_level = byte_level
        self._bytes = not byte_level and model.model.byte_fallback
        self._unwanted = frozenset(self._added.values()) - self._user_defined
        self._lock = threading.Lock()  # whether special tokens are parsed is a state of the library's object

    @classmethod
    def from_data(cls, data):
        """``data``: see HuggingFaceCheckpoint.text_data. Raises ModelError for another kind, FormatError."""
        if not isinstance(data.get("tokenizer"), str):
            raise FormatError(f"tokenizer.json: expected a text, got {type(data.get('tokenizer')).__name__}")
        model = _library_tokenizer(data["tokenizer"])
        vocab_size = data.get("vocab_size")
        if type(vocab_size) is not int or not 1 <= vocab_size <= MAX_VOCAB:
            raise FormatError(f"vocab_size: expected an integer from 1 to {MAX_VOCAB}, got {show(vocab_size)}")
        known = model.get_vocab_size(with_added_tokens=False)
        if known > vocab_size:
            raise ModelError(f"tokenizer.json: expected at most {vocab_size} tokens like the model, got {known}")
        added, raw = {_CONTROL: {}, _USER_DEFINED: {}}, {}
        for id, token in model.get_added_tokens_decoder().items():
            if id < vocab_size:
                added[_CONTROL if token.special else _USER_DEFINED][token.content] = id
                raw[id] = token.content.encode()
        raw |= {id: b"" for id in range(vocab_size) if id not in raw and model.id_to_token(id) is None}
        ids = {kind: _named(data, kind, model, vocab_size) for kind in ("bos", "eos", "pad")}
        ends = {id for token, id in added[_CONTROL].items() if token in _ENDS} | {ids["eos"]}
        add_bos = data.get("add_bos_token")
        if not isinstance(add_bos, bool):
            add_bos = ids["bos"] is not None and model.encode("").ids[:1] == [ids["bos"]]
        built = cls(
            model,
            byte_level=_is_byte_level(model),
            raw=raw,
            added=added,
            vocab_size=vocab_size,
            bos_id=ids["bos"],
            eos_id=ids["eos"],
            pad_id=ids["pad"],
            eos_ids=frozenset(ends | _ends(data.get("eos_ids"), vocab_size)) - {None},
            add_bos=add_bos and ids["bos"] is not None,
        )
        give_back()
        return built

    def _ids(self, text, special):
        with self._lock:
            self._model.encode_special_tokens = not special
            ids = self._model.encode(text, add_special_tokens=False).ids
        # No text means a control token if it must not, whatever the merges make of it; and no id without a row.
        unwanted = () if special else self._unwanted
        return [id for id in ids if id < self.vocab_size and id not in unwanted]

    def _spelled(self, token):
        if self._byte_level:
            return super()._spelled(token)
        byte = _BYTE.fullmatch(token) if self._bytes else None
        return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()


def _library_tokenizer(text):
    try:
        model = tokenizers.Tokenizer.from_str(text)
    except BaseException as error:  # plain Exception, and where the library panics not even that
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise FormatError(f"tokenizer.json: {show(str(error))}") from None
    if not isinstance(model.model, tokenizers.models.BPE):
        raise ModelError(f"tokenizer.json: model {type(model.model).__name__} is not supported (BPE is)")
    model.no_truncation()
    model.no_padding()
    return model


def _is_byte_level(model):
    """Whether tokens are spelled in byte characters; else they are SentencePiece's. Raises ModelError for others."""
    decoder = json.loads(model.decoder.__getstate__()) if model.decoder is not None else {}
    steps = decoder.get("decoders", [decoder])
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return True
    replaced = any(step.get("pattern") == {"String": _SPACE} and step.get("content") == " " for step in steps)
    if replaced or any(step.get("type") == "Metaspace" and step.get("replacement") == _SPACE for step in steps):
        return False
    raise ModelError(f"tokenizer.json: decoder {show(decoder.get('type'))} is not supported (ByteLevel, Metaspace are)")


def _named(data, kind, model, vocab_size):
    """The id of the token that is called so: by its text, or as config.json has it."""
    text, id = data.get(f"{kind}_token"), data.get(f"{kind}_id")
    if text is not None:
        id = model.token_to_id(text)
        return id if id is None or id < vocab_size else None
    if isinstance(id, list):
        id = id[0] if id else None
    return id if type(id) is int and 0 <= id < vocab_size else None


def _ends(value, vocab_size):
    """generation_config.json's eos_token_id: an id, several, or none."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    for id in values:
        if type(id) is not int:
            raise FormatError(f"eos_token_id: expected an id or a list of ids, got {show(value)}")
    return {id for id in values if 0 <= id < vocab_size}  # -1 stands for none in some files
