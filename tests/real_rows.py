"""Rows of the real model's logits for tests and benchmarks; make_logits.py says where they come from."""

import json
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open

PATH = Path(__file__).parent / "data" / "smollm2_logits.safetensors"
VOCABULARY = 49152


@cache
def _file():
    with safe_open(PATH, "pt") as file:
        return file.get_tensor("logits"), file.get_tensor("drafts"), json.loads(file.metadata()["rows"])


def logits(vocabulary=VOCABULARY):
    """f32 [16, vocabulary]; beyond the model's own ids the row repeats, 6 lower, so rare but not absent."""
    rows = _file()[0].float()
    ids = torch.arange(vocabulary)
    return rows[:, ids % VOCABULARY] - 6.0 * (ids >= VOCABULARY)


def drafts():
    """int64 [16, 2]: each row's most likely id (what a lookup or greedy draft proposes) and the second."""
    return _file()[1].long()


def about():
    """Per row: the prompt's name, the place in the answer, the text of the two ids."""
    return _file()[2]
