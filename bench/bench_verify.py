"""verify against a plain read of the same rows, eager PyTorch written well, and transformers; caches cold.

    python bench/bench_verify.py [--quick] [--pairs 15] [--only "B=8 f32"] [--isa avx2] [--json]
    pytest bench/bench_verify.py

K = 4 drafts per request on rows of the real model (tests/data). "all rows": every draft is accepted, so all rows count;
"early exit": each request's first draft is refused, so one row per request counts and the rest is never read. All
sides of a ratio take turns in one run; a ratio inside the A/A interval means nothing. "least" compares the shortest
times, which a busy machine disturbs least; so do the columns of the slow rivals, which get few turns. Per (request,
vocabulary entry) "bytes" is what the rows that the verdict depends on hold, "floor" what the case must cost at least.
Targets are those for 8 requests with all rows needed.
"""

import argparse
import itertools
import json
import os
import re
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch
import verify_rivals as rivals
from ab import Comparison, aa, compare
from verify_inputs import DRAFTS, Inputs, gaussian, real_rows

from specdec_kernels import native, use_backend, verify


@dataclass(frozen=True)
class Mode:
    name: str
    temperature: float
    top_p: float = 1.0
    form: str | None = None  # of the draft rows; None = point masses
    rule: str = "token"
    targets: tuple = (None, None)  # time over the plain read, f32 and bf16
    eager_target: float | None = None

    @property
    def options(self):
        return {"temperature": self.temperature, "top_p": self.top_p, "rule": self.rule}


MODES = [
    Mode("greedy", 0, targets=(1.15, 1.35)),
    Mode("T=0.7", 0.7, targets=(1.5, 2.0)),
    Mode("T=0.7 top-p 0.9", 0.7, 0.9, targets=(2.5, 3.5)),
    Mode("T=0.7 top-p 0.9, draft_logits", 0.7, 0.9, "draft_logits", eager_target=40),
    Mode("T=0.7 top-p 0.9, draft_probs", 0.7, 0.9, "draft_probs", eager_target=40),
    Mode("T=0.7, block", 0.7, rule="block"),
    Mode("T=0.7 top-p 0.9, draft_logits, block", 0.7, 0.9, "draft_logits", rule="block"),
]
NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Case:
    """What one section of the table shares."""

    requests: int
    dtype: torch.dtype
    vocabulary: int
    accept: bool = True
    rows: str = "real"

    def __str__(self):
        kind = "all rows" if self.accept else "early exit"
        return f"B={self.requests} {NAMES[self.dtype]} V={self.vocabulary} {self.rows} {kind}"

    def inputs(self):
        source = gaussian if self.rows == "gaussian" else real_rows.logits
        return Inputs(self.requests, self.vocabulary, self.dtype, accept=self.accept, source=source)

    def has_targets(self):
        return self.requests == 8 and self.accept and self.rows == "real"


@dataclass(frozen=True)
class Result:
    case: str
    mode: str
    read: Comparison  # ours / plain read
    eager: Comparison | None  # eager / ours
    transformers: Comparison | None
    bytes: float  # per (request, vocabulary entry)
    floor: float
    target: float | None
    eager_target: float | None

    def line(self):
        ratio, (low, high) = self.read.ratio, self.read.interval
        read = f"{ratio:.2f} [{low:.2f}, {high:.2f}]{self.read.least:7.2f}"
        target = _judged(ratio, "<=", self.target)
        eager = _judged(self.eager.least, ">=", self.eager_target) if self.eager else ""
        times = lambda other: f"{other.least:.1f}x" if other else "-"
        return (
            f"{self.mode:37s}{self.read.a_seconds * 1e6:8.0f} us  {read:27s}{target:15s}"
            f"{times(self.eager):>8s} {eager:13s}{times(self.transformers):>8s}  {self.bytes:5.1f} / {self.floor:g}"
        )


def _judged(ratio, sign, target):
    if target is None:
        return ""
    return f"{sign} {target:g} {'holds' if (ratio <= target if sign == '<=' else ratio >= target) else 'MISSED'}"


HEAD = (
    f"{'':37s}{'ours':>11s}  {'/ plain read      least':27s}{'target':15s}{'eager':>8s} {'target':13s}{'transf.':>8s}"
)
HEAD += "  bytes / floor"


