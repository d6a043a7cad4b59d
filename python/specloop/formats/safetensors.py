"""Small safetensors files of our own, written and read as a whole: drafts, corpora, states of a training."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os

import torch

from ..errors import FormatError, SpecloopError, translated

_ALIGNMENT = 64


class DiskError(SpecloopError, OSError):
    """A file could not be written: the disk is full, say. What was there before is as it was."""


@contextlib.contextmanager
def disk_errors(path):
    """What the system says while ``path`` is written, as DiskError."""
    try:
        yield
    except OSError as error:
        what = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
        raise DiskError(error.errno, f"writing {os.fspath(path)} failed: {what}") from None


def write(path, tensors, metadata):
    """Writes ``tensors`` {name: Tensor} and ``metadata`` {str: str}: a whole file or none. Raises DiskError."""
    from specdec_kernels.stream.buffers import view_of
    from specdec_kernels.stream.safetensors import TAGS

    # Whole cache lines first, then larger elements, so that each tensor is aligned in a file that is mapped.
    order = lambda item: (item[1].nbytes % _ALIGNMENT > 0, -item[1].element_size(), item[0])
    ordered = sorted(tensors.items(), key=order)
    header, at = {"__metadata__": metadata}, 0
    for name, tensor in ordered:
        places = [at, at := at + tensor.nbytes]
        header[name] = {"dtype": TAGS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": places}
    text = json.dumps(header, allow_nan=False).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    pieces = (view_of(tensor.detach().cpu().contiguous()) for _, tensor in ordered)
    _write(path, itertools.chain([len(text).to_bytes(8, "little") + text], pieces))


def write_text(path, text):
    """The same for a text."""
    _write(path, [text.encode()])


def _write(path, pieces):
    from specdec_kernels.stream.newfile import NewFile

    with disk_errors(path):
        file, at = NewFile(path), 0
        try:
            for piece in pieces:
                file.write(piece, at)
                at += len(piece)
            file.commit()
        finally:
            file.abort()  # does nothing where it is complete


def read(path):
    """``(tensors, metadata)``. Raises FormatError for a malformed file, OSError for one that can't be read."""
    from specdec_kernels.stream.files import PackFile
    from specdec_kernels.stream.safetensors import header_of

    with translated(), PackFile(path) as file:
        entries, metadata = header_of(file)
        tensors = {}
        for name, entry in entries.items():
            memory = bytearray(entry.nbytes)
            file.read_into(memory, entry.offset)
            flat = torch.frombuffer(memory, dtype=entry.dtype) if memory else torch.empty(0, dtype=entry.dtype)
            tensors[name] = flat.view(entry.shape)
    return tensors, metadata


def described(path, metadata, key):
    """The JSON object that the metadata have under ``key``. Raises FormatError."""
    try:
        value = json.loads(metadata[key])
    except KeyError:
        raise FormatError(f"{path}: expected the metadata {key!r}, got none") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: metadata {key!r}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{path}: metadata {key!r}: expected an object")
    return value
