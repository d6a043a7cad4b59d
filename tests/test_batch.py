"""Requests that share passes: each text is what it is alone, whoever joins, leaves, fails or waits."""

import threading

import pytest

from loops import KINDS, drafting, pair_on, play
from loops import PROMPTS as SOME
from scripted import FunctionDraft, Scripted, ToyTokenizer, oracle, request_for, scripted
from specloop.decode import decode
from specloop.drafts.lookup import LookupDraft
from specloop.errors import ModelFault, OptionError, OutOfMemory, PairClosed
from specloop.pair import Pair
from versions import pair_of

PROMPTS = [[5, 100, 7, 7, 42], [9], [1, 2, 3, 1, 2, 3, 1, 2], [77] * 40, [60, 61]]
LENGTHS = [12, 30, 20, 7, 25]


def alone_and_together(pair, **options):
    each = [{"max_new_tokens": n, "seed": 10 + n} for n in LENGTHS]
    alone = [pair.generate(prompt, **more, **options) for prompt, more in zip(PROMPTS, each, strict=True)]
    return alone, lambda **batch: pair.generate_batch(PROMPTS, each=each, **batch, **options)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("kv", ["int8", "f32"])
@pytest.mark.parametrize("k", [0, 1, 3, 8])
def test_each_text_is_what_it_is_alone(k, kv, temperature):
    with pair_of(1, k=k, kv=kv) as pair:
        alone, together = alone_and_together(pair, temperature=temperature)
        for size in (None, 1, 2):
            results = together(batch_size=size)
            assert [r.tokens for r in results] == [r.tokens for r in alone]
            assert [r.text for r in results] == [r.text for r in alone]
            assert [r.finish_reason for r in results] == [r.finish_reason for r in alone]
            assert [r.stats.speculation.rounds for r in results] == [r.stats.speculation.rounds for r in alone]


def test_rows_advance_at_their_own_pace():
    """H1: accepted 0, 2 and 4 of four drafts in one round."""
    model = scripted(lambda prefix: (prefix[-1] + 1) % 50, 50)
    crew = []
    for good in (0, 2, 4):
        draft = FunctionDraft(lambda prefix, j, good=good: (prefix[-1] + 1) % 50 if j < good else 0)
        crew.append(request_for(model, [1], 40, draft, k=4))
    requests = list(crew)
    rounds = decode(model, crew)
    for _ in range(1 + 3 + 5):
        next(rounds)
    assert [len(r.ids) - 1 for r in requests] == [1, 3, 5]
    rounds.close()
    assert all(r.ids == [*range(1, len(r.ids) + 1)] and r.finish_reason == "cancelled" for r in requests)
    assert [r.cache.ids for r in requests] == [r.ids[:-1] for r in requests]


def test_requests_join_and_leave_between_rounds():
    model = scripted(lambda prefix: (sum(prefix) * 5 + len(prefix)) % 11, 11)
    say = lambda prompt, n: [i for _, i, _ in decode(model, [request_for(model, prompt, n)])]
    first, second, third = (request_for(model, p, n, oracle(model), k=2) for p, n in (([1], 9), ([2, 3], 20), ([4], 5)))
    crew, seen = [first, second], {}
    for request, token, _ in decode(model, crew):
        seen.setdefault(request, []).append(token)
        if request is first and len(seen[first]) == 9:
            crew.append(third)
    assert seen == {first: say([1], 9), second: say([2, 3], 20), third: say([4], 5)}
    assert crew == [] and {r.finish_reason for r in seen} == {"length"}


def test_a_row_without_a_draft_does_not_stop_the_others():
    """E4: one text repeats, the other never does."""
    repeats = scripted(lambda prefix: prefix[0] * 7 + len(prefix) % 4 if prefix[0] == 1 else len(prefix), 400)
    crew = [
        request_for(repeats, [1, 1, 1], 60, LookupDraft(), k=4),
        request_for(repeats, [200], 60, LookupDraft(), k=4),
    ]
    one, other = crew
    list(decode(repeats, crew))
    assert one.stats.speculation.rounds < 25 and other.stats.speculation.rounds == 60


