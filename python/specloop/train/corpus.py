"""Texts that a target wrote, with what it thought: a folder of shards.

``corpus.json`` says what the shards are a function of (manifest.py). ``shard-00000.safetensors`` and so on hold s
texts of n ids together, m of which are answers'; a text is a prompt and the answer that the target drew:

    tokens         int32 [n]        the ids of all texts, one behind the other
    starts         int64 [s + 1]    where each text begins, and the end
    prompts        int32 [s]        how many of its ids are the prompt's
    features       bf16  [n, d]     the target's hidden state at each id, behind the last norm
    answer_starts  int64 [s + 1]    where each answer begins in what follows
    lse            f32   [m]        log-sum-exp of the target's raw logits that an answer's id was drawn from
    top_ids        int32 [m, 16]    the likeliest ids there, the likeliest first; [m, 0] where they were not kept
    top_logprobs   f16   [m, 16]    their log-probabilities at temperature 1, likewise
    temperatures   f32   [s]        at which an answer was drawn, 0 = greedily
    seeds          int32 [s]        number of the prompt (seeds.py), -1 for one that the target made up
    reached        uint8 [m]        only of speculative runs (logged.py): of the chain of drafts that began where an
                                    answer's id was to be drawn, how many were judged, 0 where none began

With a row h_v of the target's head, p(v) = exp(h_v . f - lse), where f is the feature of the id before. Every file is
written whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import FormatError, show, translated
from ..formats import safetensors

FORM = 1
TOP = 16  # likeliest ids that are kept
KEY = "specdec-corpus"  # of the metadata
PIECE = 4 << 20  # bytes that are checked at a time
_NAME = re.compile(r"shard-(\d{5,9})\.safetensors")
_FORMS = {
    "tokens": (torch.int32, "n"),
    "starts": (torch.int64, "s+1"),
    "prompts": (torch.int32, "s"),
    "features": (torch.bfloat16, "n,d"),
    "answer_starts": (torch.int64, "s+1"),
    "lse": (torch.float32, "m"),
    "top_ids": (torch.int32, "m,k"),
    "top_logprobs": (torch.float16, "m,k"),
    "temperatures": (torch.float32, "s"),
    "seeds": (torch.int32, "s"),
}
_MAY_LACK = {"reached": (torch.uint8, "m")}


class Text(NamedTuple):
    """Prompt and answer: L ids, the last A of them the answer's."""

    ids: Tensor  # int32 [L]
    prompt: int  # L - A
    features: Tensor  # bf16 [L, d]
    lse: Tensor  # f32 [A]
    top_ids: Tensor  # int32 [A, 16] or [A, 0]
    top_log_p: Tensor  # f16 of the same shape
    temperature: float = 0.0
    seed: int = -1
    reached: Tensor | None = None  # uint8 [A]; None = not of a speculative run

    @property
    def answer(self) -> int:
        return len(self.ids) - self.prompt


def shard_path(folder, number: int) -> str:
    return os.path.join(os.fspath(folder), f"shard-{number:05d}.safetensors")


def shard_numbers(folder) -> list[int]:
    """Of the shards that are there, ascending. Raises FormatError where there is no such folder."""
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise FormatError(f"{os.fspath(folder)}: {error.strerror}") from None
    return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)


def write_shard(folder, number: int, texts: Sequence[Text], about: dict) -> None:
    """``about``: what a reader compares: "target" and "vocabulary", fingerprints. Raises DiskError, and ValueError
    where some of the texts are of speculative runs and others are not.
    """
    starts = lambda lengths: torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    joined = lambda name: torch.cat([getattr(text, name) for text in texts])
    tensors = {
        "tokens": joined("ids"),
        "starts": starts([len(text.ids) for text in texts]),
        "prompts": torch.tensor([text.prompt for text in texts], dtype=torch.int32),
        "features": joined("features"),
        "answer_starts": starts([text.answer for text in texts]),
        "lse": joined("lse"),
        "top_ids": joined("top_ids"),
        "top_logprobs": joined("top_log_p"),
        "temperatures": torch.tensor([text.temperature for text in texts], dtype=torch.float32),
        "seeds": torch.tensor([text.seed for text in texts], dtype=torch.int32),
    }
    logged = [text.reached is not None for text in texts]
    if all(logged):
        tensors["reached"] = joined("reached")
    elif any(logged):
        raise ValueError("texts: expected reached of all or of none, got some")
    sums = {name: _crc32(tensor) for name, tensor in tensors.items()}
    said = {"form": FORM, **about, "number": number, "crc32": sums}
    safetensors.write(shard_path(folder, number), tensors, {KEY: json.dumps(said)})


