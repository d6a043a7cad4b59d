"""What model drafts and chains of drafts propose at T > 0: the law of whole texts, exactly; faults are noticed."""

import pytest
import torch

import specdec_kernels as sk
from laws import Branches, chain
from loop_laws import (
    EXACT,
    FILTERS,
    ONE,
    PROMPT,
    WRONG,
    Cut,
    distance,
    distribution,
    loop_law,
    model_draft,
    rows,
    wanted,
)
from scripted import FunctionDraft, Scripted, oracle, request_for
from specdec_kernels.reference.philox import DRAFT
from specloop.decode import decode
from specloop.drafts.base import Proposal
from specloop.drafts.chain import ChainDraft
from specloop.drafts.lookup import LookupDraft
from specloop.faults import GuardedDraft
from versions import PROMPT as TEXT
from versions import pair_of, parts


def models(vocab_size, **options):
    """A target and a draft that disagree."""
    return Scripted(rows(0, vocab_size), vocab_size, **options), Scripted(rows(1, vocab_size), vocab_size)


def off(vocab_size, k, length, sampling, *, make=None, target=None, **options):
    """How far the law of the loop's texts is from the target's."""
    own, drafter = models(vocab_size)
    target = target or own
    make = make or (lambda: model_draft(drafter, vocab_size, sampling))
    return distance(loop_law(target, make, k, length, sampling, **options), wanted(target, length, sampling))


# ---- laws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_texts_over_several_rounds(k, rule):
    assert off(2, k, 4, ONE, rule=rule) < EXACT


@pytest.mark.parametrize("name", FILTERS)
def test_temperatures_and_filters(name):
    assert off(3, 2, 3 if name == "T=1" else 4, FILTERS[name]) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("vocab_size, k", [(3, 2), (3, 3), (4, 2)])
def test_longer_texts_of_more_ids(vocab_size, k, name, rule):
    assert off(vocab_size, k, 4, FILTERS[name], rule=rule) < EXACT


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("confidence", [0.4, 0.5, 0.7])
def test_a_chain_that_ends_where_the_draft_is_unsure(confidence, rule):
    """How long it is depends on what was drawn, and the law does not."""
    lengths, (target, drafter) = set(), models(2)

    def make():
        draft = model_draft(drafter, 2, ONE, confidence=confidence)
        propose = draft.propose

        def spy(k):
            found = propose(k)
            lengths.add((k, len(found)))
            return found

        draft.propose = spy
        return draft

    assert distance(loop_law(target, make, 3, 4, ONE, rule=rule), wanted(target, 4, ONE)) < EXACT
    assert any(n < k for k, n in lengths)


def test_a_chain_ends_with_the_first_unsure_token():
    model = Scripted(lambda prefix: [2.0, 0.0, 0.0] if len(prefix) < 5 else [0.1, 0.0, 0.0], 3)
    for confidence, length in ((0.0, 6), (0.3, 6), (0.5, 3), (0.9, 1)):
        draft = model_draft(model, 3, confidence=confidence)
        draft.begin([1, 2, 0])
        assert len(draft.propose(6)) == length, confidence


def test_a_greedy_chain_ends_where_hardly_a_look_would_reach():
    """Each token has 0.787 of the draft's probability; drawn chains are not cut, whose tokens are likely otherwise."""
    model = Scripted(lambda prefix: [2.0, 0.0, 0.0], 3)
    for reach, length in ((0.0, 8), (0.24, 6), (0.25, 6), (0.31, 5), (0.5, 3), (0.79, 1)):
        for sampling, expected in ((None, length), (ONE, 8)):
            draft = model_draft(model, 3, sampling, reach=reach)
            draft.begin([1, 2, 0])
            assert len(draft.propose(8)) == expected, (reach, sampling)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("ids", [[0, 2], [1]], ids=str)
def test_a_draft_that_knows_fewer_ids(ids, rule):
    """What it can't say comes from the target; with filters over what it can say."""
    drafter = Cut(rows(1, 3), 3, ids)
    for sampling in (ONE, {"temperature": 0.7, "top_k": 1}):
        assert off(3, 2, 4, sampling, make=lambda s=sampling: model_draft(drafter, 3, s), rule=rule) < EXACT


def test_a_draft_whose_vocabulary_is_filled_up_to_less():
    """It has columns for the first two ids only, and says so by their number."""
    drafter = Cut(rows(1, 3), 3, [0, 1])
    drafter.draft_ids = None
    assert off(3, 2, 3, ONE, make=lambda: model_draft(drafter, 3, ONE)) < EXACT


