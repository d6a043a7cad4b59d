"""A feature head as a pair's draft: the same text as without, whatever it guesses and whatever happens meanwhile."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specloop.costs import CostCurve
from specloop.draft_loader import load_draft
from specloop.drafts.lookup import LookupDraft
from specloop.drafts.model import LEAST_REACH
from specloop.errors import FormatError, OptionError
from specloop.formats.draft_file import DraftFile
from specloop.pair import Pair
from specloop.session import make_controller, make_draft
from specloop.stage import opener
from specloop.versions import Version
from tiny_drafts import CUT, draft_config, write
from tiny_llama import CONFIG, build
from versions import PROMPT, Vocabulary, alone, parts

LONG = [(11 * i + 3) % CONFIG.vocab for i in range(150)]
OPENED = {"dtype": "int8", "kv": "int8", "context": 256, "device": "cpu", "threads": None, "memory_budget": None}


@pytest.fixture(autouse=True)
def no_lookup(monkeypatch):
    """A pair's draft is a lookup with the model behind it; here the model always has its turn."""
    monkeypatch.setattr(LookupDraft, "outlook", lambda self: (0, 0))
    monkeypatch.setattr("specloop.drafts.model.SLOW_SECONDS", 60.0)  # other work on the machine is no fault


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("drafts")


@pytest.fixture(scope="module")
def path(folder):
    """A head for the target with seed 1."""
    write(folder / "head.safetensors", build(seed=1))
    return str(folder / "head.safetensors")


def pair_with(draft, seed=1, k=3, **options):
    return Pair(parts(seed), draft=draft, k=k, opened=opener(**OPENED | options))


def knowing(pair, prompt, right=lambda i: True, tokens=60, seed=1):
    """Makes the pair's head guess the text that follows the prompt, where ``right(position)`` and it has a word for it.

    Its passes are as ever, and are noted: (first position, rows, features given). What they say from true features is
    compared with a head that reads the whole text from its beginning.
    """
    pair.ready()
    text = [*prompt, *alone(seed, prompt, tokens)]
    target = build(seed=seed)
    cache = target.new_cache(features=True)
    target.forward(text, cache, last=0)
    head = load_draft(pair.draft_name, Version(target, Vocabulary(), None, "again"), kv="int8", context=256)[0]
    fresh = head.new_cache()
    fresh.given = cache.features, len(text)
    want = head.forward(text, fresh, last=len(text)).clone()

    model, fed = pair._draft.version.model, []
    forward = model.forward

    def told(tokens, cache, *, last):
        start, reach = cache.length, cache.given[1]
        logits = forward(tokens, cache, last=last)
        fed.append((start, len(tokens), reach))
        for row, p in enumerate(range(cache.length - last, cache.length)):
            if p <= reach:
                assert torch.equal(logits[row], want[p]), f"position {p}"
            if p + 1 < len(text) and text[p + 1] in CUT and right(p + 1):
                logits[row, CUT.index(text[p + 1])] += 1000
        return logits

    model.forward, model.guesses = told, None  # so that every pass comes by
    return fed


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("prompt", [[7], PROMPT, LONG], ids=len)
def test_text_is_that_of_plain_decoding(path, prompt, k):
    with pair_with(path, k=k) as pair:
        result = pair.generate(prompt, max_new_tokens=40)
        counts = result.stats.speculation
        assert result.tokens == alone(1, prompt, 40) and counts.proposed and counts.faults == []
        assert set(counts.by_source) == {"feature"} and pair.draft == path
        assert not any(seat.nbytes for seat in pair._draft.seats())


@pytest.mark.parametrize("tree", [None, 1, 4, 9])
@pytest.mark.parametrize("prompt", [[22], PROMPT, LONG], ids=len)
def test_what_is_accepted(path, prompt, tree):
    """Guesses become text, with the rows that the head would have made of the text from its beginning."""
    with pair_with(path, k=4) as pair:
        knowing(pair, prompt, lambda i: i % 7)
        counts = pair.generate(prompt, max_new_tokens=50, tree=tree).stats.speculation
        assert counts.accepted > 10 and counts.faults == []
        assert pair.generate(prompt, max_new_tokens=50, tree=tree).tokens == alone(1, prompt, 50)


def test_rows_with_true_features_stay_and_guesses_are_made_anew(path):
    """Per round one pass for what was committed, which makes the first guess, and one per guess after it."""
    with pair_with(path, k=4) as pair:
        fed = knowing(pair, LONG, lambda i: i % 5)
        counts = pair.generate(LONG, max_new_tokens=41).stats.speculation
    assert fed[0] == (0, len(LONG) - 1, len(LONG) - 1)  # the prompt, once the target has read it
    first = [entry for entry in fed[1:] if entry[0] + entry[1] == entry[2] + 1]
    at = len(LONG) - 1
    for start, count, reach in first:
        assert start == at and reach == at + count - 1
        at += count
    guesses = [entry for entry in fed[1:] if entry not in first]
    assert all(count == 1 and start > reach for start, count, reach in guesses)
    drafted = sum(k > 0 for k in counts.k_history)
    assert len(first) == drafted and len(guesses) == counts.proposed - drafted and counts.accepted


