"""What is no model, budget, plan or name is refused with a typed error that says so, before any work."""

import errno
import json
import os

import pytest
import torch

import specloop
import tiny_folders
from described import edited, model, tiny_pack
from specdec_kernels import stream
from specdec_kernels.stream.newfile import NewFile
from specloop.errors import BudgetError, ModelError, OptionError
from specloop.loader import load_model
from test_loader import write


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return tiny_pack(tmp_path_factory.mktemp("layout"))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (model(qkv_bias="yes"), "qkv_bias"),
        (model(rope_theta=10**400), "rope_theta"),
        (model(rope_scaling={"rope_type": "linear", "factor": 10**400}), "factor"),
    ],
)
def test_a_pack_with_a_configuration_that_is_none(pack, tmp_path, edit, message):
    with pytest.raises(ModelError, match=message):
        load_model(str(edited(pack, tmp_path / "other.pack", edit)), context=64)


@pytest.mark.parametrize("change", ["vocab", "intermediate", "kv"])
def test_a_folder_whose_stacked_shapes_hide_a_wrong_one(tmp_path, monkeypatch, change):
    pytest.importorskip("transformers", reason="transformers writes the folders, and it is not installed")
    from safetensors.torch import load_file, save_file

    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    tiny_folders.build("llama2").to(torch.bfloat16).save_pretrained(folder)
    tiny_folders.write_tokenizer(folder, tiny_folders.byte_level(), eos_token="<|im_end|>")
    tensors = load_file(folder / "model.safetensors")
    if change == "vocab":
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:400].contiguous()
    elif change == "kv":  # 16 rows and 48 instead of 32 and 32
        k, v = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "kv")
        tensors[k], tensors[v] = tensors[k][:16].clone(), torch.cat([tensors[v], tensors[k][16:]])
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="expected shape"):
        load_model(folder, dtype="bf16", context=64, memory_budget="100MB")


def test_a_plan_of_another_pack(pack, tmp_path):
    with stream.PackWriter(tmp_path / "other") as writer:
        writer.add_block("a", {"x": torch.ones(9000)})
    with pytest.raises(ValueError, match="plan: expected one of this pack"):
        stream.WeightStream(str(tmp_path / "other"), stream.plan(str(pack)))
    with pytest.raises(TypeError, match="plan: expected a Plan, got str"):
        stream.WeightStream(str(pack), "12MB")


@pytest.mark.parametrize(
    "budget",
    ["1" * 5000 + "MB", "1." + "0" * 5000 + "MB", 10**5000, -(10**5000)],
    ids=["text", "point", "int", "minus"],
)
def test_budgets_of_more_digits_than_python_converts(pack, budget):
    with pytest.raises(stream.BudgetError, match="budget: expected bytes as a number"):
        stream.plan(str(pack), budget=budget)


def test_progress_reaches_its_end_where_nothing_is_resident(pack):
    told, least = [], stream.plan(str(pack)).minimum
    with stream.WeightStream(str(pack), stream.plan(str(pack), budget=least), progress=told.append) as opened:
        assert not opened.plan.resident and told == [1.0]


@pytest.mark.parametrize("target", [None, 5, [], b"smollm2", True])
def test_targets_that_name_nothing(pack, target):
    with pytest.raises(OptionError, match="target: expected the name or the path of a model, got"):
        specloop.load(target)
    with specloop.load(str(pack), context=64) as pair:
        if target is not None:  # nothing to exchange
            with pytest.raises(OptionError, match="target: expected"):
                pair.swap(target=target)
        assert len(pair.generate([1, 2], max_new_tokens=2).tokens) == 2


NO_FUNCTIONS = [5, True, "x", [], {}, object(), torch.ones(2)]


def test_what_is_no_function(pack):
    for value in NO_FUNCTIONS:
        with pytest.raises(OptionError, match=r"^progress: expected a function, got"):
            specloop.load(str(pack), progress=value)
    with specloop.load(str(pack), context=64) as pair:
        for value in NO_FUNCTIONS:
            with pytest.raises(OptionError, match=r"^progress: expected a function, got"):
                pair.swap(target=str(pack), progress=value)
            with pytest.raises(OptionError, match=r"^progress: expected a function, got"):
                pair.swap(draft="lookup", progress=value)
            for ask in (pair.generate, pair.stream):
                with pytest.raises(OptionError, match=r"^cancel: expected an event or a function, got"):
                    ask([1, 2], cancel=value)
        for value in ("x", [], True, -1, float("nan"), 1e300):
            with pytest.raises(OptionError, match=r"^timeout: expected a number from 0 to"):
                pair.ready(value)
        assert pair.ready(0) in (True, False) and pair.ready(60)
        assert pair.generate([1, 2], max_new_tokens=2, cancel=lambda: True).finish_reason == "cancelled"


@pytest.mark.parametrize("budget", [1, "1kB", 2**62])
def test_budgets_are_called_what_the_user_calls_them(pack, budget):
    """Too small or too large, by load and by the command line."""
    with pytest.raises(BudgetError, match=r"^memory_budget: expected at (least|most) \d+ bytes"):
        specloop.load(str(pack), context=64, memory_budget=budget).ready()


def test_a_draft_of_more_digits_than_python_writes(pack):
    with pytest.raises(OptionError, match=r"^draft: expected one of .* got an integer too long to write"):
        specloop.load(str(pack), draft=10**5000)


@pytest.mark.parametrize("name", ["k", "context", "threads"])
def test_integers_of_more_digits_than_python_writes(pack, name):
    with pytest.raises(OptionError, match=f"{name}: expected .* got an integer too long to write"):
        specloop.load(str(pack), **{name: -(10**5000)})


def test_a_budget_that_is_none_converts_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    with pytest.raises(BudgetError, match="memory_budget: expected bytes"):
        load_model(str(write(tmp_path / "tiny.gguf")), memory_budget="12x")
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_can_not_be_written(tmp_path, monkeypatch):
    source = str(write(tmp_path / "tiny.gguf"))
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))

    def full(self, data, offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(ModelError, match=r"cache folder: writing .* failed: No space"):
        patch.setattr(NewFile, "write", full)
        load_model(source, memory_budget="100MB")
    assert os.listdir(tmp_path / "cache") == []

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SPECDEC_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", homeless)
    with pytest.raises(ModelError, match=r"cache folder: .*SPECDEC_CACHE"):
        load_model(source, memory_budget="100MB")


@pytest.mark.parametrize(("name", "part"), [("\ud800", "x"), ("x", "\ud800")])
def test_names_that_no_file_can_hold(tmp_path, name, part):
    with stream.PackWriter(tmp_path / "x") as writer:
        writer.add_block("ok", {"x": torch.ones(3)})
        with pytest.raises((TypeError, ValueError), match="expected"):
            writer.add_block(name, {part: torch.ones(3)})
    stream.Pack.open(tmp_path / "x").close()
