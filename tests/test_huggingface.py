"""Folders as Hugging Face has them, built byte by byte: what is malformed is refused by name, before any compute."""

import gc
import json
import os
import random
import struct

import pytest
import torch

import pack_bytes as pb
import tiny_folders
from specloop.errors import FormatError, ModelError, SpecloopError
from specloop.formats.huggingface import HuggingFaceCheckpoint
from specloop.loader import load_model
from specloop.models.blueprint import Blueprint

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 416, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True, "eos_token_id": 2,
}  # fmt: skip
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FORMATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


def tensors(seed=0, tag="F32"):
    """name -> (tag, tensor)"""
    g = torch.Generator().manual_seed(seed)
    shapes = {EMBEDDING: (416, 32), "model.norm.weight": (32,)}
    for i in range(2):
        at = f"model.layers.{i}."
        shapes |= {f"{at}{name}_layernorm.weight": (32,) for name in ("input", "post_attention")}
        shapes |= {
            f"{at}self_attn.{name}_proj.weight": (rows, 32) for name, rows in zip("qkvo", (32, 16, 16, 32), strict=True)
        }
        shapes |= {f"{at}mlp.{name}_proj.weight": (48, 32) for name in ("gate", "up")}
        shapes[f"{at}mlp.down_proj.weight"] = (32, 48)
    return {name: (tag, torch.randn(shape, generator=g).to(FORMATS[tag])) for name, shape in shapes.items()}


def shard(named):
    header, _ = pb.entries([(name, tag, value.shape) for name, (tag, value) in named.items()])
    return pb.raw(header, b"".join(bytes(value.reshape(-1).view(torch.uint8).tolist()) for _, value in named.values()))