@pytest.mark.parametrize("tree", [1, 4, 9])
def test_trees(path, tree):
    with pair_with(path, k=3) as pair:
        for prompt in ([7], PROMPT, LONG):
            result = pair.generate(prompt, max_new_tokens=40, tree=tree, max_fallbacks=99)
            counts = result.stats.speculation
            assert result.tokens == alone(1, prompt, 40) and counts.proposed > 30 and counts.faults == []


def test_a_tree_that_the_cache_does_not_keep(path, monkeypatch):
    """Where a tree is judged path by path the target forgets it: a round without drafts, then it is known again."""
    with pair_with(path, k=3) as pair:
        monkeypatch.setattr(type(pair.pressure), "fits", lambda *_: False)
        counts = pair.generate(PROMPT, max_new_tokens=40, tree=4).stats.speculation
        assert counts.faults == [] and counts.proposed
        assert pair.generate(PROMPT, max_new_tokens=40, tree=4).tokens == alone(1, PROMPT, 40)


def test_batches(path):
    prompts, tokens = [PROMPT, LONG, [9] * 20, [7]], [24, 9, 30, 17]
    with pair_with(path) as pair:
        for tree in (None, 5):
            each = [{"max_new_tokens": n} for n in tokens]
            results = pair.generate_batch(prompts, each=each, tree=tree)
            for result, prompt, n in zip(results, prompts, tokens, strict=True):
                assert result.tokens == alone(1, prompt, n) and result.stats.speculation.proposed
                assert result.stats.speculation.faults == []
        found = {}
        work = lambda i: found.update({i: pair.generate(prompts[i], max_new_tokens=24).tokens})
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[i] for i in range(4)] == [alone(1, prompt, 24) for prompt in prompts]


def test_requests_without_it_keep_no_features(path):
    with pair_with(path) as pair:
        size = pair.model.cache_nbytes(64)
        for options, features in (
            ({}, True),
            ({"draft": "none"}, False),
            ({"draft": "lookup"}, False),
            ({"k": 0}, False),
        ):
            stream = pair.stream(PROMPT, max_new_tokens=60, **options)
            next(stream)
            (seat,) = [seat for seat in pair.place.seats() if seat.nbytes]
            assert (seat.features[0] is not None) == features
            assert seat.nbytes == size + features * 2 * CONFIG.hidden * seat.capacity
            stream.close()


def test_sampled_text_depends_on_the_seed_alone(path):
    for k in (2, "auto"):
        texts = []
        for _ in range(2):
            with pair_with(path, k=k) as pair:
                options = {"temperature": 1.0, "max_new_tokens": 30}
                texts += [pair.generate(PROMPT, seed=s, **options).tokens for s in (1, 1, 2)]
        assert texts[0] == texts[1] == texts[3] == texts[4] != texts[2] == texts[5]


def test_the_rounds_tell_what_a_guess_costs(path):
    """A pass behind one of the target's takes longer than one behind its like; the controller is told."""
    with pair_with(path, k="auto") as pair:
        pair.ready()
        pair._target.version.costs = CostCurve([0.01 + 0.0001 * n for n in range(16)])
        pair._draft.version.costs = CostCurve([0.0005, 0.0006])
        model, forward = pair._draft.version.model, pair._draft.version.model.forward

        def slow(*args, **options):
            time.sleep(0.004)
            return forward(*args, **options)

        model.forward = slow
        before = pair.draft_cost
        pair.generate(PROMPT, max_new_tokens=40, k=2, max_fallbacks=99)
        assert pair.draft_cost > 3 * before
        options, follows = pair._checked({})
        auto = make_controller(pair, options, make_draft(pair, options, 64, follows, pair.seat(64)))
        assert auto.draft_cost == pair.draft_cost / pair.costs[0]
        options, follows = pair._checked({"temperature": 1.0, "seed": 1})
        steady = make_controller(pair, options, make_draft(pair, options, 64, follows, pair.seat(64)))
        assert steady.draft_cost == pair.nominal_costs[1] == model.weights_nbytes / pair.model.weights_nbytes


def test_confidence_ends_chains(path):
    with pair_with(path, k=8) as pair:
        lengths = [
            pair.generate(PROMPT, max_new_tokens=40, confidence=c).stats.speculation.mean_draft_length
            for c in (0.0, 0.3, 1.0)
        ]
        assert lengths[0] > lengths[1] >= lengths[2] and lengths[2] <= 1


