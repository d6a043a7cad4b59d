"""What a training begins with instead of initial.py's weights: another training's averages, or a draft's file.

A file has the weights in int8, a training in float32; what is lost comes back in a few steps.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from ..draft_loader import builtin_files
from ..drafts.vocabulary import check_ids
from ..errors import FormatError, ModelError, OptionError, show
from ..fingerprint import COUNTS
from ..formats.draft_file import DraftFile
from . import checkpoint
from .initial import dense
from .trainer import CHECKPOINT

BUILTIN = "builtin"  # the draft of the kind that comes with the package


class Start(NamedTuple):
    path: str
    tensors: dict  # "average.NAME" of every parameter
    ids: torch.Tensor  # int64, ascending
    vocabulary: int  # so many it was asked for
    about: dict  # of this training, for a state that began with it

    def cut(self, ids) -> Start:
        """With some of its ids only, and their rows of the head."""
        head = "average.head"
        tensors = (
            self.tensors
            if head not in self.tensors
            else self.tensors | {head: self.tensors[head][torch.isin(self.ids, ids)]}
        )
        return self._replace(tensors=tensors, ids=ids)

    def give(self, draft) -> None:
        """Puts its weights into a draft of the same form. Raises FormatError."""
        checkpoint.take_averages(self.path, self.tensors, draft)


def read(start, *, kind, about, size=None) -> Start:
    """``start``: a training's folder, a draft's file, or "builtin"; ``kind``, ``about``: the new training's (run.py).
    ``size``: so many ids were asked for; None = as many as it has. It may have more (``cut``).

    Raises OptionError where it is of another kind, of another target or vocabulary, or has fewer ids; and FormatError,
    ModelError for what can't be read.
    """
    start = os.fspath(start)
    folder = start != BUILTIN and os.path.isdir(start)
    found = (_of_training if folder else _of_file)(start, kind, about)
    most = len(found.ids)
    if size is not None and size > most and size != found.vocabulary:
        raise OptionError(
            f"vocabulary: expected at most {most} ids, as the start's draft has ({found.path}), got {size}"
        )
    return found


def _of_training(folder, kind, about):
    path = os.path.join(folder, CHECKPOINT)
    if not os.path.exists(path):
        raise ModelError(f"start: expected the folder of a training, or a draft's file: {path} is not there")
    tensors, state = checkpoint.load(path)
    settings, theirs = _object(state, "settings"), _object(state, "about")
    model = _object(theirs, "model")
    _expect(path, "kind", settings.get("kind"), kind)
    _expect(path, "vocabulary", theirs.get("vocabulary"), about["vocabulary"])
    if "fingerprint" in theirs:  # states of before don't have it
        _expect(path, "fingerprint", theirs["fingerprint"], about["fingerprint"])
    for name in COUNTS:
        _expect(path, name, model.get(name), about["model"][name])
    if "draft_ids" not in tensors:
        raise FormatError(f"{path}: expected the draft's ids, got no tensor draft_ids")
    ids = check_ids(tensors["draft_ids"], about["model"]["vocab"], name=f"{path}: draft_ids")
    named = {"folder": os.path.basename(os.path.abspath(folder)), "crc32": state.get("crc32")}
    return Start(path, tensors, tensors["draft_ids"], settings.get("vocabulary") or len(ids), named)


def _of_file(start, kind, about):
    if start != BUILTIN:
        file = DraftFile.open(start)
    else:
        mine = lambda file: file.kind == kind and file.target["fingerprint"] == about["fingerprint"]
        file = next((file for file in map(DraftFile.open, builtin_files()) if mine(file)), None)
        if file is None:
            raise OptionError(f"start: no draft of kind {kind} for this target comes with the package")
    _expect(file.path, "kind", file.kind, kind)
    _expect(file.path, "vocabulary", file.vocabulary, about["vocabulary"])
    _expect(file.path, "fingerprint", file.target["fingerprint"], about["fingerprint"])
    ids = torch.tensor(file.config.draft_ids)
    tensors = {f"average.{name.replace('layer.', 'layers.')}": dense(weight) for name, weight in file.weights().items()}
    named = {"file": os.path.basename(file.path), "crc32": checkpoint.checksum(tensors)}
    return Start(file.path, tensors, ids, len(ids), named)


def _object(told, name):
    return told[name] if isinstance(told.get(name), dict) else {}


def _expect(path, name, theirs, mine):
    if theirs != mine:
        raise OptionError(f"start: {name}: {path} is of a training with {show(theirs)}, got {show(mine)}")
