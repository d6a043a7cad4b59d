"""A corpus as training reads it: texts by number, the target's features with them, some of them held out.

The form of the folder is corpus.py's. Files are mapped, not read: a corpus of a million tokens has a gigabyte of
features, of which a batch needs the rows of a few dozen texts.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from typing import NamedTuple

import torch

from specdec_kernels.stream.buffers import view_of

from ..errors import FormatError, translated
from .attention import Span
from .head_loss import UNKNOWN, Teacher, append

HELD_OUT = 32  # one of so many prompts is not trained on, but measured
_FORMS = {
    "tokens": (torch.int32, "n"),
    "starts": (torch.int64, "s+1"),
    "prompts": (torch.int32, "s"),
    "features": (torch.bfloat16, "n,d"),
    "answer_starts": (torch.int64, "s+1"),
    "lse": (torch.float32, "m"),
    "top_ids": (torch.int32, "m,k"),
    "top_logprobs": (torch.float16, "m,k"),
}


class Text(NamedTuple):
    """Prompt and answer: L ids, the last A of them the answer's."""

    ids: torch.Tensor  # int32 [L]
    prompt: int
    features: torch.Tensor  # bf16 [L, d]
    lse: torch.Tensor  # float32 [A]
    top_ids: torch.Tensor  # int32 [A, 16], [A, 0] where they were not kept
    top_log_p: torch.Tensor  # float16 of the same shape

    @property
    def answer(self):
        return len(self.ids) - self.prompt


class Shard:
    """One file. Raises FormatError for one that is not as it should be, and OSError."""

    def __init__(self, path, feature_size, vocab):
        from specdec_kernels.stream.safetensors import read_header

        self.path = os.fspath(path)
        with open(path, "rb") as file:
            with translated():
                entries, _ = read_header(file.fileno(), self.path)
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch takes no memory that is read-only
        missing = [name for name in _FORMS if name not in entries]
        if missing:
            raise FormatError(f"{self.path}: expected the tensors of a corpus, got no {', '.join(missing)}")
        sizes = {"k": entries["top_ids"].shape[-1], "d": feature_size, "n": entries["tokens"].shape[0]}
        sizes |= {"s": len(entries["prompts"].shape) and entries["prompts"].shape[0], "m": entries["lse"].shape[0]}
        self._parts = {}
        for name, (dtype, form) in _FORMS.items():
            entry = entries[name]
            wanted = tuple(sizes[size] if size in sizes else sizes["s"] + 1 for size in form.split(","))
            if entry.dtype is not dtype or entry.shape != wanted:
                got = f"{str(entry.dtype)[6:]} {list(entry.shape)}"
                raise FormatError(f"{self.path}: {name}: expected {str(dtype)[6:]} {list(wanted)}, got {got}")
            count = entry.nbytes // dtype.itemsize
            made = (
                torch.frombuffer(memory, dtype=dtype, count=count, offset=entry.offset)
                if count
                else torch.empty(0, dtype=dtype)
            )
            self._parts[name] = made.view(wanted)
        self.count = sizes["s"]
        self._check(vocab)

    def _check(self, vocab):
        p = self._parts
        lengths, answers = p["starts"].diff(), p["answer_starts"].diff()
        for name, total in (("starts", "tokens"), ("answer_starts", "lse")):
            ends = p[name][[0, -1]].tolist()
            if ends != [0, len(p[total])] or (p[name].diff() < 0).any():
                raise FormatError(
                    f"{self.path}: {name}: expected 0 to {len(p[total])}, ascending, got {ends[0]} to {ends[1]}"
                )
        if ((p["prompts"] < 1) | (p["prompts"] + answers != lengths)).any():
            raise FormatError(f"{self.path}: prompts: expected at least one id and with the answer all of a text")
        for name in ("tokens", "top_ids"):
            if p[name].numel() and not 0 <= int(p[name].min()) <= int(p[name].max()) < vocab:
                raise FormatError(f"{self.path}: {name}: expected ids in [0, {vocab})")
        if not p["lse"].isfinite().all():
            raise FormatError(f"{self.path}: lse: expected finite numbers")

    def text(self, i) -> Text:
        p = self._parts
        start, stop = p["starts"][i : i + 2].tolist()
        first, last = p["answer_starts"][i : i + 2].tolist()
        answer = (p[name][first:last] for name in ("lse", "top_ids", "top_logprobs"))
        return Text(p["tokens"][start:stop], int(p["prompts"][i]), p["features"][start:stop], *answer)

    def counts(self, vocab):
        """How often each id is in an answer: int64 [vocab]."""
        total = torch.zeros(vocab, dtype=torch.int64)
        for i in range(self.count):
            text = self.text(i)
            total += torch.bincount(text.ids[text.prompt :], minlength=vocab)
        return total