def test_an_automatic_k_is_shortened_by_doubt(path):
    with pair_with(path) as pair:
        pair.ready()
        for given, reach in (({"k": "auto"}, LEAST_REACH), ({"k": 3}, 0.0)):
            options, follows = pair._checked(given)
            draft = make_draft(pair, options, 64, follows, pair.seat(64)).draft.drafts[-1]
            assert draft.name == "feature" and draft.reach == reach


def test_a_head_that_fails_costs_a_round(path):
    with pair_with(path) as pair:
        pair.ready()
        model = pair._draft.version.model
        forward, calls = model.forward, []

        def failing(*args, **options):
            calls.append(args)
            if len(calls) in (5, 6):
                raise RuntimeError("boom")
            return forward(*args, **options)

        model.forward = failing
        counts = pair.generate(PROMPT, max_new_tokens=40, max_fallbacks=99).stats.speculation
        assert 1 <= len(counts.faults) <= 2 and counts.off_reason is None and counts.proposed
        assert pair.generate(PROMPT, max_new_tokens=40).tokens == alone(1, PROMPT, 40)


def test_a_text_longer_than_the_drafts_context(folder):
    target = build(seed=1)
    write(folder / "short.safetensors", target, config=draft_config(context=64))
    with pair_with(str(folder / "short.safetensors"), k=4) as pair:
        result = pair.generate(PROMPT, max_new_tokens=100)
        counts = result.stats.speculation
        assert result.tokens == alone(1, PROMPT, 100) and counts.faults == []
        assert max(counts.k_history[:8]) == 4 and set(counts.k_history[-30:]) == {0}


# ---- whose it is -----------------------------------------------------------------------------------------------------


def test_another_targets_head_is_refused(path):
    with pair_with(path, seed=2) as pair, pytest.raises(OptionError, match=r"^draft: expected one for model") as caught:
        pair.ready()
    told = DraftFile.open(path).target["fingerprint"]
    assert told in str(caught.value) and str(caught.value).count("(") == 2


@pytest.mark.parametrize("kind", ["feature", "model"])
def test_another_vocabulary_is_refused(folder, kind):
    write(folder / "other.safetensors", build(seed=1), kind=kind, tokenizer=Vocabulary("other"))
    with (
        pair_with(str(folder / "other.safetensors")) as pair,
        pytest.raises(OptionError, match=r"draft: expected one with the vocabulary of model \(tiny\), .*\(other\)"),
    ):
        pair.ready()


def test_a_target_without_hidden_states(path):
    class Bare:
        vocab_size, context, eos_ids = CONFIG.vocab, 64, frozenset()

    with pytest.raises(OptionError, match="reads its target's hidden states, and bare is one without"):
        load_draft(path, Version(Bare(), Vocabulary(), None, "bare"), kv="int8", context=64)


def test_models_in_draft_files_fit_every_target_of_the_vocabulary(folder):
    """Of several layers, narrower than the target, with a cut vocabulary."""
    config = draft_config(hidden=48, heads=3, kv_heads=1, intermediate=64)
    config = replace(config, layers=2)
    write(folder / "model.safetensors", build(seed=5), kind="model", config=config)
    with pair_with(str(folder / "model.safetensors")) as pair:
        result = pair.generate(PROMPT, max_new_tokens=40)
        assert result.tokens == alone(1, PROMPT, 40) and set(result.stats.speculation.by_source) == {"model"}
        assert pair.draft_ids.tolist() == CUT and not pair.draft_reads_features
        drawn = {"temperature": 3.0, "max_new_tokens": 100, "max_fallbacks": 99}
        counts = pair.generate(PROMPT, seed=3, **drawn).stats.speculation
        assert counts.accepted and not counts.faults


def test_a_broken_file_is_done_without(folder, path):
    broken = folder / "broken.safetensors"
    data = Path(path).read_bytes()
    broken.write_bytes(data[: len(data) // 2])  # by its header it is not even a draft
    with pair_with(str(broken)) as pair:
        assert pair.generate(PROMPT, max_new_tokens=20).tokens == alone(1, PROMPT, 20)
        assert "truncated" in pair.draft_failure
    broken.write_bytes(data.replace(b'"norm"', b'"nor_"'))
    with pair_with(str(broken)) as pair:
        result = pair.generate(PROMPT, max_new_tokens=20)
        assert result.tokens == alone(1, PROMPT, 20)
        assert "could not be read" in result.stats.speculation.off_reason and "'norm'" in pair.draft_failure
    pair = Pair(parts(1), draft=str(broken), k=3, opened=opener(**OPENED), require_draft=True)
    with pair, pytest.raises(FormatError, match="tensor 'norm'"):
        pair.ready()
