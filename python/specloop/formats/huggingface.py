"""A model's folder as Hugging Face has them, as a :class:`Checkpoint`: config.json, safetensors, tokenizer.json.

Nothing is taken on trust: the index against the headers of its shards, the headers against the files (Shards), the
tensors' names against what the configuration says the model consists of. A tensor that would be left over is refused,
too: it belongs to a model that computes something else. Weights are never mapped, only read by rows on demand.
"""

import hashlib
import json
import os
import re

import torch

from ..errors import FormatError, ModelError, show
from ..models.config import LlamaConfig
from ..text.folder_tokenizer import FolderTokenizer
from .tensors import EMBEDDING, HEAD, stranger

PIECE = 4 << 20  # bytes of two matrices that are compared at a time
MAX_JSON = 8 << 20
MAX_TOKENIZER = 128 << 20

_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_COMPUTED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")  # what older files have for nothing


class HuggingFaceCheckpoint:
    """``path``: the folder. Raises ModelError for another kind of model, FormatError for malformed files.

    Ties: where config.json says tie_word_embeddings, a head in the files must equal the embedding, and either may be
    missing; where it does not, both must be there.
    """

    def __init__(self, path):
        from specdec_kernels.stream.shards import Shards

        self.path = os.fspath(path)
        self._settings = _json(self.path, "config.json")
        self.config = LlamaConfig.from_hf(self._settings)
        with _translated(self.path):
            self._shards = Shards(self.path)
        try:
            self._tensors = self._known_tensors()
            if self.config.tied:
                self._tie()
            elif HEAD not in self._tensors:
                raise ModelError(f"{self.path}: {HEAD}: missing, but config.json does not say tie_word_embeddings")
            self._tokenizer = FolderTokenizer.from_data(self.text_data())
            self.chat_template = _chat_template(self.path)
        except BaseException:
            self.close()
            raise

    def _known_tensors(self):
        """name -> (index of the file, Entry) of what the model consists of."""
        found = {}
        for name, (file, entry) in self._shards.tensors.items():
            if _COMPUTED.fullmatch(name):
                continue
            here = f"{self._shards.files[file].path}: tensor {show(name)}"
            reason = stranger(name, self.config)
            if reason is not None:
                raise ModelError(f"{here}: {reason}")
            if entry.dtype not in _DTYPES:
                raise ModelError(f"{here}: expected float32, bfloat16 or float16, got {_plain(entry.dtype)}")
            found[name] = file, entry
        return found

    def _tie(self):
        """Leaves one of embedding and head, under the embedding's name."""
        if HEAD not in self._tensors:
            return
        if EMBEDDING in self._tensors:
            shapes = [self.shape(name) for name in (EMBEDDING, HEAD)]
            row = self._first_difference(*shapes[0]) if shapes[0] == shapes[1] and len(shapes[0]) == 2 else 0
            if row is not None:
                raise ModelError(
                    f"{self.path}: config.json says tie_word_embeddings, but {HEAD} and {EMBEDDING} differ in row {row}"
                )
        self._tensors.setdefault(EMBEDDING, self._tensors.pop(HEAD))

    def _first_difference(self, rows, columns):
        step = max(1, PIECE // (4 * max(columns, 1)))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            one, other = (self.read_rows(name, start, stop) for name in (EMBEDDING, HEAD))
            differ = (one.view(torch.int32) != other.view(torch.int32)).any(1)
            if differ.any():
                return start + int(differ.nonzero()[0])
        return None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._shards.close()

    def names(self):
        return self._tensors.keys()

    def label(self, name):
        return name

    def _entry(self, name):
        if name not in self._tensors:
            raise ModelError(f"{self.path}: {name}: missing from the files")
        return self._tensors[name]

    def stored_as(self, name):
        """(its name in the files, "f32", "bf16" or "f16")"""
        entry = self._entry(name)[1]
        return entry.name, _DTYPES[entry.dtype]

    def shape(self, name):
        return self._entry(name)[1].shape

    def nbytes(self, name):
        return self._entry(name)[1].nbytes

    def read_rows(self, name, start, stop):
        file, entry = self._entry(name)
        rows, columns = entry.shape
        if not 0 <= start <= stop <= rows:
            raise ValueError(f"rows: expected 0 <= start <= stop <= {rows}, got {start} and {stop}")
        row_bytes = columns * entry.dtype.itemsize
        data = self._read(file, entry.offset + start * row_bytes, (stop - start) * row_bytes)
        return data.view(entry.dtype).view(stop - start, columns).float()

    def read(self, name):
        file, entry = self._entry(name)
        return self._read(file, entry.offset, entry.nbytes).view(entry.dtype).float()

    def _read(self, file, offset, nbytes):
        file = self._shards.files[file]
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        memory = bytearray(nbytes)
        with _translated(file.path):
            file.read_into(memory, offset)
            file.check_unchanged()
        return torch.frombuffer(memory, dtype=torch.uint8)

    def tokenizer(self):
        return self._tokenizer

    def text_data(self):
        settings, told = _json(self.path, "tokenizer_config.json", {}), self._settings
        special = _json(self.path, "special_tokens_map.json", {})
        named = {f"{kind}_token": _content(settings, special, f"{kind}_token") for kind in ("bos", "eos", "pad")}
        generation = _json(self.path, "generation_config.json", {})
        ends = generation.get("eos_token_id")
        return {
            "kind": "huggingface",
            "tokenizer": _text(self.path, "tokenizer.json", MAX_TOKENIZER),
            "vocab_size": self.config.vocab,
            **named,
            **{f"{kind}_id": told.get(f"{kind}_token_id") for kind in ("bos", "eos", "pad")},
            "add_bos_token": settings.get("add_bos_token"),
            "eos_ids": told.get("eos_token_id") if ends is None else ends,
        }

    def identity(self):
        told = []
        for file in self._shards.files:
            status = os.fstat(file.fd)
            told.append((os.path.realpath(file.path), status.st_size, status.st_mtime_ns))
        digest = hashlib.sha256(repr((told, self._shards.tensors, self._settings)).encode())
        digest.update(json.dumps([self.text_data(), self.chat_template]).encode())
        return digest.hexdigest()


class _translated:
    """Errors of the safetensors reader and of the system, as ours."""

    def __init__(self, path):
        self._path = path

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        from specdec_kernels.stream import PackError, StreamError

        if isinstance(error, PackError | StreamError):
            raise FormatError(str(error)) from None
        if isinstance(error, OSError):
            raise ModelError(f"{self._path}: {error.strerror or error}") from None


def _plain(dtype):
    return str(dtype).removeprefix("torch.")


def _text(folder, name, most, default=None):
    """The text of a file of the folder, ``default`` (if given) where there is none."""
    path = os.path.join(folder, name)
    try:
        with open(path, "rb") as file:
            data = file.read(most + 1)
    except FileNotFoundError:
        if default is not None:
            return default
        hint = _HINTS.get(name, "")
        raise ModelError(f"{folder}: {name}: no such file{hint}") from None
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    if len(data) > most:
        raise FormatError(f"{path}: larger than the {most} bytes that this reader takes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not UTF-8 at byte {error.start}") from None


_HINTS = {
    "config.json": "; expected a folder as Hugging Face has them",
    "tokenizer.json": " (a SentencePiece tokenizer.model is not read; saving the fast tokenizer writes this file)",
}


def _json(folder, name, default=None):
    """The object in a JSON file."""
    text = _text(folder, name, MAX_JSON, None if default is None else "")
    if default is not None and not text:
        return default
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "it nests too deeply" if isinstance(error, RecursionError) else str(error)
        raise FormatError(f"{os.path.join(folder, name)}: not valid JSON: {reason}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{os.path.join(folder, name)}: expected an object, got {show(value)}")
    return value


def _content(settings, special, key):
    """A token's text: plain, or in an object with its properties; None where it is not told."""
    value = settings.get(key, special.get(key))
    value = value.get("content") if isinstance(value, dict) else value
    if value is not None and not isinstance(value, str):
        raise FormatError(f"tokenizer_config.json: {key}: expected a text, got {show(value)}")
    return value


def _chat_template(folder):
    text = _text(folder, "chat_template.jinja", MAX_JSON, "")
    if text:
        return text
    told = _json(folder, "tokenizer_config.json", {}).get("chat_template")
    if isinstance(told, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in told if isinstance(entry, dict)}
        told = named.get("default")
    if told is not None and not isinstance(told, str):
        raise FormatError(f"{folder}: tokenizer_config.json: chat_template: expected a text, got {show(told)}")
    return told
