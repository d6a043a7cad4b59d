"""A model over a pack: the same logits, bit for bit, as with all weights in memory, whatever the budget."""

import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import specloop
from specdec_kernels import stream
from specloop import convert as converting
from specloop.cli import describe
from specloop.convert import cached_pack, convert
from specloop.errors import BudgetError, FormatError, ModelError, OptionError, WeightsError
from specloop.formats.gguf_checkpoint import GGUFCheckpoint
from specloop.loader import load_model
from specloop.models.blueprint import Matrix, Source
from specloop.models.buffers import needs
from test_loader import TOKENS, write
from tiny_llama import CONFIG


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Packs of these tests are kept with them."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def source(tmp_path, request):
    return str(write(tmp_path / "tiny.gguf", tied=request.param))


def packed(source, dtype="int8"):
    with GGUFCheckpoint(source) as checkpoint:
        return str(cached_pack(checkpoint, dtype=dtype))


def smallest(path, kv="int8", context=64):
    """The smallest budget of a model over the pack."""
    with stream.Pack.open(path) as pack:
        return stream.plan(pack, reserved=needs(CONFIG, kv=kv, context=context)).minimum


def all_weights(path):
    with stream.Pack.open(path) as pack:
        return sum(pack.blocks[i].nbytes for i in pack.order)


def logits(model, tokens, cache=None, last=None):
    cache = cache or model.new_cache()
    return model.forward(tokens, cache, last=len(tokens) if last is None else last).clone()


@pytest.mark.parametrize("dtype", ["int8", "bf16", "f32"])
@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_logits_are_those_of_the_resident_model(source, dtype, share):
    resident, _, _ = load_model(source, dtype=dtype, context=64)
    path = packed(source, dtype)
    least = smallest(path)
    budget = int(least + share * (all_weights(path) + 10000))
    streamed, tokenizer, _ = load_model(path, dtype=dtype, context=64, memory_budget=budget)
    assert streamed.streams == (share < 1.0) and tokenizer.vocab_size == CONFIG.vocab
    assert streamed.nbytes <= budget and streamed.eos_ids == resident.eos_ids
    for _ in range(3):  # the slots go round
        assert torch.equal(logits(streamed, TOKENS), logits(resident, TOKENS))
    a, b = resident.new_cache(), streamed.new_cache()
    for n in (1, 5, 0, 2, 16, 17):  # passes that are captured and passes that are not, with and without a head
        tokens = [(7 * i + n) % CONFIG.vocab for i in range(n)]
        for last in {0, min(1, n), n}:
            a.truncate(a.length), b.truncate(b.length)
            length = a.length
            assert torch.equal(logits(streamed, tokens, b, last), logits(resident, tokens, a, last))
            a.truncate(length), b.truncate(length)
    streamed.close()


def test_a_pass_reads_every_streamed_byte_once_whatever_its_rows(source):
    path = packed(source)
    model, _, _ = load_model(path, context=64, memory_budget=smallest(path))
    weights, seen = model.weights.stream, set()
    for rows in (1, 2, 9, 16, 33):
        before = weights.stats
        logits(model, [3] * rows, last=1)
        seen.add(weights.stats.streamed_bytes - before.streamed_bytes)
    assert seen == {weights.plan.bytes_per_pass} and weights.stats.active
    model.close()


def test_generate_gives_the_same_text(source):
    plain = specloop.load(source, context=64).generate([1, 2, 3, 1, 2, 3], max_new_tokens=20)
    pair = specloop.load(source, context=64, memory_budget=smallest(packed(source)) + 5000)
    result = pair.generate([1, 2, 3, 1, 2, 3], max_new_tokens=20)
    assert pair.model.streams and (result.tokens, result.finish_reason) == (plain.tokens, plain.finish_reason)


def test_converting_once_is_enough(source, monkeypatch):
    path = packed(source)
    monkeypatch.setattr(converting, "convert", None)
    assert packed(source) == path
    os.utime(source, ns=(0, 0))  # another file, as far as one can tell
    with pytest.raises(TypeError):
        packed(source)


def test_the_cache_folder_is_the_users_own(source, cache, monkeypatch, tmp_path):
    monkeypatch.delenv("SPECDEC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    path = packed(source)
    assert path.startswith(str(tmp_path / "xdg")) and os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]


def test_budgets_that_can_not_be_kept(source):
    path = packed(source)
    least = smallest(path)
    with pytest.raises(BudgetError, match=f"expected at least {least} bytes"):
        load_model(path, context=64, memory_budget=least - 1)
    load_model(path, context=64, memory_budget=least)[0].close()
    for budget in ("12x", 0, -5, "0", 1 << 60, "-1MB", ""):
        with pytest.raises((BudgetError, OptionError), match="budget"):
            load_model(path, context=64, memory_budget=budget)
    with pytest.raises(OptionError, match="memory_budget"):
        specloop.load(path, memory_budget=1.5)