def test_an_end_in_the_draft():
    """Drafting stops at an EOS id, the text ends where the target takes it."""
    target, drafter = models(3, eos_ids=[2])
    drafter.eos_ids = target.eos_ids
    for rule in ("token", "block"):
        assert off(3, 3, 3, ONE, target=target, make=lambda: model_draft(drafter, 3, ONE), rule=rule) < EXACT


def mixed(drafter, vocab_size, sampling):
    return ChainDraft([LookupDraft(2), model_draft(drafter, vocab_size, sampling)])


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("vocab_size, length", [(2, 4), (3, 3)])
def test_a_chain_of_drafters(vocab_size, length, rule):
    """Some rounds are looked up, which makes point masses, some are drawn: the ids decide which."""
    drafter = models(vocab_size)[1]
    sources = set()

    def watched():
        draft = mixed(drafter, vocab_size, ONE)
        propose = draft.propose

        def noting(k):
            found = propose(k)
            sources.add((found.source, found.logits is None))
            return found

        draft.propose = noting
        return draft

    assert off(vocab_size, 2, length, ONE, make=watched, rule=rule) < EXACT
    assert sources == {("lookup", True), ("model", False)}


def test_both_kinds_in_one_batch():
    """The joint law of two texts that share passes is the product of their laws."""
    target, drafter = models(2)
    first, second = list(PROMPT), [1, 1, 0, 1, 0, 0, 1, 1]  # their positions, and so their numbers, never meet

    def run(_):
        made = model_draft(drafter, 2, ONE), FunctionDraft(lambda prefix, j: (sum(prefix) + j) % 2)
        crew = [
            request_for(target, prompt, 2, draft, k=2, sampling=ONE)
            for prompt, draft in zip((first, second), made, strict=True)
        ]
        both = list(crew)
        for _ in decode(target, crew):
            pass
        return tuple(both[0].ids[len(first) :]), tuple(both[1].ids[len(second) :])

    law = {}
    with sk.use_backend("reference"):
        for texts, probability, _ in Branches().outcomes(run):
            law[texts] = law.get(texts, 0.0) + probability
    one, two = wanted(target, 2, ONE), wanted(target, 2, ONE, second)
    assert distance(law, {(a, b): p * q for a, p in one.items() for b, q in two.items()}) < EXACT


# ---- faults that the laws above notice -------------------------------------------------------------------------------


def test_drawn_at_another_temperature_than_judged():
    drafter = models(3)[1]
    assert off(3, 2, 3, ONE, make=lambda: model_draft(drafter, 3, {"temperature": 0.5})) > WRONG


def test_the_likeliest_instead_of_a_drawn_one():
    """Report A2: a greedy draft judged by its softmax."""
    drafter = models(3)[1]

    class Greedy(Branches):
        def draw(self, weights, seed, position, stream, index, decide=None):
            if stream == DRAFT:
                return int(weights.argmax())
            return super().draw(weights, seed, position, stream, index, decide)

    assert off(3, 2, 3, ONE, make=lambda: model_draft(drafter, 3, ONE), branches=Greedy()) > WRONG


def test_rows_that_the_next_pass_overwrites(monkeypatch):
    """The model's logits are valid until its next pass: each draft's rows have to be copied."""
    drafter = models(3)[1]
    memory = torch.empty(1, 3)
    forward = drafter.forward

    def overwriting(tokens, cache, *, last):
        logits = forward(tokens, cache, last=last)
        return memory.copy_(logits) if last else logits

    drafter.forward = overwriting
    make = lambda: model_draft(drafter, 3, ONE)
    assert off(3, 2, 3, ONE, make=make) < EXACT

    propose = type(make()).propose

    def handing_over_the_models_own(self, k):
        found = propose(self, k)
        return Proposal(found.tokens, logits=memory.expand(len(found.tokens), 3))

    monkeypatch.setattr(type(make()), "propose", handing_over_the_models_own)
    assert off(3, 2, 3, ONE, make=make) > WRONG


def test_the_redraw_from_p(monkeypatch):
    monkeypatch.setattr(chain, "residual", lambda p, q, r=1.0: p)
    assert off(3, 2, 3, ONE) > WRONG


def test_noise_by_the_tokens_own_position(monkeypatch):
    """In one round it makes no difference; the numbers come back in the next."""
    inner = sk.sample

    def own(*args, position, index, **options):
        return inner(*args, position=position + index, index=0, **options)

    monkeypatch.setattr(sk, "sample", own)
    assert off(2, 3, 4, ONE, rule="block") > WRONG


def test_noise_from_the_stream_of_the_last_token(monkeypatch):
    inner = sk.sample
    monkeypatch.setattr(sk, "sample", lambda *args, stream, **options: inner(*args, stream=2, **options))
    assert off(3, 2, 3, ONE) > WRONG