class Samples:
    """All texts of a folder that have an answer: ``train`` and ``held_out`` are lists of their numbers.

    A text is held out by its prompt, so that no prompt is on both sides, whatever was added to the folder since.
    """

    def __init__(self, folder, *, feature_size, vocab, names=None):
        self.folder = os.fspath(folder)
        self.about = _about(self.folder, feature_size)
        self.names = sorted(_shards(self.folder)) if names is None else list(names)
        if not self.names:
            raise FormatError(f"{self.folder}: no shard-*.safetensors: the corpus is empty")
        self.shards = [Shard(os.path.join(self.folder, name), feature_size, vocab) for name in self.names]
        self.train, self.held_out, self.answers = [], [], 0
        for number, shard in enumerate(self.shards):
            for i in range(shard.count):
                text = shard.text(i)
                if text.answer < 1:
                    continue
                key = zlib.crc32(view_of(text.ids[: text.prompt]))
                (self.held_out if key % HELD_OUT == 0 else self.train).append((number, i))
                self.answers += text.answer
        if not self.train or not self.held_out:
            texts = len(self.train) + len(self.held_out)
            raise FormatError(
                f"{self.folder}: {texts} texts are too few: some are trained on, one in {HELD_OUT} held out"
            )

    def text(self, place) -> Text:
        shard, i = place
        return self.shards[shard].text(i)

    def counts(self, vocab):
        return torch.stack([shard.counts(vocab) for shard in self.shards]).sum(0)

    def lengths(self, places):
        return [self.text(place).answer for place in places]


def _shards(folder):
    try:
        return [name for name in os.listdir(folder) if name.startswith("shard-") and name.endswith(".safetensors")]
    except OSError as error:
        raise FormatError(f"{folder}: {error.strerror}") from None


def _about(folder, feature_size):
    path = os.path.join(folder, "corpus.json")
    try:
        with open(path, encoding="utf-8") as file:
            about = json.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(about, dict) or about.get("feature_size", feature_size) != feature_size:
        raise FormatError(f"{path}: feature_size: expected {feature_size}, as the target's, got {about}")
    return about


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
    spans: list[Span]
    teacher: Teacher

    def counted(self, depths):
        """bool [depths, N]: whether an answer row is one that a chain reaches at that depth."""
        return self.depth[None] >= torch.arange(depths, device=self.depth.device)[:, None]


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
    features = torch.cat([t.features[t.prompt - 1 : -1] for t in texts])
    move = lambda t: t.to(device, non_blocking=True)
    lse = torch.cat([t.lse for t in texts])
    top = torch.cat([t.top_ids[:, 0].long() if t.top_ids.shape[1] else torch.full((t.answer,), -1) for t in texts])
    best = torch.where(move(top) >= 0, column_of[move(top).clamp(min=0)], UNKNOWN)
    teacher = Teacher(teacher_head, append(move(features).to(teacher_head.dtype), move(lse)), best)
    return Batch(move(ids), move(positions), move(before), move(torch.cat(starts)), move(depth), spans, teacher)
