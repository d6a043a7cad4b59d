"""Folders as Hugging Face has them under a budget: streamed as they are where that can be, else by way of a pack."""

import copy

import pytest
import torch

import tiny_folders
from specloop import loader
from specloop.errors import BudgetError, WeightsError
from specloop.fingerprint import fingerprint
from specloop.formats.huggingface import HuggingFaceCheckpoint
from specloop.in_place import streams_in_place

pytest.importorskip("transformers", reason="transformers writes the folders, and it is not installed")
TOKENS = [3, 77, 3, 150, 9, 9, 201]


@pytest.fixture(params=["llama2", "qwen2", "qwen3 tied"])
def folder(tmp_path, monkeypatch, request):
    """A model with untied, biased or normed weights and a tied head in between, in bf16 and several files."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    model = copy.deepcopy(tiny_folders.build(request.param)).to(torch.bfloat16)
    path = tmp_path / "model"
    model.save_pretrained(path, max_shard_size="60KB")
    tiny_folders.write_tokenizer(path, tiny_folders.byte_level(), eos_token="<|im_end|>")
    return path


def logits(model):
    return model.forward(TOKENS, model.new_cache(32), last=len(TOKENS)).clone()


def smallest(folder, dtype):
    with pytest.raises(BudgetError) as refused:
        loader.load_model(folder, dtype=dtype, context=64, memory_budget=1)
    return int(str(refused.value).split("at least ")[1].split()[0])


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_logits_are_those_of_the_resident_model(folder, tmp_path, dtype):
    want = logits(loader.load_model(folder, dtype=dtype, context=64)[0])
    least = smallest(folder, dtype)
    for budget in (least, least + 60000, 1 << 28):
        model, tokenizer, _ = loader.load_model(folder, dtype=dtype, context=64, memory_budget=budget)
        assert model.streams == (budget < 1 << 28) and len(tokenizer.encode("a fox"))
        for _ in range(2):
            assert torch.equal(logits(model), want)
        model.close()
    assert (tmp_path / "cache").exists() == (dtype == "int8")  # bf16 needs no second copy on the disk


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_features_and_fingerprint_are_those_of_the_resident_model(folder, dtype):
    """Norms in bf16, streamed in place, and norms of heads: all of them count."""
    found = []
    for budget in (None, smallest(folder, dtype)):
        model, tokenizer, _ = loader.load_model(folder, dtype=dtype, context=64, memory_budget=budget)
        assert model.weights.dtype == dtype
        cache = model.new_cache(32, features=True)
        for tokens, last in ((TOKENS, 0), ([5], 1), ([8, 9], 1)):
            model.forward(tokens, cache, last=last)
        found.append((fingerprint(model, tokenizer), cache.features[: cache.length].clone()))
        model.close()
    assert found[0][0] == found[1][0] == loader.fingerprint_of_file(folder)
    assert torch.equal(found[0][1], found[1][1])


def test_only_what_is_stored_as_asked_streams_in_place(folder):
    with HuggingFaceCheckpoint(folder) as checkpoint:
        assert [streams_in_place(checkpoint, dtype) for dtype in ("bf16", "f32", "int8")] == [True, False, False]


def test_a_shard_that_changes_is_noticed(folder):
    model, _, _ = loader.load_model(folder, dtype="bf16", context=64, memory_budget=smallest(folder, "bf16"))
    logits(model)
    shard = sorted(folder.glob("*.safetensors"))[-1]
    with open(shard, "ab") as file:
        file.write(b"\0")
    with pytest.raises(WeightsError, match="changed"):
        logits(model)
    model.close()
