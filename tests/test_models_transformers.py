"""Models of the llama family as transformers saves them: our logits are its logits."""

import copy
import json

import pytest
import torch

import tiny_folders
from specloop.formats.huggingface import HuggingFaceCheckpoint
from specloop.loader import load_model

pytest.importorskip("transformers", reason="transformers is the authority here, and it is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """name -> (its folder, transformers' model)"""
    made = {}

    def make(name, **options):
        key = name, *options.items()
        if key not in made:
            path = tmp_path_factory.mktemp("model")
            model = tiny_folders.build(name)
            model.save_pretrained(path, **options)
            tiny_folders.write_tokenizer(path, tiny_folders.byte_level(), eos_token="<|im_end|>")
            made[key] = path, model
        return made[key]

    return make


def ids(count, seed=0):
    return torch.randint(0, 416, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits_of(theirs, tokens):
    with torch.no_grad():
        return theirs(torch.tensor([tokens])).logits[0].float()


def logits(model, tokens):
    return model.forward(tokens, model.new_cache(len(tokens)), last=len(tokens)).clone()


@pytest.mark.parametrize("name", tiny_folders.MODELS)
def test_logits_are_those_of_transformers(folder, name):
    path, theirs = folder(name)
    tokens = ids(60)  # within mistral's window, beyond the length that the scalings start from
    want = logits_of(theirs, tokens)
    model, _, _ = load_model(path, dtype="f32", kv="f32")
    got = logits(model, tokens)
    assert (got - want).abs().max() < 1e-4 * want.abs().max()
    one_by_one = model.new_cache(60)
    for position, token in enumerate(tokens[:20]):
        assert torch.equal(model.forward([token], one_by_one, last=1)[0], got[position])
    int8, _, _ = load_model(path, dtype="int8", kv="int8")
    difference = (logits(int8, tokens) - want).norm() / want.norm()
    assert difference < 0.08
    assert load_model(path, dtype="bf16", kv="f32")[0].nbytes < 0.52 * model.nbytes


@pytest.mark.parametrize("name", ["llama2", "qwen3 tied"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_files_in_16_bits_and_shards(tmp_path, name, dtype):
    theirs = tiny_folders.build(name)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.to(dtype))
    # A copy, because the cast takes the rotary frequencies with it.
    copy.deepcopy(theirs).to(dtype).save_pretrained(tmp_path, max_shard_size="60KB")
    tiny_folders.write_tokenizer(tmp_path, tiny_folders.byte_level())
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tokens = ids(40)
    model, _, _ = load_model(tmp_path, dtype="f32", kv="f32")
    want = logits_of(theirs, tokens)
    assert (logits(model, tokens) - want).abs().max() < 1e-4 * want.abs().max()
    if dtype is torch.bfloat16:  # no weight loses anything
        half, _, _ = load_model(tmp_path, dtype="bf16", kv="f32")
        assert torch.equal(logits(half, tokens), logits(model, tokens))


def test_greedy_text_is_that_of_transformers(folder):
    path, theirs = folder("llama3")
    tokens = ids(12, seed=1)
    with torch.no_grad():
        want = theirs.generate(
            torch.tensor([tokens]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0]
    model, _, _ = load_model(path, dtype="f32", kv="f32")
    cache = model.new_cache(64)
    out = [*tokens, int(model.forward(tokens, cache, last=1).argmax())]
    while len(out) < len(want):
        out.append(int(model.forward(out[-1:], cache, last=1).argmax()))
    assert out == want.tolist()


def test_a_window_cuts_the_context(folder):
    path, _ = folder("mistral")
    model, _, _ = load_model(path, dtype="f32", context=2048)
    assert model.context == 64
    with pytest.raises(ValueError, match="room in the cache"):
        model.forward(ids(65), model.new_cache(128), last=1)


def test_stretched_by_yarn(folder):
    path, _ = folder("qwen2")
    assert HuggingFaceCheckpoint(path).config.context == 128


def test_the_ends_are_generation_configs(folder):
    path, _ = folder("llama2")
    named = path / "generation_config.json"
    before = named.read_text()
    try:
        named.write_text(json.dumps({"eos_token_id": [7, 9]}))
        with HuggingFaceCheckpoint(path) as checkpoint:
            assert {7, 9, 2} <= checkpoint.tokenizer().eos_ids
    finally:
        named.write_text(before)