def test_only_the_request_without_candidates_fails():
    nan = float("nan")
    model = Scripted(lambda prefix: [nan] * 9 if prefix[0] == 3 and len(prefix) == 6 else [0.0] * 8 + [1.0], 9)
    with Pair(lambda: (model, ToyTokenizer("abcdefghi"), None), draft="none") as pair:
        with pytest.raises(ModelFault, match="position 6") as raised:
            pair.generate_batch([[1], [3], [2]], max_new_tokens=20)
        lengths = [len(r.tokens) for r in raised.value.results]
        assert lengths == [20, 5, 20] and raised.value.result.text == "iiiii"
        assert [r.finish_reason for r in raised.value.results] == ["length", None, "length"]


def test_what_a_callback_raises_comes_out_and_leaves_nothing_behind():
    with pair_of(1) as pair:
        wanted = [r.tokens for r in pair.generate_batch(PROMPTS, max_new_tokens=20)]
        seen = []

        def callback(event):
            seen.append((event.index, event.token))
            if len(seen) == 17:
                raise RuntimeError("the caller's own")

        with pytest.raises(RuntimeError, match="the caller's own"):
            pair.generate_batch(PROMPTS, max_new_tokens=20, callback=callback)
        assert len(seen) == 17 and {index for index, _ in seen} > {0, 1}
        assert [seat.nbytes for seat in pair.place.seats()] == [0] * len(pair.place.seats())
        seen.clear()
        assert [r.tokens for r in pair.generate_batch(PROMPTS, max_new_tokens=20)] == wanted


def test_callbacks_see_every_event_of_every_request():
    with pair_of(1) as pair:
        events = []
        results = pair.generate_batch(PROMPTS, max_new_tokens=15, callback=events.append)
        for i, result in enumerate(results):
            mine = [event for event in events if event.index == i]
            assert [e.token for e in mine if e.token is not None] == result.tokens
            assert "".join(e.text for e in mine) == result.text
            assert [e.finish_reason for e in mine if e.finish_reason] == [result.finish_reason]


def test_cancel_ends_all_of_them_with_what_they_have():
    with pair_of(1) as pair:
        wanted = [r.tokens for r in pair.generate_batch(PROMPTS, max_new_tokens=40)]
        flag, count = threading.Event(), []

        def callback(event):
            count.append(event)
            if len(count) == 20:
                flag.set()

        results = pair.generate_batch(PROMPTS, max_new_tokens=40, cancel=flag, callback=callback, batch_size=3)
        assert {r.finish_reason for r in results} == {"cancelled"}
        assert results[-1].tokens == [] and results[0].tokens
        assert all(r.tokens == w[: len(r.tokens)] for r, w in zip(results, wanted, strict=True))


def test_a_target_exchanged_under_a_batch_makes_texts_of_one_version():
    with pair_of(1) as pair:
        old = [r.tokens for r in pair.generate_batch(PROMPTS, max_new_tokens=30)]
        with pair_of(2) as other:
            new = [r.tokens for r in other.generate_batch(PROMPTS, max_new_tokens=30)]
        from versions import parts

        done = []

        def swap():
            pair.swap(target=parts(2))
            done.append(True)

        thread = threading.Thread(target=swap)
        thread.start()
        found = [r.tokens for _ in range(20) for r in pair.generate_batch(PROMPTS, max_new_tokens=30)]
        thread.join()
        assert done and all(tokens in (old[i % 5], new[i % 5]) for i, tokens in enumerate(found))
        assert found[-5:] == new


