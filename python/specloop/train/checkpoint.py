"""The state of a training in one file: enough to go on as if it had never been stopped. No pickle."""

from __future__ import annotations

import json
import zlib

import torch

from specdec_kernels.stream.buffers import view_of

from ..errors import FormatError
from ..formats.safetensors import described, read, write

FORM, KEY = 1, "specdec-training"


def save(path, draft, ema, optimizer, state):
    """Weights, their averages, the optimiser's moments; ``state``: numbers and texts. Raises DiskError."""
    tensors = {}
    for name, parameter in draft.named_parameters():
        tensors[f"weight.{name}"] = parameter
        tensors[f"average.{name}"] = ema[name]
        for key, value in optimizer.state.get(parameter, {}).items():  # none before its first gradient
            tensors[f"{key}.{name}"] = torch.as_tensor(value)
    tensors["draft_ids"] = draft.draft_ids
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write(path, tensors, {KEY: json.dumps({"form": FORM, "crc32": checksum(tensors)} | state)})


def load(path):
    """``(tensors, state)``; raises FormatError unless it is a whole file of this form."""
    tensors, metadata = read(path)
    state = described(path, metadata, KEY)
    if state.get("form") != FORM:
        raise FormatError(f"{path}: expected a training's state of form {FORM}, got {state.get('form')!r}")
    if "crc32" in state and state["crc32"] != checksum(tensors):
        raise FormatError(f"{path}: the file is damaged: its bytes don't have the sum that it names")
    return tensors, state


def checksum(tensors):
    """CRC-32 of all their bytes, by name."""
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(view_of(tensors[name]), total)
    return total


@torch.no_grad()
def restore(path, tensors, draft, ema, optimizer):
    """Puts a state's tensors where ``save`` took them from."""
    used = {"draft_ids"}

    def take(name, like):
        found = tensors.get(name)
        if found is None or found.shape != like.shape or found.dtype is not like.dtype:
            got = "none" if found is None else f"{found.dtype} {list(found.shape)}"
            raise FormatError(f"{path}: {name}: expected {like.dtype} {list(like.shape)}, got {got}")
        used.add(name)
        return found.to(like.device)

    for name, parameter in draft.named_parameters():
        parameter.copy_(take(f"weight.{name}", parameter))
        ema[name].copy_(take(f"average.{name}", parameter))
        if f"exp_avg.{name}" in tensors:
            moments = {key: take(f"{key}.{name}", parameter).clone() for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {
                "step": take(f"step.{name}", torch.zeros((), device=parameter.device)).clone(),
                **moments,
            }
    left = sorted(set(tensors) - used)
    if left:
        raise FormatError(f"{path}: tensor {left[0]!r} belongs to nothing in this training")


@torch.no_grad()
def take_averages(path, tensors, draft):
    """Puts the averages of a state into another draft of the same form."""
    for name, parameter in draft.named_parameters():
        found = tensors.get(f"average.{name}")
        if found is None or found.shape != parameter.shape:
            got = "none" if found is None else list(found.shape)
            raise FormatError(f"{path}: average.{name}: expected {list(parameter.shape)}, got {got}")
        parameter.copy_(found)
