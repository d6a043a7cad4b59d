"""The loop that trains a draft: batches in a fixed order, unrolled depths, one optimiser step each.

Everything that decides what happens next - weights, averages, moments, the order's place, the step - is in the
checkpoint, and nothing is drawn from a global generator. So a training by steps that was killed and resumed ends with
the same bits as one that was not. One by minutes follows the clock, to end in time on a machine that has other work; it
resumes where it was, but no two are the same.
"""

from __future__ import annotations

import math
import os
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from ..errors import OutOfMemory, TrainingError
from ..pressure import is_out_of_memory
from ..stats import peak_memory
from . import batch_size, checkpoint, initial, state
from .head_loss import HeadLoss, with_ones
from .log import append, finite
from .measure import Held
from .plan import NAMES, Order, Settings, precision, runs
from .samples import collate

CHECKPOINT, DRAFT, LOG = "checkpoint.safetensors", "draft.safetensors", "log.jsonl"


class Trainer:
    """``draft``: networks.py, with its first weights. ``teacher_head``: the target's rows of the draft's ids, float32.

    ``folder``: where checkpoint, draft and log go. ``export(path, values, recipe)`` writes the draft. ``about``: plain
    JSON, kept with the state: what the training belongs to; a state that belongs to something else is refused.
    ``logged``: a folder's Samples, contexts of real speculative runs: the last of it trains on them, too (Settings).
    Without them ``log(progress)`` is asked for some when their time has come, with the draft in the folder as it is
    then; it may be ended by what ``progress(fraction)`` raises.
    ``progress(fraction, text)`` is called after every step, ``stop()`` before: whether to save and end.
    """

    def __init__(self, draft, samples, settings: Settings, teacher_head, folder, *, about, export, device="cpu",
                 progress=None, stop=None, logged=None, log=None, save_every=120.0, measurements=16,
                 held_rows=3072):  # fmt: skip
        self.draft, self.samples, self.settings = draft.to(device), samples, settings
        self.folder, self.about, self.export, self.device = os.fspath(folder), about, export, torch.device(device)
        self.progress, self.stop = progress or (lambda fraction, text: None), stop or (lambda: False)
        self.save_every, self.measurements = save_every, measurements
        self.dtype = precision(settings.precision, self.device)
        draft.compute, draft.checkpointing = self.dtype, settings.checkpointing
        self.depths = settings.depths if settings.kind == "feature" else 1
        self.parameters = dict(draft.named_parameters())
        self.ema = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=0.0, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
        )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype is torch.float16)
        self.column_of = torch.full((draft.config.vocab,), -1)
        self.column_of[draft.draft_ids.cpu()] = torch.arange(len(draft.draft_ids))
        self.column_of = self.column_of.to(self.device)
        self.teacher_head = with_ones(teacher_head).to(self.device, self.dtype)
        self.log = log
        self._take(logged)
        self._begin()
        self.held = Held(samples, self.column_of, teacher_head.to(self.device), self.depths, settings.losses, held_rows)
        self.step, self.elapsed, self.visits, self.measured = 0, 0.0, 0, []
        self.micro_rows = settings.micro_rows
        self.workers = torch.get_num_threads() if self.device.type == "cpu" else 1
        self._pool = ThreadPoolExecutor(self.workers, initializer=torch.set_num_threads, initargs=(1,))
        self._saved = None  # the step of the last state on the disk
        self._recent = None

    def _take(self, logged):
        """The texts by number, those that were logged behind the corpus'."""
        self.logged = logged
        self.places = [(self.samples, place) for place in self.samples.train]
        self.places += [] if logged is None else [(logged, place) for place in logged.train]
        self.lengths = [source.lengths([place])[0] for source, place in self.places]
        self.draft.reach(max(source.longest for source, _ in self.places) + self.depths)

    def _begin(self, *at):
        """The orders of the corpus' texts and of those that were logged; ``at``: (epoch, texts given out) of each."""
        seed, first = self.settings.seed, len(self.samples.train)
        at = at or ((0, 0), (0, 0))
        self.order = Order(self.lengths[:first], seed, *at[0])
        self.logged_order = None if self.logged is None else Order(self.lengths[first:], seed + 1, *at[1])

    def _next(self):
        """Numbers of the texts of the next step."""
        s = self.settings
        if self.logged_order is None or self.fraction < s.logged_from:
            return self.order.next(s.rows)
        few = max(1, round(s.rows * s.logged_share))
        logged = [n + len(self.samples.train) for n in self.logged_order.next(few)]
        return [*self.order.next(max(1, s.rows - few)), *logged]

    def _texts(self, numbers):
        return [source.text(place) for source, place in (self.places[n] for n in numbers)]

    @property
    def fraction(self):
        """How far it is."""
        s = self.settings
        return min(1.0, self.step / s.steps if s.steps is not None else self.elapsed / (60 * s.minutes))

    def run(self):
        """Trains to the end, or until ``stop``. Returns whether it came to the end.

        Raises TrainingError, OutOfMemory, DiskError; what :meth:`resume` raises where the folder has a state.
        """
        try:
            return self._run()
        except Exception as error:
            if isinstance(error, OutOfMemory) or not is_out_of_memory(error):
                raise
            raise OutOfMemory(f"{batch_size.advice(error, self.micro_rows)}; {self._kept()}") from None

    def _run(self):
        os.makedirs(self.folder, exist_ok=True)
        path = self.checkpoint
        if os.path.exists(path):
            self.resume(path)
        elif self.settings.kind == "feature" and self.settings.fit_texts:
            places = self.samples.train[:: max(1, len(self.samples.train) // self.settings.fit_texts)]
            initial.fit(
                self.draft, map(self.samples.text, places), lambda text: self._batch([text]), seed=self.settings.seed
            )
            for name, parameter in self.parameters.items():
                self.ema[name].copy_(parameter.detach())
        if self.micro_rows is None:
            free, s = batch_size.free_bytes(self.device), self.settings
            self.micro_rows = batch_size.choose(
                self.draft.config, self.depths, s.checkpointing, s.rows, free, self.workers
            )
        began, before, saved = time.monotonic(), self.elapsed, time.monotonic()
        while self.fraction < 1 and not self.stop():
            if self.log is not None and self.logged is None and self.fraction >= self.settings.logged_from:
                if not self._log():
                    return False
                began, before, saved = time.monotonic(), self.elapsed, time.monotonic()  # that was no training
            self._train_step()
            self.elapsed = before + time.monotonic() - began
            if self.fraction >= len(self.measured) / self.measurements:
                self._measure()
            self.progress(self.fraction, self._line())
            if time.monotonic() - saved > self.save_every:
                self.save()
                saved = time.monotonic()
            self.elapsed = before + time.monotonic() - began
        done = self.fraction >= 1
        if done and (not self.measured or self.measured[-1]["step"] != self.step):
            self._measure()
        self.save()
        return done

    def _log(self):
        """Has contexts logged with the draft as it is. Returns whether they are there, and not ``stop`` was.

        The state that is saved before is the one that is gone on from until there is a next one: it has the same draft
        made again, by which the contexts that are there already are known.
        """
        self.save()

        def tell(fraction):
            if self.stop():
                raise _Stopped
            self.progress(self.fraction, f"runs of the draft are logged: {fraction:.0%}")

        try:
            self._take(self.log(tell))
        except _Stopped:
            return False
        self._begin((self.order.epoch, self.order.at), (0, 0))
        return True

    def _batch(self, texts):
        return collate(texts, self.column_of, self.teacher_head, self.device)

    def _train_step(self):
        s = self.settings
        rate, thawed = s.rate_at(self.fraction), s.kind == "model" or self.fraction >= s.head_from
        self.draft.head.requires_grad_(thawed)
        place = self.order.epoch, self.order.at
        numbers = self._next()
        lengths = [self.lengths[n] for n in numbers]
        counted = (source.counted(place, self.depths) for source, place in (self.places[n] for n in numbers))
        share = [s.decay**i / max(1, sum(rows)) for i, rows in enumerate(zip(*counted, strict=True))]
        scale = torch.tensor(share, device=self.device)[:, None] / sum(s.decay**i for i in range(self.depths))
        loss, seen, counts = 0.0, 0, 0
        trained = [p for p in self.parameters.values() if p.requires_grad]
        parts = runs(numbers, self.lengths, self.micro_rows, self.workers)
        for part, slopes, measured in self._each(lambda run: self._gradients(run, scale, trained), parts):
            means, rows = measured.means()
            loss, seen, counts = loss + part, seen + means * rows, counts + rows
            for parameter, slope in zip(trained, slopes, strict=True):
                if slope is not None:
                    parameter.grad = slope if parameter.grad is None else parameter.grad.add_(slope)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), s.clip or math.inf)
        if not math.isfinite(loss) or not (self.scaler.is_enabled() or math.isfinite(norm.item())):
            raise self._no_number("loss" if not math.isfinite(loss) else "gradient", place, numbers)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.step += 1
        self.visits += sum(lengths)
        keep = min(s.ema, self.step / (self.step + 9))
        torch._foreach_lerp_(list(self.ema.values()), [p.detach() for p in self.parameters.values()], 1 - keep)
        _, alpha, agreed = (seen / counts.clamp(min=1)).tolist()
        self._recent = {"loss": loss, "rate": rate, "norm": norm.item(), "alpha": alpha, "agreed": agreed}

    def _gradients(self, run, scale, trained):
        """(loss, gradients of ``trained``, what was measured) of texts by number."""
        batch = self._batch(self._texts(run))
        counted = batch.counted(self.depths)
        states = self.draft(batch, self.depths)
        states = torch.stack([states[i].roll(i, 0) for i in range(self.depths)])  # to the answer rows they guess
        losses = self.settings.losses
        part, measured = HeadLoss.apply(
            states, self.draft.head, batch.teacher, counted, scale * counted, losses, self.dtype
        )
        return part.item(), torch.autograd.grad(self.scaler.scale(part), trained, allow_unused=True), measured

    def _each(self, function, parts):
        """The function's results in order. On a processor every core takes runs of its own: threads that share the work
        of each small operation would spend their time on waiting for each other.
        """
        if self.workers < 2 or len(parts) < 2:
            yield from map(function, parts)
            return
        torch.set_num_threads(1)
        try:
            yield from self._pool.map(function, parts)
        finally:
            torch.set_num_threads(self.workers)

    def _no_number(self, what, place, numbers):
        source, first = self.places[numbers[0]]
        where = f"step {self.step}, epoch {place[0]}, from text {first[1]} of {source.names[first[0]]} on"
        return TrainingError(f"the {what} is no finite number ({where}); {self._kept()}")

    def _kept(self):
        """What is left of a training that failed."""
        if self._saved is None:
            return "there is no state that was saved before"
        return f"the last good state, of step {self._saved}, is {self.checkpoint}"

    def _measure(self):
        began = time.monotonic()
        report = self.held.measure(self.draft, self.ema)
        speed = self.visits / max(1e-9, self.elapsed)
        report = {"step": self.step, "fraction": self.fraction, "elapsed": self.elapsed} | report
        report |= {"visits": self.visits, "visits_per_second": speed, "seconds": time.monotonic() - began}
        report["peak_bytes"] = (
            torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else peak_memory()
        )
        self.measured.append(report)
        append(os.path.join(self.folder, LOG), report | {"training": self._recent})

    def _line(self):
        shown = lambda values: " ".join(f"{v:.3f}" for v in values)
        now, held = self._recent, self.measured[-1] if self.measured else None
        text = f"step {self.step} loss {now['loss']:.4f} alpha {shown(now['alpha'])}"
        if held:
            text += f" | held out T=1 {shown(held['alpha'])} T=0 {shown(held['agreed'])}"
        return f"{text} | {self.visits / max(1e-9, self.elapsed):.0f} rows/s"

    def report(self):
        """What came out, for people."""
        if not self.measured:
            return f"nothing was measured yet: {self.step} steps, {self.checkpoint}"
        last = self.measured[-1]
        lines = [f"{'position':<10}" + "".join(f"{i + 1:>8}" for i in range(self.depths))]
        for label, key in (("T = 1", "alpha"), ("T = 0", "agreed")):
            lines.append(f"{label:<10}" + "".join(f"{value:8.3f}" for value in last[key]))
        speed = f"{self.visits} rows in {self.elapsed:.0f} s, {last['visits_per_second']:.0f} a second"
        speed += f", at most {last['peak_bytes'] / 1e9:.2f} GB of memory" if last["peak_bytes"] else ""
        return "\n".join(["acceptance on held-out text", *lines, speed, os.path.join(self.folder, DRAFT)])

    @property
    def checkpoint(self):
        return os.path.join(self.folder, CHECKPOINT)

    def save(self):
        """The state, and the draft as it is now."""
        told = {
            "settings": self.settings.as_dict(), "about": self.about, "shards": self.samples.names,
            "step": self.step, "elapsed": self.elapsed, "visits": self.visits, "measured": self.measured,
            "orders": [(order.epoch, order.at) for order in (self.order, self.logged_order or self.order)],
            "logged": self.logged and self.logged.names, "micro_rows": self.micro_rows,
            "products": NAMES[self.dtype], "scaler": self.scaler.state_dict(),
        }  # fmt: skip
        checkpoint.save(self.checkpoint, self.draft, self.ema, self.optimizer, told)
        self._saved = self.step
        self.export(os.path.join(self.folder, DRAFT), self.ema, self.recipe())

    def recipe(self):
        """What made the draft so far."""
        last = self.measured[-1] if self.measured else None
        lengths = self.lengths[: len(self.samples.train)]
        corpus = {"shards": len(self.samples.names), "texts": len(lengths), "answer_rows": sum(lengths)}
        told = {"settings": self.settings.as_dict(), "step": self.step, "visits": self.visits, "corpus": corpus}
        told["logged"] = self.logged and {"shards": len(self.logged.names), "texts": len(self.logged.train)}
        return told | {"elapsed": self.elapsed, "held_out": finite(last)}

    def resume(self, path):
        """Goes on from a state. Raises OptionError if it belongs to another training, FormatError if it is damaged."""
        tensors, told = checkpoint.load(path)
        mine = {"about": self.about, "shards": self.samples.names, "logged": self.logged and self.logged.names}
        state.check(path, told, self.settings, NAMES[self.dtype], **mine)
        checkpoint.restore(path, tensors, self.draft, self.ema, self.optimizer)
        self.step, self.elapsed, self.visits = told["step"], told["elapsed"], told["visits"]
        self.measured, self.micro_rows = told["measured"], self.settings.micro_rows or told["micro_rows"]
        self._begin(*told["orders"])
        self.scaler.load_state_dict(told["scaler"])
        self._saved = self.step


class _Stopped(Exception):
    """``stop`` was, while contexts were logged."""