def test_names_of_others_in_each_go_before_what_all_share():
    with pair_of(1) as pair:
        shared = {"max_tokens": 9, "num_assistant_tokens": 2}
        each = [{"max_new_tokens": 4}, {"max_completion_tokens": 5, "k": 0}, {}, {"prompt_lookup_num_tokens": 3}, {}]
        results = pair.generate_batch(PROMPTS, each=each, **shared)
        assert [len(r.tokens) for r in results] == [4, 5, 9, 9, 9]
        assert [r.stats.settings["k"] for r in results] == [2, 0, 2, 3, 2]
        with pytest.raises(OptionError, match="max_tokens: means max_new_tokens=3, but max_new_tokens=4"):
            pair.generate_batch([[9]], each=[{"max_tokens": 3, "max_new_tokens": 4}])


@pytest.mark.parametrize("size", [None, 1])
def test_requests_that_want_nothing_have_ended_too(size):
    with pair_of(1) as pair:
        each = [{"max_new_tokens": n} for n in (0, 6, 0, 3)]
        results = pair.generate_batch(PROMPTS[:4], each=each, batch_size=size)
        batch = results[0].stats.batch
        assert [len(r.tokens) for r in results] == [0, 6, 0, 3] and {r.finish_reason for r in results} == {"length"}
        assert (batch.joined, batch.finished, batch.tokens) == (4, 4, 9)


def test_requests_that_wait_get_the_draft_that_the_pair_has_when_they_begin():
    with pair_of(1, draft="lookup") as pair:
        wanted = [r.tokens for r in pair.generate_batch(PROMPTS, max_new_tokens=20)]
        told = []

        def callback(event):
            if event.index == 0 and not told:
                told.append(pair.swap(draft="none"))

        results = pair.generate_batch(PROMPTS, max_new_tokens=20, batch_size=2, callback=callback)
        assert [r.tokens for r in results] == wanted
        assert [r.stats.speculation.off_reason for r in results] == ["no draft"] * 5
        assert [r.stats.swaps for r in results] == [1, 1, 0, 0, 0]
        assert [r.stats.settings["generation"] for r in results] == [0, 0, 1, 1, 1]


def test_a_closed_pair_ends_a_batch():
    with pair_of(1) as pair, pytest.raises(PairClosed):
        pair.generate_batch(PROMPTS, max_new_tokens=50, callback=lambda event: pair.close())


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_where_memory_does_not_suffice_fewer_run_at_once(failures, monkeypatch):
    """Each of the first passes for several requests fails, after nothing was left to give back."""
    with pair_of(1, draft="none") as pair:
        wanted = [r.tokens for r in pair.generate_batch(PROMPTS, max_new_tokens=20)]
        inner, sizes = pair.place.forward_parts, []

        def forward_parts(parts):
            if len(sizes) < failures and len(parts) > 1:
                sizes.append(len(parts))
                raise OutOfMemory("no room")
            return inner(parts)

        monkeypatch.setattr(pair.place, "forward_parts", forward_parts)
        monkeypatch.setattr(pair.place, "room", lambda capacity: 9)
        assert [r.tokens for r in pair.generate_batch(PROMPTS, max_new_tokens=20)] == wanted
        assert sizes == sorted(sizes, reverse=True) and len(sizes) == min(failures, 2)


def test_one_that_does_not_fit_even_alone_fails_and_the_others_go_on(monkeypatch):
    with pair_of(1, draft="none") as pair:
        wanted = [r.tokens for r in pair.generate_batch(PROMPTS, max_new_tokens=20)]
        inner = pair.place.forward_parts

        def forward_parts(parts):
            if any(77 in part.tokens for part in parts):
                raise OutOfMemory("no room")
            return inner(parts)

        monkeypatch.setattr(pair.place, "forward_parts", forward_parts)
        monkeypatch.setattr(pair.place, "room", lambda capacity: 9)
        with pytest.raises(OutOfMemory, match="no room") as raised:
            pair.generate_batch(PROMPTS, max_new_tokens=20)
        found = [r.tokens for r in raised.value.results]
        assert found[:3] + found[4:] == wanted[:3] + wanted[4:] and found[3] == []


