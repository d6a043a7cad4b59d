"""Sizes, workspaces and launches: what the host does for a call. It never waits for the device."""

import contextlib

import torch
import triton

from ..registry import Unsupported
from . import interpreted
from .row import GROUP
from .settle import TILE as LISTED
from .settle import settle_kernel
from .survey import TILE, survey_kernel

LARGEST = 1 << 20  # groups; beyond that a row's numbers no longer fit a program


class Rows:
    """A matrix of rows and its workspace: 8 bytes per 64 ids, 4 more each for log-probabilities and for filters."""

    def __init__(self, rows, filtered, logprobs=False):
        self.rows, self.stride, self.columns = rows, rows.stride(0), rows.shape[1]
        self.groups = triton.cdiv(self.columns, GROUP.value)
        self.chunks = triton.cdiv(self.groups, TILE)
        self.padded = max(64, triton.next_power_of_2(self.groups))
        if self.padded > LARGEST:
            raise Unsupported(f"rows of {self.columns} ids")
        count = len(rows)
        self.stats = rows.new_empty((count, 3 if logprobs else 2, self.groups), dtype=torch.float32)
        self.listed = rows.new_empty((count, self.groups), dtype=torch.int32) if filtered else None
        self.settled = rows.new_empty((count, 5), dtype=torch.float64) if filtered else None


def per_request(value, unused=0.0):
    """A parameter as the kernels take it: (number, tensor or None)."""
    return (unused, value) if isinstance(value, torch.Tensor) else (value, None)


def filtered(top_k, top_p, min_p):
    """Whether a filter may be on."""
    return (
        isinstance(top_k, torch.Tensor)
        or isinstance(top_p, torch.Tensor)
        or isinstance(min_p, torch.Tensor)
        or top_k > 0
        or top_p < 1
        or min_p > 0
    )


def on_device(tensor):
    """Launches go to the tensor's own device."""
    if tensor.is_cpu or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


def launch(kernel, grid, *args, warps=4, **constants):
    options = {} if interpreted() else {"num_warps": warps, "enable_fp_fusion": False}
    kernel[grid](*args, **constants, **options)


def survey_and_settle(
    target, draft, draft_kind, draft_is_logits, cu_drafts, draft_count, requests, width,
    temperature, top_k, top_p, min_p, logprobs,
):  # fmt: skip
    """The launches that describe every row; ``target`` and ``draft`` (or None) are :class:`Rows`."""
    drafts = (
        (None, 0, 0, None, 0) if draft is None else (draft.rows, draft.stride, draft.columns, draft.stats, draft.groups)
    )
    chunks = max(target.chunks, 0 if draft is None else draft.chunks)
    slots = width if draft is None else 2 * width - 1
    launch(
        survey_kernel, (requests * chunks, slots),
        target.rows, target.stride, target.columns, target.stats, target.groups, target.chunks,
        *drafts, draft_kind, cu_drafts, draft_count, width, *per_request(temperature), chunks,
        DRAFT_PROBS=not draft_is_logits, LOGPROBS=logprobs, TILE=TILE,
    )  # fmt: skip
    if target.settled is None:
        return
    settled = draft is not None and draft_is_logits
    launch(
        settle_kernel, (requests, 2 * width - 1 if settled else width),
        target.rows, target.stride, target.columns, target.stats, target.groups, target.listed, target.settled,
        *(drafts if settled else (None, 0, 0, None, 0)),
        draft.listed if settled else None, draft.settled if settled else None, draft_kind,
        cu_drafts, draft_count, width,
        *per_request(temperature), *per_request(top_k, 0), *per_request(top_p), *per_request(min_p),
        LOGPROBS=logprobs, G=target.padded, DRAFT_G=draft.padded if settled else 1, TILE=LISTED,
        warps=warps(target),
    )  # fmt: skip


def warps(rows):
    return 8 if rows.padded > 1024 else 4