# ---- what a proposal is ----------------------------------------------------------------------------------------------


def test_a_chain_is_what_sample_draws_with_the_rounds_numbers():
    drafter = Scripted(rows(1, 16), 16)
    sampling = {"temperature": 0.8, "top_k": 9, "seed": -7}
    draft = GuardedDraft(model_draft(drafter, 16, sampling), 16)
    ids = [3, 1, 4, 1, 5]
    draft.outlook(ids)
    found = draft.propose(4)
    assert len(found) == 4 and found.source == "model" and found.parents is None and found.ids is None
    for i, token in enumerate(found.tokens):
        row = torch.tensor([drafter.logits(ids + found.tokens[:i])])
        assert torch.equal(found.logits[i], row[0])
        numbers = {"seed": torch.tensor([-7]), "position": torch.tensor([5])}
        assert token == sk.sample(row, temperature=0.8, top_k=9, stream=0, index=i, **numbers).item()


def test_a_greedy_chain_has_no_rows():
    drafter = Scripted(rows(1, 16), 16)
    draft = GuardedDraft(model_draft(drafter, 16), 16)
    draft.outlook([3, 1])
    found, ids = draft.propose(5), [3, 1]
    for token in found.tokens:
        assert token == max(range(16), key=drafter.logits(ids).__getitem__)
        ids.append(token)
    assert found.logits is None and len(found) == 5


def test_a_seed_repeats_and_another_differs():
    def text(seed):
        target, drafter = models(16)
        sampling = {"temperature": 1.0, "seed": seed}
        request = request_for(target, [1], 40, mixed(drafter, 16, sampling), k=3, sampling=sampling)
        list(decode(target, [request]))
        return request.ids

    assert text(1) == text(1) != text(2)


