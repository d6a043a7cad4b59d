"""A trained draft as a file that the engine opens: int8 as it multiplies, vectors in float32."""

from __future__ import annotations

import json
from dataclasses import asdict

import torch

import specdec_kernels as sk

from ..formats.safetensors import write
from ..models.blueprint import int8_form

FORM = 1


def export(path, draft, *, kind, target, vocabulary, recipe, values=None, dtype="int8"):
    """Writes ``draft`` (networks.py) to ``path``: a whole file or none.

    ``values``: other values of its parameters, by name (an average). ``target``: {"name", "fingerprint"};
    ``vocabulary``: the tokenizer's fingerprint; ``recipe``: what made it, plain JSON. ``dtype`` "int8", or "f32" for
    models that are too small for scale groups to make sense.
    """
    config = {name: value for name, value in asdict(draft.config).items() if name != "draft_ids"}
    told = {"form": FORM, "kind": kind, "config": config, "target": target, "vocabulary": vocabulary, "recipe": recipe}
    tensors = {"draft_ids": draft.draft_ids.to(torch.int32)}
    for name, parameter in draft.named_parameters():
        value = (parameter if values is None else values[name]).detach().float().cpu()
        name = name.replace("layers.", "layer.")
        if value.dim() == 1 or dtype == "f32":
            tensors[name] = value
            continue
        group, rotated = int8_form(value.shape[1])
        packed = sk.pack_int8(value, group_size=group, rotate=rotated)
        tensors[f"{name}.codes"], tensors[f"{name}.scale"] = packed.codes, packed.scale
    write(path, tensors, {"specdec": json.dumps(told)})


def fitting(config):
    """The dtype of a draft's matrices: "f32" where its rows are shorter than a scale group."""
    return "int8" if config.hidden >= 64 else "f32"
