"""A corpus as training reads it: texts by number, the target's features with them, some of them held out.

The form of the folder is corpus.py's. Features stay in the files, a gigabyte for a million tokens: a batch needs those
of a few dozen texts.
"""

from __future__ import annotations

import os
import zlib
from typing import NamedTuple

import torch

from specdec_kernels.stream.buffers import view_of

from ..errors import FormatError, show
from .attention import Span
from .corpus import Shard, Text, shard_numbers, shard_path
from .head_loss import UNKNOWN, Teacher, append
from .manifest import read_manifest

ALL = 1 << 30  # depths
HELD_OUT = 32  # one of so many prompts is not trained on, but measured


class Samples:
    """All texts of a folder that have an answer: ``train`` and ``held_out`` are lists of their numbers.

    A text is held out by its prompt, so that no prompt is on both sides, whatever was added to the folder since.
    """

    def __init__(self, folder, *, feature_size, vocab, target=None, dtype=None, names=None, held_out=HELD_OUT):
        """``feature_size``, ``vocab``, ``target``, ``dtype``: the target's, the latter two where they are known.
        ``names``: of the shards, all that are there without it. ``held_out``: one of so many prompts, 0 = none.
        """
        self.folder = os.fspath(folder)
        _check_manifest(self.folder, feature_size=feature_size, target=target, dtype=dtype)
        there = [os.path.basename(shard_path(self.folder, number)) for number in shard_numbers(self.folder)]
        self.names = there if names is None else list(names)
        if not self.names:
            raise FormatError(f"{self.folder}: no shard-*.safetensors: the corpus is empty")
        paths = [os.path.join(self.folder, name) for name in self.names]
        self.shards = [Shard(path, feature_size, vocab, target=target) for path in paths]
        self.train, self.held_out, self.answers = [], [], 0
        self._answers = [shard.answers for shard in self.shards]
        for number, (shard, answers) in enumerate(zip(self.shards, self._answers, strict=True)):
            for i, answer in enumerate(answers):
                if answer < 1:
                    continue
                side = self.held_out if is_held_out(shard.prompt(i), held_out) else self.train
                side.append((number, i))
                self.answers += answer
        if not self.train or (held_out and not self.held_out):
            texts, apart = len(self.train) + len(self.held_out), f", one in {held_out} held out" if held_out else ""
            raise FormatError(f"{self.folder}: {texts} texts are too few: some are trained on{apart}")
        self.longest = max(shard.longest for shard in self.shards)  # ids of a text

    def text(self, place) -> Text:
        shard, i = place
        return self.shards[shard].text(i)

    def counts(self):
        """How often each id is in an answer: int64 [vocab]."""
        return sum(shard.counts() for shard in self.shards)

    def lengths(self, places):
        return [self._answers[shard][i] for shard, i in places]

    def counted(self, place, depths):
        """At each depth, how many of a text's answer rows count: as :meth:`Batch.counted`, of all its rows together."""
        (shard, i), reached = place, self.shards[place[0]].reached(place[1])
        length = self._answers[shard][i]
        if reached is None:
            return [max(0, length - depth) for depth in range(depths)]
        return [int((reached[: max(0, length - depth)] > depth).sum()) for depth in range(depths)]


def is_held_out(prompt, one_in=HELD_OUT):
    """Whether texts with that prompt, int32 ids, are not trained on; ``one_in`` 0: none is held out."""
    return bool(one_in) and zlib.crc32(view_of(prompt)) % one_in == 0


def _check_manifest(folder, **of_target):
    """What the folder says of itself, if it does, against what the target says."""
    told = read_manifest(folder) or {}
    for name, wanted in of_target.items():
        if wanted is not None and told.get(name, wanted) != wanted:
            raise FormatError(f"{folder}: {name}: expected {show(wanted)}, as the target's, got {show(told[name])}")


class Batch(NamedTuple):
    """Texts side by side, as networks take them. T rows are fed (all ids but each text's last), N chains start.

    A chain starts at each row whose next id is an answer's; answer rows have the chains' order, so that chain c at
    depth i stands where answer row c + i does.
    """

    ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    before: torch.Tensor  # float32 [T, d]: features of the rows before, zeros in front of a text
    starts: torch.Tensor  # int64 [N]: rows at which chains start
    depth: torch.Tensor  # int64 [N]: answer rows of the same text before this one
    reached: torch.Tensor  # int64 [N]: so many depths of a chain count, ALL of them but in texts of speculative runs
    spans: list[Span]
    teacher: Teacher

    def counted(self, depths):
        """bool [depths, N]: whether an answer row is one that a chain reaches at that depth."""
        chains = torch.stack([self.reached.roll(i) > i for i in range(depths)])  # that came to the row so deep
        return chains & (self.depth[None] >= torch.arange(depths, device=self.depth.device)[:, None])


def collate(texts, column_of, teacher_head, device="cpu") -> Batch:
    """``column_of``: int64 [vocab], the draft's column of each id or -1. ``teacher_head``: as in a Teacher."""
    spans = [Span(len(t.ids) - 1, t.answer, t.prompt - 1) for t in texts]
    first = torch.zeros(1, texts[0].features.shape[1])
    ids = torch.cat([t.ids[:-1] for t in texts]).long()
    before = torch.cat([part for t in texts for part in (first, t.features[: len(t.ids) - 2].float())])
    positions = torch.cat([torch.arange(span.rows) for span in spans])
    at, starts = 0, []
    for span in spans:
        starts.append(torch.arange(at + span.first, at + span.rows))
        at += span.rows
    depth = torch.cat([torch.arange(span.chains) for span in spans])
    reached = torch.cat([torch.full((t.answer,), ALL) if t.reached is None else t.reached.long() for t in texts])
    features = torch.cat([t.features[t.prompt - 1 : -1] for t in texts])
    move = lambda t: t.to(device, non_blocking=True)
    lse = torch.cat([t.lse for t in texts])
    top = torch.cat([t.top_ids[:, 0].long() if t.top_ids.shape[1] else torch.full((t.answer,), -1) for t in texts])
    best = torch.where(move(top) >= 0, column_of[move(top).clamp(min=0)], UNKNOWN)
    teacher = Teacher(teacher_head, append(move(features).to(teacher_head.dtype), move(lse)), best)
    chains = move(torch.cat(starts)), move(depth), move(reached)
    return Batch(move(ids), move(positions), move(before), *chains, spans, teacher)
