"""A model as a draft: the same text as without, whatever it proposes, and no position computed twice."""

import threading
from dataclasses import replace

import pytest

from scripted import anti, oracle, request_for
from specloop.decode import decode
from specloop.drafts.lookup import LookupDraft
from specloop.drafts.model import ModelDraft
from specloop.errors import OptionError
from specloop.faults import GuardedDraft
from specloop.pair import Pair
from specloop.versions import Place, Version
from tiny_llama import CONFIG, build
from versions import PROMPT, alone, pair_of, parts


@pytest.fixture(autouse=True)
def no_lookup(monkeypatch):
    """A pair's draft is a lookup with the model behind it; here the model always has its turn."""
    monkeypatch.setattr(LookupDraft, "outlook", lambda self: (0, 0))


LONG = [(11 * i + 3) % CONFIG.vocab for i in range(150)]
SMALLER = replace(CONFIG, layers=1, heads=3, kv_heads=3, hidden=48, intermediate=80)


def drafted(seed=1, draft_seed=1, k=3, **options):
    return pair_of(seed, draft=parts(draft_seed, **options), k=k)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("prompt", [[7], PROMPT, LONG], ids=len)
@pytest.mark.parametrize("draft", [{"draft_seed": 1}, {"draft_seed": 4}, {"draft_seed": 4, "config": SMALLER}])
def test_text_is_that_of_plain_decoding(draft, prompt, k):
    """Also with a draft of other layers, heads and cache sizes (report 69)."""
    with drafted(k=k, **draft) as pair:
        result = pair.generate(prompt, max_new_tokens=40)
        counts = result.stats.speculation
        assert result.tokens == alone(1, prompt, 40) and counts.proposed and counts.faults == []
        if draft == {"draft_seed": 1}:  # report 72: always right
            assert counts.acceptance_rate == 1.0 and counts.rounds == -(-40 // (k + 1))


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("kind, passes", [(anti, lambda k: 30), (oracle, lambda k: -(-30 // (k + 1)))])
def test_refused_positions_leave_nothing_behind(kind, passes, k):
    """Report 72: a draft that is always wrong takes a pass per token, one that is always right one per K + 1."""

    class Rows:
        """What the target would say next, as the drafts of scripted.py ask for it."""

        vocab_size = CONFIG.vocab

        def logits(self, prefix):
            return [float(token == text[len(prefix) - len(PROMPT)]) for token in range(CONFIG.vocab)]

    text, model = alone(1, PROMPT, 40), build(seed=1)
    request = request_for(model, PROMPT, 30, GuardedDraft(kind(Rows()), CONFIG.vocab), k=k)
    assert [token for _, token, _ in decode(model, [request])] == text[:30]
    assert request.stats.speculation.rounds == passes(k)


def test_no_position_is_computed_twice():
    """What was guessed right stays in the cache: the draft reads a prompt once and then one id per guess."""
    fed = []

    def watched():
        model, *rest = parts(1)()
        forward = model.forward

        def counting(tokens, cache, *, last):
            fed.append((cache.length, len(tokens)))
            return forward(tokens, cache, last=last)

        model.forward, model.guesses = counting, None  # so that every pass comes by
        return (model, *rest)

    with Pair(parts(1), draft=watched, k=4) as pair:
        pair.ready()
        fed.clear()
        pair.generate(LONG, max_new_tokens=41)
    reached = 0
    for start, count in fed:
        assert start == reached
        reached += count
    assert sum(count for _, count in fed) <= len(LONG) + 40
    assert fed[0] == (0, len(LONG) - 1)


def test_a_text_longer_than_the_drafts_context():
    with drafted(draft_seed=1, context=64, k=4) as pair:
        result = pair.generate(PROMPT, max_new_tokens=100)
        counts = result.stats.speculation
        assert result.tokens == alone(1, PROMPT, 100) and counts.faults == []
        assert max(counts.k_history[:8]) == 4 and set(counts.k_history[-30:]) == {0}
        far = pair.generate(LONG, max_new_tokens=20)
        assert far.tokens == alone(1, LONG, 20) and far.stats.speculation.proposed == 0


def test_ids_beyond_the_targets_are_never_proposed():
    """Vocabularies are padded to different sizes in models of one family."""
    padded = replace(CONFIG, vocab=256)
    for seed in range(4):
        with drafted(draft_seed=seed, config=padded) as pair:
            result = pair.generate(PROMPT, max_new_tokens=30)
            assert result.tokens == alone(1, PROMPT, 30)
            assert result.stats.speculation.proposed and result.stats.speculation.faults == []


def test_vocabularies_are_compared_by_content():
    with drafted(draft_seed=1, fingerprint="other") as pair, pytest.raises(OptionError, match=r"^draft: .*vocabulary"):
        pair.ready()


def test_a_draft_that_fails_costs_a_round():
    with drafted(k=3) as pair:
        pair.ready()
        model = pair._draft.version.model
        forward, calls = model.forward, []

        def failing(*args, **options):
            calls.append(args)
            if len(calls) in (5, 6):
                raise RuntimeError("boom")
            return forward(*args, **options)

        model.forward = failing
        result = pair.generate(PROMPT, max_new_tokens=40)
        counts = result.stats.speculation
        assert result.tokens == alone(1, PROMPT, 40) and 1 <= len(counts.faults) <= 2 and counts.off_reason is None
        assert counts.acceptance_rate == 1.0


def test_requests_share_a_draft():
    prompts = [PROMPT, LONG, [9] * 20]
    with drafted(k=3) as pair:
        streams = [pair.stream(prompt, max_new_tokens=24) for prompt in prompts]
        tokens = [[] for _ in prompts]
        for _ in range(24):  # taking turns, token by token
            for stream, found in zip(streams, tokens, strict=True):
                found.append(next(stream).token)
        assert tokens == [alone(1, prompt, 24) for prompt in prompts]
        found = {}
        work = lambda i: found.update({i: pair.generate(prompts[i], max_new_tokens=24).tokens})
        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[i] for i in range(3)] == tokens


def test_sampled_text_depends_on_the_seed_alone():
    with drafted(draft_seed=2, k=2) as pair:
        texts = [pair.generate(PROMPT, temperature=1.0, seed=s, max_new_tokens=30).tokens for s in (1, 1, 2)]
        assert texts[0] == texts[1] != texts[2]


def test_the_controller_knows_what_a_draft_costs():
    from specloop.session import make_controller, make_draft

    with drafted(k="auto") as pair:
        pair.ready()
        pair._draft.version.costs, pair._target.version.costs = [0.01], [0.5] * 9
        options, follows = pair._checked({})
        auto = make_controller(pair, options, make_draft(pair, options, 64, follows))
        assert auto.draft_cost == 0.02 and auto.choose((0, 8)) > 0
        options, follows = pair._checked({"draft": "lookup"})
        assert make_controller(pair, options, make_draft(pair, options, 64, follows)).draft_cost == 0
        options, follows = pair._checked({})
        pair._draft.version.costs = [5.0]  # ten times a pass of the target
        auto = make_controller(pair, options, make_draft(pair, options, 64, follows))
        assert auto.choose((0, 8)) == 0 and "does not pay" in auto.off_reason()
        assert pair.generate(PROMPT, max_new_tokens=12).tokens == alone(1, PROMPT, 12)


@pytest.mark.parametrize("options", [{"temperature": 1.0, "seed": 5}, {"rule": "threshold"}])
@pytest.mark.parametrize("name", ["lookup", "auto"])
def test_what_depends_on_k_can_be_repeated_whatever_was_measured(options, name):
    """At this load or another one, and where the answer is so short that drafting just pays."""
    from specloop.controller import Auto
    from specloop.costs import CostCurve
    from specloop.session import make_controller, make_draft

    with drafted(k="auto") as pair:
        pair.ready()
        for tokens in (3, 64):
            made = []
            for told in (1.01, 1.5, 9.0):  # of passes over several rows, and of the draft
                pair._target.version.costs = CostCurve([0.01, *(0.01 * told + 0.001 * n for n in range(8))])
                pair._draft.version.costs = CostCurve([0.002 * told])
                checked, follows = pair._checked({"max_new_tokens": tokens, "draft": name} | options)
                made.append(make_controller(pair, checked, make_draft(pair, checked, 64, follows)))
            assert all(isinstance(controller, Auto) for controller in made)
            chosen = [[c.choose((strength, 8)) for strength in (0, 4, 9)] for c in made]
            assert chosen[0] == chosen[1] == chosen[2] and any(chosen[0]), chosen
        pair._target.version.costs = CostCurve([0.01] * 9)
        checked, follows = pair._checked({"temperature": 1.0})  # a seed that nobody knows need not make a text again
        assert not make_controller(pair, checked, make_draft(pair, checked, 64, follows)).steady


def test_a_lost_cache_is_filled_from_the_committed_ids():
    place, other = Place(), Place()
    place.version, other.version = (Version(*parts(1)(), "one") for _ in range(2))
    draft, fresh = (ModelDraft(p.seat(100), CONFIG.vocab) for p in (place, other))
    draft.begin(PROMPT)
    ids = list(PROMPT)
    for step in range(12):
        found = draft.propose(3).tokens
        fresh.begin(ids)
        assert found == fresh.propose(3).tokens
        kept = [*found[: step % 4], step * 50 % CONFIG.vocab]
        draft.append(kept)
        ids += kept
        if step % 3 == 2:
            with place.lock:
                place.put(Version(*parts(1)(), "two"))
    with place.lock:
        place.put(None)
    assert draft.outlook() == (0, 0) and draft.propose(3).tokens == []
