"""A draft in one safetensors file: what it is, whose it is, and its weights as they are used.

The metadata "specdec" is a JSON object: {"form": 1, "kind", "config", "target": {"name", "fingerprint"}, "vocabulary",
"recipe"}. ``kind``: "feature", a head on the hidden states of one target (models/feature_head.py), or "model", a
decoder of its own. ``config``: the numbers of a LlamaConfig. ``target.fingerprint``: see fingerprint.py;
``vocabulary``: the fingerprint of the tokenizer; ``recipe``: how the draft was made, anything.

Tensors: "draft_ids", int32 [V'], ascending: the ids that the rows of the head stand for. Vectors in float32. A matrix
[N, K] is plain float32, or the two arrays of an ``Int8Weight`` in the form that the project's models have
(models/blueprint.py, ``int8_form``): "NAME.codes" and "NAME.scale", so that reading them is all that loading does.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, fields, replace

import torch

import specdec_kernels as sk
from specdec_kernels.stream.blocks import up
from specdec_kernels.stream.buffers import view_of
from specdec_kernels.stream.files import PackFile
from specdec_kernels.stream.safetensors import Entry, header_of, no_constant, unique

from ..drafts.vocabulary import check_ids
from ..errors import FormatError, ModelError, show, translated
from ..layout import layer_shapes
from ..models.blueprint import int8_form
from ..models.config import LlamaConfig
from .safetensors import write

FORM, KINDS, KEY = 1, ("feature", "model"), "specdec"
MOST_JSON = 1 << 20
MOST_NAME = 200
ZERO = 128  # the code of a weight of 0, as rows are that fill up the last panel
_FIELDS = {field.name for field in fields(LlamaConfig)} - {"draft_ids"}


@dataclass(frozen=True)
class DraftFile:
    """What a file says, checked against what it holds. ``shapes``: of every weight by name."""

    path: str
    kind: str
    config: LlamaConfig  # with the draft's ids
    target: dict  # {"name", "fingerprint"}
    vocabulary: str
    recipe: object
    nbytes: int  # of the weights
    shapes: dict

    @classmethod
    def open(cls, path) -> DraftFile:
        """Reads the header and the ids. Raises FormatError for what is malformed, ModelError for what can't be read."""
        with _opened(path) as file:
            return _of(file)[0]

    def weights(self, progress=None) -> dict:
        """The weights by name: Int8Weight, float32 matrices and vectors, together in memory of their own.

        ``progress(fraction)`` is called with 0 .. 1.
        """
        with _opened(self.path) as file:
            again, entries = _of(file)
            if again != self:
                raise FormatError(f"{self.path}: the file is another one than it was")
            memory = sk.LargePages(sum(up(entry.nbytes, 64) for entry in entries.values()))
            found, done = {}, 0
            for name, shape in self.shapes.items():
                values = []
                for stored in _stored(name, entries):
                    values.append(_read(file, entries[stored], memory))
                    done += entries[stored].nbytes
                    if progress is not None:
                        progress(min(1.0, done / self.nbytes))
                if len(values) == 1:
                    found[name] = values[0]
                else:
                    group, rotated = int8_form(shape[1])
                    found[name] = sk.Int8Weight(*shape, group, *values, rotated)
                    if not bool((values[0][-1, :, (shape[0] - 1) % 16 + 1 :] == ZERO).all()):
                        raise FormatError(f"{self.path}: tensor {show(name)}: expected {shape[0]} rows, got more")
            file.check_unchanged()
        return found


def is_draft_file(path) -> bool:
    """Whether it is a safetensors file that says that it is a draft; False where it can't be read."""
    try:
        with _opened(path) as file:
            return KEY in header_of(file)[1]
    except ModelError:
        return False


def write_draft(path, *, kind, config, draft_ids, weights, target, vocabulary, recipe=None) -> DraftFile:
    """Writes a draft: the whole file appears in its place or nothing does.

    ``config``: a LlamaConfig; ``draft_ids``: ascending; ``weights``: {name: Int8Weight (see ``packed``) or float32
    tensor}; ``target``: {"name", "fingerprint"}. Raises FormatError or ModelError for what could not be read again,
    DiskError where the file can't be written.
    """
    tensors = {"draft_ids": torch.as_tensor(draft_ids, dtype=torch.int32)}
    for name, weight in weights.items():
        if not isinstance(weight, sk.Int8Weight):
            tensors[name] = weight
        elif (weight.group_size, weight.rotated) == int8_form(weight.k):
            tensors |= {f"{name}.codes": weight.codes, f"{name}.scale": weight.scale}
        else:
            raise FormatError(f"{name}: expected groups and rotation {int8_form(weight.k)}, got {weight!r}")
    told = {name: value for name, value in asdict(config).items() if name in _FIELDS}
    about = {"form": FORM, "kind": kind, "config": told, "target": target, "vocabulary": vocabulary, "recipe": recipe}
    metadata = {KEY: json.dumps(about, allow_nan=False)}
    entries = {name: Entry(name, t.dtype, tuple(t.shape), 0, t.nbytes) for name, t in tensors.items()}
    _described(os.fspath(path), entries, metadata, tensors["draft_ids"])
    write(path, tensors, metadata)
    return DraftFile.open(path)


def packed(matrix) -> sk.Int8Weight:
    """A float matrix [N, K] as draft files have it."""
    group, rotated = int8_form(matrix.shape[1])
    return sk.pack_int8(matrix, group_size=group, rotate=rotated)