@pytest.mark.parametrize("options", [{}, {"tree": 5}, {"rule": "block", "top_k": 40}], ids=str)
def test_requests_with_drawn_chains_in_a_batch_are_what_they_are_alone(options):
    """Report A8: their own seeds, their own numbers; some rounds of some of them are looked up."""
    prompts = [TEXT, [9] * 20, [(11 * i + 3) % 200 for i in range(70)]]
    each = [{"seed": seed, "temperature": t} for seed, t in ((1, 1.0), (2, 0.7), (1, 0.0))]
    with pair_of(1, draft=parts(2), k=3) as pair:
        together = pair.generate_batch(prompts, each=each, max_new_tokens=30, **options)
        for prompt, own, result in zip(prompts, each, together, strict=True):
            alone = pair.generate(prompt, max_new_tokens=30, **own, **options)
            assert result.tokens == alone.tokens
            assert result.stats.speculation.k_history == alone.stats.speculation.k_history
            assert result.stats.speculation.faults == []
        sources = [result.stats.speculation.by_source.keys() for result in together]
        assert sources[0] | sources[1] | sources[2] == {"lookup", "model"}


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
def test_a_draft_that_is_the_target_is_always_accepted(k):
    """Reports B1, B2: also after full rounds and refused ones the draft's cache is in step. At T = 1 p = q."""
    for sampling in ({}, {"temperature": 1.0, "seed": 3}):
        target = Scripted(rows(0, 12), 12)
        request = request_for(target, [1], 300, model_draft(target, 12, sampling), k=k, sampling=sampling)
        list(decode(target, [request]))
        counts = request.stats.speculation
        assert counts.accepted == counts.evaluated == counts.proposed and counts.rounds == -(-300 // (k + 1))


def test_the_draft_recovers_from_refusals():
    """Report B1: a draft wrong at every fifth position is refused there and nowhere else, over 500 tokens."""
    target = Scripted(rows(0, 12), 12)

    def logits(prefix):
        row = rows(0, 12)(prefix)
        if len(prefix) % 5 == 0:
            row[min(range(12), key=row.__getitem__)] = 9.0
        return row

    drafter = Scripted(logits, 12)
    draft = model_draft(drafter, 12, max_tokens=8)
    request = request_for(target, [1], 500, draft, k=3)
    list(decode(target, [request]))
    counts, length, accepted, rounds = request.stats.speculation, 1, 0, 0
    while length < 501:
        room = min(3, 501 - length - 1)
        good = next((j for j in range(room) if (length + j) % 5 == 0), room)
        rounds, accepted, length = rounds + 1, accepted + good, length + good + 1
    assert (counts.rounds, counts.accepted) == (rounds, accepted)
    assert drafter.caches[-1].ids == request.ids[: drafter.caches[-1].length]


@pytest.mark.parametrize("tree", [0, 7])
def test_whatever_was_committed_a_proposal_is_that_of_a_fresh_draft(tree):
    """Report B1: its cache holds guesses that were refused, other paths of a tree, or less than rounds that others
    drafted. Random ids are committed, some of them as proposed.
    """
    g, ids = torch.Generator().manual_seed(1), [1, 2]
    number = lambda most: int(torch.randint(most, (), generator=g))
    drafter = Scripted(rows(1, 5), 5)
    draft = model_draft(drafter, 5, {"temperature": 1.0, "seed": 4}, tree=tree)
    draft.begin(ids)
    for _ in range(60):
        if number(3):
            k = 1 + number(4)
            fresh = model_draft(Scripted(rows(1, 5), 5), 5, {"temperature": 1.0, "seed": 4}, tree=tree)
            fresh.begin(ids)
            found, again = draft.propose(k), fresh.propose(k)
            assert (found.tokens, found.parents) == (again.tokens, again.parents)
            n = len(found)
            kept = found.tokens[: number(n + 1)] if not tree else [found.tokens[number(n)]]
        else:
            kept = []
        more = [*kept, *(number(5) for _ in range(1 + number(3)))]
        draft.append(more)
        ids += more
        assert drafter.caches[-1].ids[: draft._agreed] == ids[: draft._agreed]


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_beyond_the_drafts_context_there_are_no_proposals():
    """Report G4: limit 32, text of 128; others in the batch still draft."""
    target, short, long = Scripted(rows(0, 12), 12), Scripted(rows(0, 12), 12, context=32), Scripted(rows(0, 12), 12)
    drafts = model_draft(short, 12), model_draft(long, 12)
    crew = [request_for(target, [1, i], 126, draft, k=3) for i, draft in enumerate(drafts)]
    both = list(crew)
    list(decode(target, crew))
    plain = [request_for(target, [1, i], 126, None) for i in range(2)]
    for request, alone in zip(both, plain, strict=True):
        list(decode(target, [alone]))
        assert request.ids == alone.ids and request.draft.faults == []
    one, other = (request.stats.speculation for request in both)
    assert one.proposed == 24 and one.acceptance_rate == 1.0  # up to 33 ids: the last one is never fed
    assert one.k_history[-60:] == [0] * 60 and other.rounds == 32


def test_a_chain_of_drafters_outlives_the_models_context():
    """A lookup has no limit."""
    target = Scripted(lambda prefix: [float(t == len(prefix) * 7 % 13) for t in range(13)], 13)
    short = Scripted(target.logits, 13, context=10)
    request = request_for(target, [0], 130, ChainDraft([LookupDraft(), model_draft(short, 13)]), k=8)
    list(decode(target, [request]))
    counts = request.stats.speculation
    assert set(counts.by_source) == {"lookup", "model"} and counts.rounds < 50


def test_the_outlook_of_a_chain_is_that_of_whose_turn_it_is():
    drafter = Scripted(rows(1, 12), 12)
    both = ChainDraft([LookupDraft(), model_draft(drafter, 12)])
    both.begin([1, 2, 3])
    assert both.outlook() == (0, 8)  # a model knows no strength
    both.begin([1, 2, 3, 1, 2])
    assert both.outlook() == (2, 4) and both.propose(2).source == "lookup"
    assert both.without("lookup") is both and both.outlook() == (0, 8) and both.propose(2).source == "model"
    assert both.without("model") is None and both.outlook() == (0, 0) and both.propose(2).tokens == []


def test_a_chain_with_a_draft_that_is_not_ours():
    target = Scripted(rows(0, 12), 12)
    foreign = oracle(target)
    assert ChainDraft([LookupDraft(), model_draft(target, 12)]).timely and not ChainDraft([foreign]).timely
    request = request_for(target, [1], 60, ChainDraft([LookupDraft(12), foreign]), k=3)
    list(decode(target, [request]))
    counts = request.stats.speculation
    assert counts.by_source.keys() == {"function"} and counts.acceptance_rate == 1.0


def test_a_law_of_the_bench_itself():
    """The enumeration gives a plain text its chain-rule law, filters and all."""
    target = models(3)[0]
    sampling = FILTERS["top-k"]
    law = loop_law(target, lambda: None, 0, 2, sampling)
    by_hand = {
        (a, b): p * q
        for a, p in enumerate(distribution(target.logits(PROMPT), **sampling))
        for b, q in enumerate(distribution(target.logits([*PROMPT, a]), **sampling))
        if p * q
    }
    assert distance(law, by_hand) < EXACT and len(law) == 4
