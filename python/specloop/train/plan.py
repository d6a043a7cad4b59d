"""How a training goes: its settings, how far it is, and which texts come next. All of it plain numbers."""

from __future__ import annotations

import heapq
import math
from dataclasses import asdict, dataclass, field, fields

import torch

from ..errors import OptionError, show
from .losses import LOSSES

KINDS = ("feature", "model")
PRECISIONS = {"auto": None, "f32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in PRECISIONS.items()}


@dataclass(frozen=True)
class Settings:
    """``minutes`` or ``steps`` say when it ends; with minutes the schedule follows the clock."""

    kind: str = "feature"
    minutes: float | None = None
    steps: int | None = None
    rows: int = 4096  # answer rows per step
    micro_rows: int | None = None  # at once; None = as many as memory allows (batch_size.py)
    depths: int = 3  # unrolled steps
    decay: float = 0.8  # weight of depth i: decay^i
    losses: dict = field(default_factory=lambda: {"lk": 1.0, "ce": 0.1})
    rate: float = 1e-3
    last_rate: float = 1e-4
    warm_up: float = 0.03  # share of the training
    head_from: float = 2 / 3  # share of it after which the head's rows are trained, too; of a feature head
    betas: tuple = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 1.0
    ema: float = 0.995
    seed: int = 0
    vocabulary: int | None = None  # ids that it can say; None = those of the start, or vocabulary.py's number
    parameters: int = 13_500_000  # of kind "model"
    logged_from: float = 0.9  # share of the training after which logged contexts take part, if there are some,
    logged_share: float = 0.5  # with so much of a step's rows
    logged_shards: int = 0  # of these, which the target and the draft as it is then write; of a feature head
    fit_texts: int = 256  # that a feature head's first weights are fitted to (initial.py); 0 = they are not
    precision: str = "auto"
    checkpointing: bool = False

    def __post_init__(self):
        real = lambda value: isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        count = lambda value: isinstance(value, int) and not isinstance(value, bool)

        def expect(name, right, wanted):
            if not right:
                raise OptionError(f"{name}: expected {wanted}, got {show(getattr(self, name))}")

        expect("kind", self.kind in KINDS, f"one of {', '.join(KINDS)}")
        expect("minutes", self.minutes is None or (real(self.minutes) and self.minutes > 0), "a number above 0")
        expect("steps", self.steps is None or (count(self.steps) and self.steps > 0), "an integer above 0")
        if (self.minutes is None) == (self.steps is None):
            raise OptionError(f"minutes, steps: expected one of them, got {self.minutes} and {self.steps}")
        for name, least in (
            ("rows", 1),
            ("depths", 1),
            ("vocabulary", 2),
            ("parameters", 1000),
            ("seed", 0),
            ("fit_texts", 0),
            ("logged_shards", 0),
        ):
            value = getattr(self, name)
            right = count(value) and least <= value < 2**31
            expect(name, right or (name == "vocabulary" and value is None), f"an integer from {least} to {2**31 - 1}")
        expect("micro_rows", self.micro_rows is None or (count(self.micro_rows) and self.micro_rows > 0), "a count")
        for name in ("decay", "warm_up", "head_from", "ema", "logged_from", "logged_share"):
            value = getattr(self, name)
            expect(name, real(value) and 0 <= value <= 1, "a number from 0 to 1")
        for name in ("rate", "last_rate", "weight_decay", "clip"):
            value = getattr(self, name)
            expect(name, real(value) and value >= 0, "a number of at least 0")
        wanted = "0 for a model of its own, which is trained on every row of a text that it would see in a run"
        expect("logged_shards", not self.logged_shards or self.kind == "feature", wanted)
        expect("precision", self.precision in PRECISIONS, f"one of {', '.join(PRECISIONS)}")
        known = isinstance(self.losses, dict) and self.losses and set(self.losses) <= set(LOSSES)
        expect(
            "losses", known and all(real(w) and w > 0 for w in self.losses.values()), f"weights of {', '.join(LOSSES)}"
        )
        object.__setattr__(self, "betas", tuple(self.betas))

    def as_dict(self):
        return asdict(self)

    @classmethod
    def from_dict(cls, told):
        known = {f.name for f in fields(cls)}
        if not isinstance(told, dict) or not set(told) <= known:
            raise OptionError(f"settings: expected some of {', '.join(sorted(known))}, got {show(told)}")
        return cls(**told)

    def rate_at(self, progress):
        """Linear to ``rate`` in the first ``warm_up`` of it, then half a cosine to ``last_rate``."""
        if progress < self.warm_up:
            return self.rate * max(progress / self.warm_up, 0.05)
        share = min(1.0, (progress - self.warm_up) / max(1e-9, 1 - self.warm_up))
        return self.last_rate + (self.rate - self.last_rate) * (1 + math.cos(math.pi * share)) / 2


def precision(name, device):
    """The dtype of products: bf16 where "auto" finds that the device multiplies it fast."""
    if name != "auto":
        return PRECISIONS[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    from torch.backends import cpu

    fast = "AVX512" in cpu.get_cpu_capability() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


class Order:
    """Which texts are trained on when: a new order in every epoch, a function of the seed and the epoch alone.

    ``epoch`` and ``at`` (how many texts of it were given out) say where it is.
    """

    def __init__(self, lengths, seed, epoch=0, at=0):
        self.lengths, self.seed, self.epoch, self.at = lengths, seed, epoch, at
        self._shuffle()

    def _shuffle(self):
        of_epoch = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        self._order = torch.randperm(len(self.lengths), generator=of_epoch).tolist()

    def next(self, rows):
        """Numbers of the next texts, together at least ``rows`` answer rows."""
        taken, total = [], 0
        while total < rows:
            if self.at == len(self._order):
                self.epoch, self.at = self.epoch + 1, 0
                self._shuffle()
            taken.append(self._order[self.at])
            total += self.lengths[taken[-1]]
            self.at += 1
        return taken


def runs(numbers, lengths, rows, workers=1):
    """The numbers in runs of about as many rows each, at most a quarter more than ``rows`` (or of one); as many runs as
    ``workers`` or a multiple of it, if there are so many numbers. The longest texts are given out first, each to the
    run that has least.
    """
    total = sum(lengths[number] for number in numbers)
    count = max(1, math.ceil(total / (1.2 * rows)))  # the texts of a step are a few rows more than were wanted
    count = -(-count // workers) * workers
    found = [(0, i, []) for i in range(min(count, len(numbers)))]
    for number in sorted(numbers, key=lambda number: -lengths[number]):
        taken, i, run = found[0]
        run.append(number)
        heapq.heapreplace(found, (taken + lengths[number], i, run))
    return [sorted(run) for _, _, run in sorted(found, key=lambda one: one[1])]
