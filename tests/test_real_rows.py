"""The shipped rows of the real model's logits are what their description says."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import real_rows


def test_drafts_are_the_two_most_likely_ids():
    rows, drafts = real_rows.logits(), real_rows.drafts()
    assert rows.shape == (16, 49152) and drafts.shape == (16, 2) and len(real_rows.about()) == 16
    first, second = rows.gather(1, drafts).T
    assert torch.equal(rows.argmax(1), drafts[:, 0]) and (first > second).all()
    rows.scatter_(1, drafts[:, :1], -torch.inf)
    assert torch.equal(rows.amax(1), second)


def test_rows_are_sure_and_unsure():
    best = real_rows.logits().softmax(1).amax(1)
    assert best.min() < 0.1 and best.max() > 0.99 and 0.3 < best.median() < 0.9


def test_wider_vocabulary_repeats_the_row_lower():
    rows, wide = real_rows.logits(), real_rows.logits(151936)
    assert torch.equal(wide[:, :49152], rows)
    assert torch.equal(wide[:, 49152:], (rows - 6).repeat(1, 3)[:, : 151936 - 49152])


@pytest.mark.slow
def test_the_script_makes_the_same_file(smollm2, tmp_path):
    script, made = Path(__file__).parent / "make_logits.py", tmp_path / "logits.safetensors"
    subprocess.run([sys.executable, script, made], check=True)
    assert made.read_bytes() == real_rows.PATH.read_bytes()