def measure(case, inputs, mode, pairs, rival=True):
    """One line of the table: ours against the plain read and, with ``rival``, against the other implementations."""
    ours = inputs.ours(mode.form, **mode.options)
    with use_backend("cpu"):
        verdict = ours()  # raises where the compiled kernels lack the mode
    if mode.rule == "token":
        assert (verdict.num_accepted == (DRAFTS if case.accept else 0)).all() and not verdict.flags.any()
    size, all_rows = case.dtype.itemsize, case.accept or mode.rule == "block"
    read_rows = sum(map(sum, inputs.rows_read(verdict, mode.form, mode.rule)))
    floor = (DRAFTS + 1 if all_rows else 1) + (0 if mode.form is None else DRAFTS if all_rows else 1)
    result = Result(
        case=str(case),
        mode=mode.name,
        read=compare(ours, inputs.read(verdict, mode.form, mode.rule), pairs=pairs, repeat=_repeat(ours)),
        eager=None,
        transformers=None,
        bytes=read_rows * size / case.requests,
        floor=floor * size,
        target=mode.targets[list(NAMES).index(case.dtype)] if case.has_targets() else None,
        eager_target=mode.eager_target if case.has_targets() else None,
    )
    if not rival or mode.rule != "token":
        return result
    few = {"pairs": max(2, pairs // 5), "warmup": 1}
    result = replace(result, eager=compare(eager(inputs, mode), ours, **few))
    other = transformers(inputs, mode) if case.requests == 1 and mode.form == "draft_logits" else None
    return replace(result, transformers=compare(other, ours, **few) if other else None)


def _repeat(run):
    """How many calls make one timing of two milliseconds or more, as far as 20 do."""
    start = time.perf_counter()
    run()
    return max(1, min(20, int(2e-3 / (time.perf_counter() - start))))


def eager(inputs, mode):
    if mode.temperature == 0:
        return lambda: rivals.greedy(inputs.targets[next(inputs.turn)], inputs.ids)
    drafts = inputs.drafts(mode.form) if mode.form else None

    def run():
        i = next(inputs.turn)
        more = {mode.form: drafts[i]} if drafts else {}
        rivals.token_rule(inputs.targets[i], inputs.ids, mode.temperature, mode.top_p, **more)

    return run


def transformers(inputs, mode):
    rule, drafts = rivals.transformers_rule(mode.temperature, mode.top_p), inputs.drafts(mode.form)
    if rule is None:
        return None

    def run():
        i = next(inputs.turn)
        rule(inputs.targets[i], inputs.ids, drafts[i])

    return run


def call_overhead(**options):
    """Microseconds of a call on a tiny input, one value per window of 20 calls."""
    rows, tokens, cu = torch.randn(5, 16), torch.tensor([1, 2, 3, 4]), torch.tensor([0, 4], dtype=torch.int32)
    keys = {"seed": torch.tensor([1]), "position": torch.tensor([5])}
    windows = []
    for _ in range(200):
        start = time.perf_counter()
        for _ in range(20):
            verify(rows, tokens, cu, **keys, **options)
        windows.append((time.perf_counter() - start) / 20 * 1e6)
    return windows


def peak_memory():
    """How far all modes one after the other raise this process's peak memory, in bytes per thread (Linux only)."""
    inputs = Case(8, torch.float32, 151936).inputs()
    runs = [inputs.ours(mode.form, **mode.options) for mode in MODES]
    inputs.read(verify(inputs.targets[0].view(-1, 151936), inputs.tokens, inputs.cu, temperature=0))()  # wakes threads
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts at what is resident now
    before = _status("VmRSS")
    for run in runs:
        run()
    return (_status("VmHWM") - before) * 1024 / native.threads()


def _status(field):
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def cases(quick):
    if quick:
        yield Case(8, torch.float32, 49152)
        yield Case(8, torch.bfloat16, 49152)
        yield Case(1, torch.float32, 49152)
        return
    for accept, vocabulary, requests, dtype in itertools.product((True, False), (49152, 151936), (8, 1), NAMES):
        yield Case(requests, dtype, vocabulary, accept)
    for vocabulary, dtype in itertools.product((49152, 151936), NAMES):
        yield Case(8, dtype, vocabulary, rows="gaussian")


# ---- python bench/bench_verify.py ----------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one vocabulary, few pairs: under a minute")
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument("--only", default="", help='only sections that contain this, as in "B=8 f32"')
    parser.add_argument("--no-rivals", action="store_true", help="the plain read only")
    parser.add_argument("--isa", choices=native.ISA_NAMES)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    pairs = options.pairs or (9 if options.quick else 15)
    if options.isa and not native.cpu.set_isa(options.isa):
        parser.error(f"--isa {options.isa}: this machine runs at most {native.cpu.machine_isa()}")
    say = (lambda *_, **__: None) if options.json else print
    memory = peak_memory()  # before anything else has left memory to use
    say(f"isa {native.cpu.isa()}, {native.threads()} threads, load {os.getloadavg()[0]:.1f}, K = {DRAFTS}")
    for case in cases(options.quick):
        if options.only not in str(case):
            continue
        inputs = case.inputs()
        ours = inputs.ours(**MODES[1].options)
        noise = aa(ours, pairs=pairs, repeat=_repeat(ours))
        say(f"\n{case}; A/A {noise.ratio:.2f} [{noise.interval[0]:.2f}, {noise.interval[1]:.2f}]\n{HEAD}", flush=True)
        for mode in MODES:
            result = measure(case, inputs, mode, pairs, rival=not options.no_rivals and case.rows == "real")
            print(json.dumps(asdict(result) | {"isa": native.cpu.isa()}) if options.json else result.line(), flush=True)
    say("\na call on a tiny input (target: under 15 us)")
    for name, parameters in (("greedy", {"temperature": 0}), ("T=0.7 top-p 0.9", {"temperature": 0.7, "top_p": 0.9})):
        windows = call_overhead(**parameters)
        middle, least = statistics.median(windows), min(windows)
        if options.json:
            print(json.dumps({"case": "call overhead", "mode": name, "median_us": middle, "min_us": least}))
        else:
            print(f"{name:37s}{middle:8.1f} us (least {least:.1f})")
    if options.json:
        print(json.dumps({"case": "memory", "bytes_per_thread": memory}))
    else:
        print(
            f"\nextra memory of all modes, 8 requests, V = 151936: {memory / 1e6:.2f} MB per thread (target: under 1)"
        )


# ---- pytest bench/bench_verify.py ----------------------------------------------------------------


@pytest.fixture(scope="module", params=list(cases(quick=True)), ids=str)
def section(request):
    return request.param, request.param.inputs()


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_verify(benchmark, section, mode):
    case, inputs = section
    result = measure(case, inputs, mode, pairs=5)
    benchmark.group = str(case)
    benchmark.extra_info.update(asdict(result))
    benchmark.pedantic(inputs.ours(mode.form, **mode.options), rounds=10, warmup_rounds=1)
    assert result.bytes == result.floor


if __name__ == "__main__":
    main()
