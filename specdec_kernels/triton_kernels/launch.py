"""Sizes, workspaces and launches: what the host does for a call. It never waits for the device."""

import contextlib
import functools

import torch
import triton

from ..registry import Unsupported
from . import interpreted
from .row import GROUP, SETTLED
from .settle import TILE as LISTED
from .settle import settle_kernel
from .survey import TILE, survey_kernel

LOADS_AHEAD = {"linear_kernel": 4}  # turns of a loop whose loads are under way, on NVIDIA's GPUs; elsewhere 2
LARGEST = 1 << 15  # groups: beyond 2 million ids a row's numbers no longer fit a program's registers


class Matrix:
    """Rows on the device and their workspace: 8 bytes per 64 ids, 4 more each for log-probabilities and for lists."""

    def __init__(self, rows, settled, logprobs=False):
        self.rows, self.columns, self.fields = rows, rows.shape[1], 3 if logprobs else 2
        self.groups = triton.cdiv(self.columns, GROUP.value)
        self.padded = padded(self.groups, 64)
        if self.padded > LARGEST:
            raise Unsupported(f"rows of {self.columns} ids")
        self.threads = min(max(self.padded // 8, 128), 512)  # of a program that holds all groups of a row
        self.stats = rows.new_empty((len(rows), self.fields, self.groups), dtype=torch.float32)
        self.listed = rows.new_empty((len(rows), self.groups), dtype=torch.int32) if settled else None
        self.settled = rows.new_empty((len(rows), SETTLED.value), dtype=torch.float64) if settled else None

    @property
    def surveyed(self):
        return self.rows, self.rows.stride(0), self.columns, self.stats, self.groups

    @property
    def arguments(self):
        return *self.surveyed, self.settled

    @staticmethod
    def arguments_of(matrix):
        return (None, 0, 0, None, 0, None) if matrix is None else matrix.arguments


class Sampling:
    """The parameters that all operations share, as the kernels take them, and what they need."""

    def __init__(self, temperature, top_k, top_p, min_p, seed, position, rule="token"):
        given = [isinstance(value, torch.Tensor) for value in (top_k, top_p, min_p)]
        filtered = any(given) or top_k > 0 or top_p < 1 or min_p > 0
        random = seed is not None
        self.all = rule == "threshold"  # greedy requests need their rows' distributions, too
        self.entropy = rule == "typical"
        self.settled = (filtered or self.entropy) and (random or self.all)
        self.reads_drafts = rule != "typical" and (random or self.all)
        self.temperature, self.top_p, self.min_p = per_request(temperature), per_request(top_p), per_request(min_p)
        self.top_k = per_request(top_k, 0)

    @staticmethod
    def theta(theta):
        return per_request(0.0 if theta is None else theta)


def padded(n, least=8):
    """The next power of two; not below ``least``, so that small sizes share one compiled kernel."""
    return max(least, triton.next_power_of_2(n))


def per_request(value, unused=0.0):
    """A parameter as the kernels take it: (number, tensor or None)."""
    return (unused, value) if isinstance(value, torch.Tensor) else (value, None)


def describe(target, draft, draft_probs, draft_kind, bounds, requests, sampling):
    """The launches before the last one: survey, and settle if it is needed. ``draft``: a Matrix or None."""
    drafts = (None, 0, 0, None, 0) if draft is None else draft.surveyed
    rows = len(target.rows)
    launch(
        survey_kernel,
        (rows if draft is None else rows + len(draft.rows), triton.cdiv(max(target.groups, drafts[-1]), TILE)), 128,
        *target.surveyed, rows, *drafts, draft_kind, bounds, requests, *sampling.temperature,
        FIELDS=target.fields, PROBS=draft_probs, ALL=sampling.all, TILE=TILE,
    )  # fmt: skip
    if target.settled is None:
        return
    both = draft is not None and draft.settled is not None
    drafts = (*drafts, draft.listed, draft.settled) if both else (None, 0, 0, None, 0, None, None)
    launch(
        settle_kernel, (rows + len(draft.rows) if both else rows,), target.threads,
        *target.surveyed, rows, target.listed, target.settled, *drafts, draft_kind, bounds, requests,
        *sampling.temperature, *sampling.top_k, *sampling.top_p, *sampling.min_p,
        FIELDS=target.fields, ALL=sampling.all, ENTROPY=sampling.entropy,
        G=target.padded, DRAFT_G=draft.padded if both else 1, TILE=LISTED,
    )  # fmt: skip


def on_device(tensor):
    """Launches go to the tensor's own device."""
    if tensor.is_cpu or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


@functools.cache
def target():
    return triton.runtime.driver.active.get_currenttarget()


def compiler_options(kernel, threads, target, rule=None):
    """How a kernel is compiled for a target (Triton's GPUTarget), at a launch and ahead of time."""
    if rule == "block" and target.backend == "cuda" and target.arch >= 100:
        threads = min(threads, 256)  # the 128 registers that each of 512 threads may have are too few there
    # No fused multiply-add, so that equal rows have equal totals wherever they are computed.
    options = {"num_warps": threads // target.warp_size, "enable_fp_fusion": False}
    if kernel is settle_kernel and target.backend == "cuda" and 80 <= target.arch < 90 and threads == 512:
        options["maxnreg"] = 128  # left alone, ptxas spills there to make room for a second program
    if kernel.__name__ == "linear_kernel" and target.backend == "cuda" and target.arch < 80:
        options["maxnreg"] = 128  # as above
    if target.backend == "cuda" and kernel.__name__ in LOADS_AHEAD:
        options["num_stages"] = LOADS_AHEAD[kernel.__name__] + 1
    return options


def launch(kernel, grid, threads, *args, **constants):
    options = {} if interpreted() else compiler_options(kernel, threads, target(), constants.get("RULE"))
    kernel[grid](*args, **constants, **options)
