"""The training that another one begins with: its averaged weights, and the ids that they can say."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from ..drafts.vocabulary import check_ids
from ..errors import FormatError, OptionError, show
from ..fingerprint import COUNTS
from . import checkpoint
from .trainer import CHECKPOINT


class Start(NamedTuple):
    folder: str
    tensors: dict
    ids: torch.Tensor  # int64, ascending
    vocabulary: int  # so many it was asked for
    about: dict  # of this training, for a state that began with it

    def give(self, draft) -> None:
        """Puts its averages into a draft of the same form. Raises FormatError."""
        checkpoint.take_averages(self.folder, self.tensors, draft)


def read(folder, *, kind, about, size=None) -> Start:
    """``kind``, ``about``: the new training's (run.py). ``size``: so many ids were asked for; None = as many as it has.

    Raises OptionError where it is of another kind, of another target or vocabulary, or has another number of ids; and
    FormatError, ModelError for a state that can't be read.
    """
    path = os.path.join(os.fspath(folder), CHECKPOINT)
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
    asked = settings.get("vocabulary") or len(ids)
    if size not in (None, len(ids), asked):
        raise OptionError(f"vocabulary: expected {len(ids)}, as many ids as the start's draft has ({path}), got {size}")
    named = {"folder": os.path.basename(os.path.abspath(folder)), "crc32": state.get("crc32")}
    return Start(os.fspath(folder), tensors, tensors["draft_ids"], asked, named)


def _object(told, name):
    return told[name] if isinstance(told.get(name), dict) else {}


def _expect(path, name, theirs, mine):
    if theirs != mine:
        raise OptionError(f"start: {name}: {path} is of a training with {show(theirs)}, got {show(mine)}")