def test_a_changed_file_ends_the_text_with_an_error(source):
    path = packed(source)
    pair = specloop.load(path, context=64, memory_budget=smallest(path), draft="none")
    assert len(pair.generate([1, 2, 3], max_new_tokens=4).tokens)
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    with pytest.raises(WeightsError, match="changed"):
        pair.generate([1, 2, 3], max_new_tokens=4)


def test_packs_of_another_kind(source, tmp_path):
    with pytest.raises(ModelError, match=r"holds int8, got 'f32'"):
        load_model(packed(source), dtype="f32")
    with stream.PackWriter(tmp_path / "other.pack", {"form": 99}) as out:
        out.add_block("layer.0", {"x": torch.ones(3)})
    with pytest.raises(FormatError, match="form 99"):
        load_model(str(tmp_path / "other.pack"))
    (tmp_path / "text.txt").write_text("no weights at all")
    with pytest.raises(FormatError):
        load_model(str(tmp_path / "text.txt"))


def test_convert_leaves_nothing_behind_when_it_fails(source, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    folder.mkdir()

    def fail(self, part, weight):
        raise KeyboardInterrupt

    monkeypatch.setattr(converting.Filler, "fill", fail)
    with GGUFCheckpoint(source) as checkpoint, pytest.raises(KeyboardInterrupt):
        convert(checkpoint, folder / "x.pack")
    assert os.listdir(folder) == []


@pytest.mark.parametrize("kv", ["int8", "f16", "f32"])
def test_needs_are_what_is_allocated(source, kv):
    model, _, _ = load_model(source, kv=kv, context=100)
    cache = model.new_cache(100)
    told = needs(CONFIG, kv=kv, context=100)
    taken = sum(t[cache.pages].nbytes for layer in cache.pool.layers for t in layer if t is not None)
    assert taken <= told["kv"] == cache.nbytes == cache.pool.page_nbytes * 2 and told["kv"] - taken < 2 * 4096
    assert told["logits"] == model._logits.nbytes
    buffers = sum(t.nbytes for t in (*vars(model._buffers).values(), model._rotary))
    assert buffers <= told["workspace"] < 1.5 * buffers


@pytest.mark.parametrize("dtype", ["int8", "bf16"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_larger_than_a_layer_comes_in_parts(tmp_path, tied, dtype):
    """Its norm belongs to the first part alone, and each part has its columns of the logits."""
    config = replace(CONFIG, vocab=3000, layers=2)
    source = str(write(tmp_path / "wide.gguf", tied=tied, config=config))
    tokens = [2, 2999, 1500, 7]
    want = logits(load_model(source, dtype=dtype, context=64)[0], tokens)
    path = packed(source, dtype)
    with stream.Pack.open(path) as pack:
        parts = [pack.blocks[block].parts[part].shape[0] for block, part in pack.matrices["head"]]
        least = stream.plan(pack, reserved=needs(config, kv="int8", context=64)).minimum
    assert len(parts) > 3 and sum(parts) == 3000
    for budget in (least, least + 100_000, None):
        model, _, _ = load_model(path, dtype=dtype, context=64, memory_budget=budget)
        for last in (4, 1):
            assert torch.equal(logits(model, tokens, last=last), want[-last:])
        model.close()


def test_rows_of_a_matrix_that_is_cut():
    a, b = Source("a", 5), Source("b", 6)
    cut = lambda **ends: [(source.name, *rows) for source, *rows in Matrix(8, [a, b], **ends).pieces(3)]
    assert cut() == [("a", 0, 3), ("a", 3, 5), ("b", 0, 3), ("b", 3, 6)]
    assert cut(first=4, stop=9) == [("a", 4, 5), ("b", 0, 3), ("b", 3, 4)] and cut(first=6, stop=7) == [("b", 1, 2)]


def test_info_tells_all_weights_from_those_in_memory(source):
    path = packed(source)
    with specloop.load(path, context=64) as pair:
        report = describe(pair)
        assert report["weights_bytes"] == report["weights_in_memory_bytes"] == all_weights(path)
    with specloop.load(path, context=64, memory_budget=smallest(path)) as pair:
        report = describe(pair)
        assert report["weights_bytes"] == all_weights(path) > report["weights_in_memory_bytes"] == pair.model.nbytes


DECODER = """
import sys
import torch, tokenizers
torch.mm(torch.ones(64, 64), torch.ones(64, 64))
if len(sys.argv) > 1:
    import specloop
    pair = specloop.load(sys.argv[1], draft="none", context=512)
    pair.generate("Write one sentence about the sea.", max_new_tokens=8)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="needs /proc/self/smaps_rollup")
def test_a_second_decoder_shares_the_weights(smollm2):
    """Its private pages, over those of a process with torch and tokenizers, are less than 15 % of the weights."""
    with ExitStack() as running:

        def started(*arguments):
            process = subprocess.Popen(
                [sys.executable, "-c", DECODER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            running.callback(process.wait)
            running.callback(process.stdin.close)
            running.callback(process.stdout.close)
            assert process.stdout.readline() == "ready\n"
            return process.pid

        def private(pid):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))

        path = packed(smollm2)
        started()
        started(path)
        assert private(started(path)) - private(started()) < 0.15 * all_weights(path)