@contextlib.contextmanager
def _opened(path):
    with translated():
        try:
            file = PackFile(path)
        except OSError as error:
            raise ModelError(f"{os.fspath(path)}: {error.strerror or error}") from None
        with file:
            yield file


def _of(file):
    """(DraftFile, entries) of an open file."""
    entries, metadata = header_of(file)
    ids = entries.get("draft_ids")
    if ids is None or ids.dtype is not torch.int32 or len(ids.shape) != 1:
        raise FormatError(f"{file.path}: draft_ids: expected a vector of int32, got {_kind(ids)}")
    return _described(file.path, entries, metadata, _read(file, ids, sk.LargePages(ids.nbytes))), entries


def _read(file, entry, memory):
    values = memory.empty(entry.shape, entry.dtype)
    file.read_into(view_of(values), entry.offset)
    if values.is_floating_point() and not bool(values.isfinite().all()):
        raise FormatError(f"{file.path}: tensor {show(entry.name)}: expected finite numbers, got others")
    return values


def _described(path, entries, metadata, ids):
    """Checks everything against everything else."""
    about = _about(path, metadata)
    given = about["config"]
    if not isinstance(given, dict) or not set(given) <= _FIELDS:
        raise FormatError(f"{path}: config: expected the numbers of a model, got {show(given)}")
    try:
        whole = LlamaConfig(**given)
    except TypeError as error:
        raise FormatError(f"{path}: config: {error}") from None
    except ModelError as error:
        raise FormatError(f"{path}: config: {error}") from None
    ids = check_ids(ids, whole.vocab, name=f"{path}: draft_ids")
    config = replace(whole, draft_ids=tuple(ids), tied=False)  # the head is the draft's own, however few ids it knows
    if about["kind"] == "feature" and config.layers != 1:
        raise FormatError(f"{path}: config: expected a head of one layer, got {config.layers}")
    if config.layers > len(entries):
        raise FormatError(f"{path}: config: {config.layers} layers in a file of {len(entries)} tensors")
    shapes = _shapes(about["kind"], config, len(ids))
    known = {"draft_ids"}
    for name, shape in shapes.items():
        stored = _stored(name, entries)
        wanted = [(torch.float32, shape)]
        if len(stored) == 2:
            codes, scale = sk.Int8Weight.shapes_of(*shape, int8_form(shape[1])[0])
            wanted = [(torch.uint8, codes), (torch.float32, scale)]
        for key, form in zip(stored, wanted, strict=True):
            found = entries.get(key)
            if found is None or (found.dtype, found.shape) != form:
                raise FormatError(f"{path}: tensor {show(key)}: expected {_form(*form)}, got {_kind(found)}")
        known.update(stored)
    if strange := entries.keys() - known:
        raise FormatError(f"{path}: tensor {show(min(strange))}: no draft of this kind has it")
    nbytes = sum(entry.nbytes for entry in entries.values())
    more = {name: about[name] for name in ("target", "vocabulary", "recipe")}
    return DraftFile(path, about["kind"], config, **more, nbytes=nbytes, shapes=shapes)


def _about(path, metadata):
    """The metadata as an object with the right keys and kinds of values."""
    text = metadata.get(KEY)
    if text is None:
        raise FormatError(f"{path}: expected a draft, but the metadata has no {KEY!r}")
    try:
        about = None
        if len(text) <= MOST_JSON:
            about = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        reason = "it nests too deeply" if isinstance(error, RecursionError) else str(error)[:MOST_NAME]
        raise FormatError(f"{path}: {KEY}: not valid: {reason}") from None
    keys = {"form", "kind", "config", "target", "vocabulary", "recipe"}
    if not isinstance(about, dict) or about.get("form") != FORM or about.keys() != keys:
        what = f"form {show(about.get('form'))}" if isinstance(about, dict) else show(about)
        raise FormatError(f"{path}: {KEY}: expected form {FORM} with {', '.join(sorted(keys))}, got {what}")
    if about["kind"] not in KINDS:
        raise FormatError(f"{path}: kind: expected {' or '.join(KINDS)}, got {show(about['kind'])}")
    target = about["target"]
    if not isinstance(target, dict) or target.keys() != {"name", "fingerprint"}:
        raise FormatError(f"{path}: target: expected name and fingerprint, got {show(target)}")
    for name, value in (*target.items(), ("vocabulary", about["vocabulary"])):
        if not isinstance(value, str) or not value.isprintable() or not 1 <= len(value) <= MOST_NAME:
            raise FormatError(f"{path}: {name}: expected a short text, got {show(value)}")
    return about


def _shapes(kind, config, columns):
    """Every weight's, by name."""
    shapes = {"norm": (config.hidden,), "head": (columns, config.hidden)}
    if kind == "feature":
        shapes |= {"fc": (config.hidden, 2 * config.hidden), "embedding_norm": (config.hidden,)}
    else:
        shapes["embedding"] = (config.vocab, config.hidden)
    for i in range(config.layers):
        shapes |= {f"layer.{i}.{name}": shape for name, shape in layer_shapes(config).items()}
    return shapes


def _stored(name, entries):
    """What the weight is stored as."""
    return [f"{name}.codes", f"{name}.scale"] if f"{name}.codes" in entries else [name]


def _form(dtype, shape):
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _kind(entry):
    return "none" if entry is None else _form(entry.dtype, entry.shape)