def test_fifty_requests_and_room_for_three(monkeypatch):
    """H3: all are through in the end, with the texts that they have alone."""
    with pair_of(1) as pair:
        prompts = [[3 + i, 100 - i] for i in range(50)]
        wanted = [pair.generate(prompt, max_new_tokens=10).tokens for prompt in prompts]
        together, inner = [], pair.place.forward_parts

        def forward_parts(parts):
            together.append(len(parts))
            return inner(parts)

        monkeypatch.setattr(pair.place, "forward_parts", forward_parts)
        monkeypatch.setattr(pair.place, "room", lambda capacity: 3 - sum(not s.is_empty for s in pair.place.seats()))
        assert [r.tokens for r in pair.generate_batch(prompts, max_new_tokens=10)] == wanted
        assert max(together) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": []}, "prompts: expected a list of at least one"),
        ({"prompts": "ab"}, "prompts: expected a list"),
        ({"batch_size": 0}, "batch_size: expected an integer >= 1, got 0"),
        ({"each": [{}]}, "each: expected a list of 5 dicts"),
        ({"each": [{"seed": 2**63}] + [{}] * 4}, "seed: expected an integer"),
        ({"callback": 7}, "callback: expected a function"),
    ],
)
def test_bad_batches(options, message):
    with pair_of(1) as pair:
        prompts = options.pop("prompts", PROMPTS)
        with pytest.raises((OptionError, ValueError), match=message):
            pair.generate_batch(prompts, **options)


# ---- fallbacks -------------------------------------------------------------------------------------------------------


def counting(n=60):
    return scripted(lambda prefix: (prefix[-1] + 1) % 97, 97)


def test_after_fallbacks_in_a_row_decoding_goes_on_plainly_and_tries_again():
    model = counting()
    wrong = FunctionDraft(lambda prefix, j: 0)
    request = request_for(model, [1], 90, wrong, k=2)
    list(decode(model, [request]))
    history = request.stats.speculation.k_history
    assert history[:8] == [2] * 8 and history[8:24] == [0] * 16 and history[24:32] == [2] * 8
    assert history[32:64] == [0] * 32 and history[64] == 2  # the second rest is twice as long
    assert request.ids == [*range(1, 92)] and request.finish_reason == "length"


def test_after_fallbacks_in_a_row_decoding_stops_if_asked_to():
    model = counting()
    request = request_for(model, [1], 90, FunctionDraft(lambda p, j: 0), k=2, on_fallbacks="stop", max_fallbacks=3)
    list(decode(model, [request]))
    assert request.finish_reason == "fallbacks" and request.ids == [1, 2, 3, 4]


def test_the_last_event_says_that_drafts_failed(monkeypatch):
    pair = pair_on("scripted")
    with drafting(lambda: KINDS["anti"]("scripted", pair.model.vocab_size), monkeypatch):
        for batch in (1, 2):  # ``play`` compares the reason in the last event with the result's
            options = {"on_fallbacks": "stop", "max_fallbacks": 3, "k": 2}
            results = play(pair, SOME[:batch], (12, 21)[:batch], "stream", **options)
            assert [(r.finish_reason, len(r.tokens)) for r in results] == [("fallbacks", 3)] * batch


def test_one_accepted_draft_begins_the_count_anew():
    model = counting()
    now_and_then = FunctionDraft(lambda prefix, j: prefix[-1] + 1 if len(prefix) % 5 == 0 else 0)
    request = request_for(model, [1], 60, now_and_then, k=1)
    list(decode(model, [request]))
    assert 0 not in request.stats.speculation.k_history[:-1]


def test_beyond_a_length_a_request_decodes_plainly():
    model = counting()
    request = request_for(model, [1], 40, oracle(model), k=3, draft_until=20)
    other = request_for(model, [1], 40, oracle(model), k=3)
    list(decode(model, [request, other]))
    lengths, at = request.stats.speculation.k_history, 1
    for k in lengths:
        assert k == (3 if at < 20 else 0)
        at += k + 1
    assert request.ids == other.ids and set(other.stats.speculation.k_history[:-1]) == {3}