class Shard:
    """A file of texts, from which each is read when it is asked for. ``count``: of texts.

    ``feature_size`` and ``vocab`` are the target's; ``target``: its fingerprint, where it is known. ``check``: whether
    all bytes are read once and compared with the sums that the file has of them, if it has. Raises FormatError for a
    file that is malformed, cut, damaged or another target's, OSError for one that can't be read.
    """

    def __init__(self, path, feature_size: int, vocab: int, *, target: str | None = None, check: bool = True):
        from specdec_kernels.stream.files import PackFile
        from specdec_kernels.stream.safetensors import header_of

        self.path, self._vocab = os.fspath(path), vocab
        with contextlib.ExitStack() as opened, translated():
            self._file = opened.enter_context(PackFile(self.path))
            self._entries, metadata = header_of(self._file)
            self._check_form(feature_size)
            told = safetensors.described(self.path, metadata, KEY) if KEY in metadata else {}
            self._check_origin(told, target)
            self._whole = {name: self._read(name) for name in ("starts", "prompts", "answer_starts", "tokens")}
            self._whole |= {name: self._read(name) for name in ("temperatures", "seeds")}
            self._whole |= {name: self._read(name) for name in _MAY_LACK if name in self._entries}
            if check:
                self._check_sums(told.get("crc32"))
            self._check_numbers()
            opened.pop_all()

    def prompt(self, i: int) -> Tensor:
        """The ids of a text's prompt."""
        start = int(self._whole["starts"][i])
        return self._whole["tokens"][start : start + int(self._whole["prompts"][i])]

    @property
    def longest(self) -> int:
        """Ids of the longest text."""
        return max([0, *self._whole["starts"].diff().tolist()])

    @property
    def logged(self) -> bool:
        """Whether its texts are of speculative runs."""
        return "reached" in self._whole

    @property
    def answers(self) -> list[int]:
        """Of each text, how many of its ids are the answer's."""
        return self._whole["answer_starts"].diff().tolist()

    def reached(self, i: int) -> Tensor | None:
        """A text's, uint8 [A]; None where the shard is not of speculative runs."""
        start, stop = self._whole["answer_starts"][i : i + 2].tolist()
        return self._whole["reached"][start:stop] if self.logged else None

    def counts(self) -> Tensor:
        """How often each id is in an answer, int64 [vocab]."""
        whole = self._whole
        lengths = whole["starts"].diff()
        place = torch.arange(len(whole["tokens"])) - whole["starts"][:-1].repeat_interleave(lengths)
        answers = whole["tokens"][place >= whole["prompts"].repeat_interleave(lengths)]
        return torch.bincount(answers, minlength=self._vocab)

    def text(self, i: int) -> Text:
        """Raises WeightsError if the file was written to since it was opened."""
        if not 0 <= i < self.count:
            raise IndexError(f"text: expected 0 <= i < {self.count}, got {i}")
        whole = self._whole
        start, stop = whole["starts"][i : i + 2].tolist()
        rows = whole["answer_starts"][i : i + 2].tolist()
        with translated():
            self._file.check_unchanged()
            features = self._read("features", start, stop)
            answer = [self._read(name, *rows) for name in ("lse", "top_ids", "top_logprobs")]
        about = float(whole["temperatures"][i]), int(whole["seeds"][i])
        ids, prompt = whole["tokens"][start:stop], int(whole["prompts"][i])
        return Text(ids, prompt, features, *answer, *about, self.reached(i))

    def close(self) -> None:
        self._file.close()

    def _read(self, name, start=0, stop=None):
        """Rows of a tensor."""
        entry = self._entries[name]
        rows = (entry.shape[0] if stop is None else stop) - start
        width = entry.nbytes // max(entry.shape[0], 1)
        memory = bytearray(rows * width)
        self._file.read_into(memory, entry.offset + start * width)
        flat = torch.frombuffer(memory, dtype=entry.dtype) if memory else torch.empty(0, dtype=entry.dtype)
        return flat.view(rows, *entry.shape[1:])

    def _check_form(self, feature_size):
        entries = self._entries
        for name in _FORMS:
            if name not in entries:
                raise FormatError(f"{self.path}: expected a shard of a corpus, got no tensor {name}")
        sizes = {"d": feature_size, "k": 0 if entries["top_ids"].shape[1:] == (0,) else TOP}
        for size, name in (("n", "tokens"), ("s", "prompts"), ("m", "lse")):
            sizes[size] = entries[name].shape[0] if entries[name].shape else 0
        sizes["s+1"] = sizes["s"] + 1
        forms = _FORMS | {name: form for name, form in _MAY_LACK.items() if name in entries}
        for name, (dtype, form) in forms.items():
            wanted, entry = tuple(sizes[size] for size in form.split(",")), entries[name]
            if entry.dtype is not dtype or entry.shape != wanted:
                got = f"{str(entry.dtype)[6:]} {list(entry.shape)}"
                raise FormatError(f"{self.path}: {name}: expected {str(dtype)[6:]} {list(wanted)}, got {got}")
        strangers = sorted(set(entries) - set(forms))
        if strangers:
            raise FormatError(f"{self.path}: tensor {show(strangers[0])} is no part of a corpus")
        self.count = sizes["s"]

    def _check_origin(self, told, target):
        if told and told.get("form") != FORM:
            raise FormatError(f"{self.path}: expected a shard of form {FORM}, got {show(told.get('form'))}")
        made_by = told.get("target")
        if target is not None and made_by is not None and made_by != target:
            raise FormatError(f"{self.path}: expected one of the target {show(target)}, got one of {show(made_by)}")

    def _check_sums(self, sums):
        if sums is None:
            return
        for name, entry in self._entries.items():
            crc, at, end = 0, entry.offset, entry.offset + entry.nbytes
            while at < end:
                memory = bytearray(min(PIECE, end - at))
                self._file.read_into(memory, at)
                crc, at = zlib.crc32(memory, crc), at + len(memory)
            if not isinstance(sums, dict) or sums.get(name) != crc:
                raise FormatError(f"{self.path}: {name}: the file is damaged, its bytes don't have the sum it names")

    def _check_numbers(self):
        whole = self._whole
        lengths, answers = whole["starts"].diff(), whole["answer_starts"].diff()
        for name, counted in (("starts", "tokens"), ("answer_starts", "lse")):
            total, at = self._entries[counted].shape[0], whole[name]
            if at[0] != 0 or at[-1] != total or (at.diff() < 0).any():
                got = f"{int(at[0])} to {int(at[-1])}"
                raise FormatError(f"{self.path}: {name}: expected 0 to {total}, ascending, got {got}")
        wrong = ((whole["prompts"] < 1) | (whole["prompts"] + answers != lengths)).nonzero()
        if len(wrong):
            i = int(wrong[0])
            parts = f"{int(whole['prompts'][i])} and {int(answers[i])} of {int(lengths[i])}"
            raise FormatError(f"{self.path}: text {i}: expected a prompt and an answer that are all of it, got {parts}")
        for name, values in (("tokens", whole["tokens"]), ("top_ids", self._read("top_ids"))):
            if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < self._vocab:
                least, most = int(values.min()), int(values.max())
                raise FormatError(f"{self.path}: {name}: expected ids in [0, {self._vocab}), got {least} to {most}")
        if not self._read("lse").isfinite().all() or self._read("top_logprobs").isnan().any():
            raise FormatError(f"{self.path}: lse, top_logprobs: expected numbers, got NaN or infinity")


def _crc32(tensor):
    from specdec_kernels.stream.buffers import view_of

    return zlib.crc32(view_of(tensor.contiguous()))