def write(folder, named, *, config=CONFIG, shards=1, index=None):
    """The folder's files; ``index`` (dict) replaces the true one."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tiny_folders.write_tokenizer(folder, TOKENIZER, eos_token="<|im_end|>", chat_template="{{ messages }}")
    if shards == 1:
        (folder / "model.safetensors").write_bytes(shard(named))
        return folder
    names, where = list(named), {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = names[i::shards]
        (folder / file).write_bytes(shard({name: named[name] for name in part}))
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where if index is None else index}))
    return folder


TOKENIZER = tiny_folders.byte_level()


@pytest.fixture
def good(tmp_path):
    return write(tmp_path / "good", tensors(), shards=3)


def opened(path):
    with HuggingFaceCheckpoint(path) as checkpoint:
        return Blueprint(checkpoint, "f32")


def refused(path, message, error=ModelError):
    with pytest.raises(error, match=message) as caught:
        opened(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("tag", ["F32", "BF16", "F16"])
def test_b19_weights_of_every_float(tmp_path, tag):
    named = tensors(tag=tag)
    with HuggingFaceCheckpoint(write(tmp_path / "m", named)) as checkpoint:
        assert set(checkpoint.names()) == set(named)
        for name, (_, value) in named.items():
            assert checkpoint.shape(name) == tuple(value.shape) and checkpoint.nbytes(name) == value.nbytes
            assert torch.equal(checkpoint.read(name).view(value.shape), value.float())
            if value.dim() == 2:
                assert torch.equal(checkpoint.read_rows(name, 3, 15), value[3:15].float())
                assert checkpoint.read_rows(name, 5, 5).shape == (0, value.shape[1])
        with pytest.raises(ValueError, match="rows: expected 0 <= start"):
            checkpoint.read_rows(EMBEDDING, 3, 417)


@pytest.mark.parametrize("tag", ["I8", "F8_E4M3", "F64", "I32"])
def test_b19_other_types_are_refused(tmp_path, tag):
    named = tensors()
    name = "model.layers.1.mlp.up_proj.weight"
    dtype = pb.TAGS[tag][0]
    named[name] = tag, named[name][1].to(dtype)
    refused(write(tmp_path / "m", named), "up_proj.weight'?: expected float32, bfloat16 or float16, got")


def test_b15_ties(tmp_path):
    named = tensors()
    head = {HEAD: named[EMBEDDING]}
    other = {HEAD: ("F32", named[EMBEDDING][1].clone())}
    other[HEAD][1][300, 5] += 1
    untied = CONFIG | {"tie_word_embeddings": False}
    # Tied and missing, tied and equal, tied and only the head there: one matrix.
    only_head = head | {name: value for name, value in named.items() if name != EMBEDDING}
    for i, (case, config) in enumerate([(named, CONFIG), (named | head, CONFIG), (only_head, CONFIG)]):
        plan = opened(write(tmp_path / f"tied {i}", case, config=config))
        assert plan.tied and plan.config.tied and plan.head is plan.embedding
    # Tied and different: an error that names the row. It is not told which of the two the model was trained with.
    refused(write(tmp_path / "different", named | other), "tie_word_embeddings, but .* differ in row 300")
    shorter = {HEAD: ("F32", named[EMBEDDING][1][:-1])}
    refused(write(tmp_path / "shorter", named | shorter), "differ in row 0")
    # Not tied: both, or an error.
    plan = opened(write(tmp_path / "untied", named | other, config=untied))
    assert not plan.tied and plan.head is not plan.embedding
    refused(write(tmp_path / "no head", named, config=untied), "lm_head.weight: missing, but config.json does not say")
    no_embedding = {name: value for name, value in named.items() if name != EMBEDDING} | head
    refused(write(tmp_path / "neither", no_embedding, config=untied), "model.embed_tokens.weight: missing")


def test_b15_equal_heads_give_the_same_logits(tmp_path):
    named = tensors()
    outputs = []
    for name, more in (("a", {}), ("b", {HEAD: named[EMBEDDING]})):
        model, _, _ = load_model(write(tmp_path / name, named | more), dtype="f32", kv="f32")
        outputs.append((model.nbytes, model.forward([5, 6, 7], model.new_cache(3), last=3).clone()))
    assert outputs[0][0] == outputs[1][0] and torch.equal(outputs[0][1], outputs[1][1])


def test_b16_buffers_that_are_computed(tmp_path):
    """Old files hold rotary frequencies; they are computed here, and what the file says about them is not used."""
    named = tensors()
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", torch.full((4,), 7.0))}
    with HuggingFaceCheckpoint(write(tmp_path / "m", named | buffer)) as checkpoint:
        assert set(checkpoint.names()) == set(named)


def test_c34_missing_shards(good):
    os.unlink(good / "model-00002-of-00003.safetensors")
    refused(good, r"missing: 'model-00002-of-00003\.safetensors'", FormatError)


def test_c35_a_lying_index(good):
    index = good / "model.safetensors.index.json"
    told = json.loads(index.read_text())["weight_map"]
    other = next(file for file in told.values() if file != told[EMBEDDING])
    index.write_text(json.dumps({"weight_map": told | {EMBEDDING: other}}))
    refused(good, f"'{EMBEDDING}' is in '{other}'; it is in", FormatError)
    index.write_text(json.dumps({"weight_map": told | {"model.norm.bias": other}}))
    refused(good, "'model.norm.bias' is in .*nowhere", FormatError)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..\\x.safetensors", "x\0.safetensors", 7, ""]
)
def test_a_path_in_the_index(good, name):
    index = good / "model.safetensors.index.json"
    told = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": told | {EMBEDDING: name}}))
    refused(good, "weight_map: expected", FormatError)


def test_pickle_checkpoints(tmp_path):
    folder = write(tmp_path / "m", tensors())
    os.rename(folder / "model.safetensors", folder / "pytorch_model.bin")
    refused(folder, "pickle files, which are not read", FormatError)
    (folder / "model.safetensors").write_bytes(b"PK\x03\x04" + bytes(100))
    refused(folder, "only safetensors are read", FormatError)


@pytest.mark.parametrize("left", [0, 7, 100, -1, -4095])
def test_c24_truncated(tmp_path, left):
    folder = write(tmp_path / "m", tensors())
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(left if left >= 0 else os.path.getsize(folder / "model.safetensors") + left)
    refused(folder, "model.safetensors: .*truncated", FormatError)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"model.layers.0.self_attn.q_proj.bias": (32,)}, "q_proj.bias'?: no llama of this configuration has it"),
        ({"model.layers.0.self_attn.q_norm.weight": (8,)}, "no llama of this configuration"),
        ({"model.layers.0.mlp.up_proj.weight_scale": (1,)}, "no llama of this configuration"),
        ({"model.layers.2.mlp.up_proj.weight": (48, 32)}, "the configuration says that the model has 2 layers"),
        ({"something": (1,)}, "no llama of this configuration"),
        ({"model.norm.weight": (33,)}, r"model.norm.weight: expected shape \[32\], got \[33\]"),
        ({"model.layers.1.mlp.up_proj.weight": (47, 32)}, r"up_proj.weight: expected shape \[48, 32\], got \[47, 32\]"),
        ({"model.layers.1.mlp.up_proj.weight": (48 * 32,)}, r"up_proj.weight: expected shape \[48, 32\]"),
    ],
)
def test_tensors_that_do_not_fit_the_configuration(tmp_path, more, message):
    named = tensors() | {name: ("F32", torch.ones(shape)) for name, shape in more.items()}
    refused(write(tmp_path / "m", named), message)


def test_a_missing_tensor(tmp_path):
    named = tensors()
    del named["model.layers.1.self_attn.k_proj.weight"]
    refused(write(tmp_path / "m", named), "model.layers.1.self_attn.k_proj.weight: missing from the files")


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"hidden_size": None}, "hidden_size: expected an integer"),
        ({"hidden_size": "32"}, "hidden_size: expected an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers: expected an integer"),
        ({"num_attention_heads": 5}, "num_attention_heads: expected a divisor of 32"),
        ({"num_key_value_heads": 3}, "multiple of kv_heads"),
        ({"head_dim": 7}, "even head dimension"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu'"),
        ({"mlp_bias": True}, "mlp_bias: expected false"),
        ({"attention_bias": True}, "attention_bias: expected false"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: expected none"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: expected a number"),
        ({"rms_norm_eps": 1e300}, "rms_eps from 0 to 1, got"),
        ({"rope_theta": 1e300}, "rope_theta from 1 to"),
        ({"rope_theta": 0}, "rope_theta: expected at least 1"),
        ({"rope_theta": 1e400}, "rope_theta: expected a number"),
        ({"rope_scaling": []}, "rope_scaling: expected an object"),
        ({"rope_scaling": {"type": "longrope"}}, "type 'longrope' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "expected factor for type 'linear', got no factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor: expected a positive number"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "low_freq_factor below high_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"beta": 1.0}}, "also beta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1"),
        ({"vocab_size": 100}, "at most 100 tokens"),
        ({"vocab_size": 10**12}, "vocab_size: expected"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window: expected an integer of at least 1"),
        ({"model_type": "mistral", "num_key_value_heads": None}, "num_key_value_heads: expected an integer"),
    ],
)
def test_configurations_that_can_not_be_served(tmp_path, change, message):
    refused(write(tmp_path / "m", tensors(), config=CONFIG | change), message)


def test_configurations_in_older_spellings(tmp_path):
    """rope_theta on its own, "type" for "rope_type", null for what is absent, a window that is not used."""
    config = CONFIG | {
        "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}, "quantization_config": None,
        "sliding_window": 5,
    }  # fmt: skip
    found = opened(write(tmp_path / "a", tensors(), config=config)).config
    assert (found.rope_theta, found.rope_scaling["factor"], found.sliding_window, found.context) == (5e5, 2.0, None, 64)
    found = opened(write(tmp_path / "b", tensors(), config=CONFIG | {"rope_scaling": None})).config
    assert (found.rope_theta, found.rope_scaling) == (1e4, None)
    config = CONFIG | {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 16}}
    assert opened(write(tmp_path / "c", tensors(), config=config)).config.rope_scaling["factor"] == 8
    config = CONFIG | {"rope_scaling": {"type": "dynamic", "factor": 4.0}}  # plain as far as it goes
    assert opened(write(tmp_path / "d", tensors(), config=config)).config.context == 64


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "config.json: no such file; expected a folder"),
        ("config.json", b"{", "config.json: not valid JSON"),
        ("config.json", b"[]", "config.json: expected an object"),
        ("config.json", b"\xff{}", "config.json: not UTF-8 at byte 0"),
        ("config.json", b"[" * 100_000, "config.json: not valid JSON"),
        ("config.json", b" " * (9 << 20), "config.json: larger than"),
        ("tokenizer.json", None, "tokenizer.json: no such file .*SentencePiece"),
        ("tokenizer.json", b"{}", "tokenizer.json"),
        ("tokenizer_config.json", b'{"eos_token": 5}', "eos_token: expected a text"),
        ("tokenizer_config.json", b'{"chat_template": 5}', "chat_template: expected a text"),
        ("generation_config.json", b'{"eos_token_id": "x"}', "eos_token_id: expected an id"),
        ("generation_config.json", b"nothing", "generation_config.json: not valid JSON"),
    ],
)
def test_malformed_files(tmp_path, file, content, message):
    folder = write(tmp_path / "m", tensors())
    os.unlink(folder / file) if content is None else (folder / file).write_bytes(content)
    refused(folder, message)


def test_what_is_optional(tmp_path):
    folder = write(tmp_path / "m", tensors())
    os.unlink(folder / "tokenizer_config.json")
    with HuggingFaceCheckpoint(folder) as checkpoint:
        assert checkpoint.chat_template is None and checkpoint.tokenizer().eos_ids == {0, 2}


def test_chat_templates(tmp_path):
    folder = write(tmp_path / "m", tensors())
    assert HuggingFaceCheckpoint(folder).chat_template == "{{ messages }}"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert HuggingFaceCheckpoint(folder).chat_template == "yes"
    (folder / "chat_template.jinja").write_text("from a file of its own")
    assert HuggingFaceCheckpoint(folder).chat_template == "from a file of its own"


def test_c28_files_that_change_while_they_are_read(tmp_path):
    folder = write(tmp_path / "m", tensors())
    with HuggingFaceCheckpoint(folder) as checkpoint:
        before = checkpoint.identity()
        os.rename(folder / "model.safetensors", folder / "old")  # still there under another name
        checkpoint.read_rows(EMBEDDING, 0, 5)
        with open(folder / "old", "r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(struct.pack("<f", 1.0))
        os.utime(folder / "old", ns=(1, 1))
        with pytest.raises(FormatError, match="changed while it was open"):
            checkpoint.read_rows(EMBEDDING, 0, 5)
    os.rename(folder / "old", folder / "model.safetensors")
    with HuggingFaceCheckpoint(folder) as checkpoint:
        assert checkpoint.identity() != before
        os.truncate(folder / "model.safetensors", 5000)
        with pytest.raises(FormatError, match=r"cut while it was open|changed while it was open"):
            checkpoint.read("model.norm.weight")


def test_identity_is_of_all_files(tmp_path):
    folder = write(tmp_path / "m", tensors())
    identity = lambda: HuggingFaceCheckpoint(folder).identity()
    first = identity()
    assert identity() == first
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    assert identity() != first


def test_nothing_stays_open(good):
    gc.collect()  # what earlier tests left would go in between
    open_files = lambda: len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    before = open_files()
    opened(good)
    (good / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 3}))
    refused(good, "missing")
    (good / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": False}))
    refused(good, "missing")
    assert open_files() == before


def test_mutated_folders(good, tmp_path):
    """Each mutated folder opens or is refused with one of our errors."""
    rng, reasons = random.Random(5), {}
    files = ("config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json")
    original = {file: (good / file).read_bytes() for file in files}
    odd = (
        b"{",
        b"}",
        b'"',
        b"[",
        b"null",
        b"-1",
        b"1e999",
        b"\xff",
        b"99999999999999999999",
        b"true",
        b",",
        b"\\ud800",
    )
    for _ in range(250):
        file = rng.choice(files)
        data = bytearray(original[file])
        for _ in range(rng.choice((1, 1, 2, 5))):
            at, length = rng.randrange(len(data)), rng.choice((0, 1, 1, 4, 20))
            data[at : at + length] = rng.choice((b"", bytes([rng.randrange(256)]), *odd))
        (good / file).write_bytes(data)
        try:
            opened(good)
            reason = "opened"
        except SpecloopError as error:
            reason = str(error).partition(": ")[2][:20]
        reasons[reason] = reasons.get(reason, 0) + 1
        (good / file).write_bytes(original[file])
    assert len(reasons) > 10 and reasons["opened"] > 5, reasons
