"""A model to a pack: a file whose blocks lie in the order in which a pass reads them (specdec_kernels.stream)."""

import os
import stat
from dataclasses import asdict, replace
from pathlib import Path

import specdec_kernels as sk
from specdec_kernels.stream import PackWriter

from .errors import ModelError, translated
from .models.blueprint import Blueprint, Filler, Vector, nbytes, row_bytes
from .text.stored import BLOCK, stored

FORM = 2  # of what is said about the model in a pack; another number is another pack
STEP = 64  # rows: parts of a head are cut at multiples


def convert(checkpoint, path, *, dtype="int8", progress=None):
    """Writes ``checkpoint`` as a pack to ``path``: a temporary file first, so there is a whole pack or none.

    Holds one block at a time. The head is cut into parts no larger than a layer, so that a slot that takes a layer
    takes any block. Raises ModelError for a checkpoint that can't be served, OSError where it can't be written.
    """
    plan = Blueprint(checkpoint, dtype)
    filler = Filler(plan, progress)
    config = {"form": FORM, "dtype": dtype, "model": asdict(plan.config), "tied": plan.tied}
    layer_bytes = max(sum(nbytes(part, dtype) for part in layer.values()) for layer in plan.layers)

    def block(parts):
        memory = sk.LargePages(sum(nbytes(part, dtype) + 128 for part in parts.values()))
        made = {name: filler.empty(part, memory) for name, part in parts.items()}
        for name, part in parts.items():
            filler.fill(part, made[name])
        return made

    with translated(), PackWriter(path, config) as out:
        for i, layer in enumerate(plan.layers):
            out.add_block(f"layer.{i}", block(layer))
        named = []
        for i, part in enumerate(_cut(plan.head, layer_bytes, dtype)):
            parts = {"weight": part} | ({"norm": Vector(plan.norm)} if i == 0 else {})
            out.add_block(f"head.{i}", block(parts))
            named.append((f"head.{i}", "weight"))
        out.matrix("head", named)
        if not plan.tied:
            named = []
            for i, part in enumerate(_cut(plan.embedding, layer_bytes, dtype)):
                out.add_block(f"embedding.{i}", block({"weight": part}), in_order=False)
                named.append((f"embedding.{i}", "weight"))
        out.matrix("embedding", named)
        out.add_block(BLOCK, stored(checkpoint), in_order=False)
    filler.finish()


def weights_nbytes(checkpoint, dtype):
    """Bytes of all that a pass needs, padding aside."""
    plan = Blueprint(checkpoint, dtype)
    parts = [part for layer in plan.layers for part in layer.values()] + [plan.head, Vector(plan.norm)]
    parts += [] if plan.tied else [plan.embedding]
    return sum(nbytes(part, dtype) for part in parts)


def _cut(matrix, most_bytes, dtype):
    """The matrix in parts of equal height, none larger than ``most_bytes`` (or than ``STEP`` rows)."""
    most = max(1, most_bytes // (row_bytes(matrix, dtype) * STEP)) * STEP
    count = -(-matrix.rows // most)
    height = -(-matrix.rows // (count * STEP)) * STEP
    for first in range(0, matrix.rows, height):
        yield replace(matrix, first=first, stop=min(first + height, matrix.rows))


def cache_folder():
    """Where packs are kept that were made on the way: ``SPECDEC_CACHE``, or the user's cache folder. Mode 0700."""
    named = os.environ.get("SPECDEC_CACHE")
    base = (
        Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec-kernels"
    )
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not named and stat.S_IMODE(base.stat().st_mode) & 0o077:
        base.chmod(0o700)
    return base


def cached_pack(checkpoint, *, dtype="int8", progress=None):
    """The path of the checkpoint's pack in the cache folder, made now if it is not there."""
    try:
        path = cache_folder() / f"{checkpoint.identity()[:32]}-{dtype}-{FORM}.pack"
    except OSError as error:
        raise ModelError(f"cache folder: {error.strerror}: {error.filename}") from None
    except RuntimeError as error:  # no home: the user has none that is known
        raise ModelError(f"cache folder: {error}; name one with SPECDEC_CACHE") from None
    if not path.exists():
        try:
            convert(checkpoint, path, dtype=dtype, progress=progress)
        except OSError as error:
            raise ModelError(f"cache folder: writing {path} failed: {error.strerror or error}") from error
    return path
