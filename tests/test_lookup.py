"""The suffix automaton against a search by hand."""

import random
import time

import pytest

from specloop.drafts.lookup import LookupDraft


def by_hand(text, k, min_match, max_tokens):
    """(match length, end of the most recent occurrence, proposal) by trying every suffix at every place."""
    for length in range(len(text) - 1, 0, -1):
        suffix = text[len(text) - length :]
        for end in range(len(text) - 2, length - 2, -1):
            if text[end - length + 1 : end + 1] == suffix:
                if length < min_match:
                    return length, end, []
                guess = list(text)
                for _ in range(min(k, 2 * length, max_tokens)):
                    guess.append(guess[len(guess) - (len(text) - 1 - end)])
                return length, end, guess[len(text) :]
    return 0, -1, []


@pytest.mark.parametrize("letters", [1, 2, 3, 8])
def test_longest_suffix_and_most_recent_place(letters):
    rng = random.Random(letters)
    for _ in range(60):
        text = [rng.randrange(letters) for _ in range(40)]
        draft = LookupDraft(min_match=2)
        draft.begin(text[:10])
        for n in range(10, 41):
            length, end, guess = by_hand(text[:n], 5, 2, 8)
            assert draft.match_length == length
            assert draft.match_end == (end if length else -1)
            assert draft.propose(5) == guess, text[:n]
            draft.append(text[n : n + 1])


def test_a_text_that_repeats_itself_goes_on_in_circles():
    draft = LookupDraft()
    draft.begin([1, 2, 3] * 4)
    assert draft.propose(8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_deep_nesting_stays_right():
    draft = LookupDraft()
    draft.begin([5] * 1000)
    assert draft.propose(8) == [5] * 8 and draft.match_length == 999


def test_nothing_is_left_of_the_last_request():
    draft = LookupDraft()
    draft.begin([1, 2, 3, 4, 5, 6])
    draft.begin([7, 8, 1, 2])
    assert draft.outlook() == (0, 0) and draft.propose(5) == []
    draft.append([9, 7, 8])  # the new text's own repeats are found
    assert draft.propose(2) == [1, 2]


def test_requests_do_not_share():
    one, two = LookupDraft(), LookupDraft()
    one.begin([1, 2, 3, 1, 2])
    two.begin([1, 2])
    assert one.propose(1) == [3] and two.propose(1) == []


def test_short_matches_are_not_proposed():
    draft = LookupDraft(min_match=3)
    draft.begin([1, 2, 9, 1, 2])
    assert draft.outlook() == (0, 0) and draft.propose(4) == []
    draft.append([9])
    assert draft.outlook() == (3, 6) and draft.propose(4) == [1, 2, 9, 1]


@pytest.mark.parametrize("text", [[], [4]])
def test_too_short_to_repeat(text):
    draft = LookupDraft(min_match=1)
    draft.begin(text)
    assert draft.propose(3) == []


def test_k_zero():
    draft = LookupDraft()
    draft.begin([1, 2, 1, 2])
    assert draft.propose(0) == []


@pytest.mark.parametrize("letters", [1, 3, 20000])
def test_cost_does_not_grow_with_the_text(letters):
    rng = random.Random(1)
    text = [rng.randrange(letters) for _ in range(8000)]

    def seconds(n):  # of the last 500 of n ids
        draft = LookupDraft()
        draft.begin(text[: n - 500])
        start = time.perf_counter()
        for token in text[n - 500 : n]:
            draft.append([token])
            draft.propose(8)
        return time.perf_counter() - start

    short, long = (min(seconds(n) for _ in range(5)) for n in (1000, 8000))
    assert long < 4 * short  # linear cost per id would give 8


def test_size_is_linear():
    rng = random.Random(2)
    for letters in (1, 2, 50):
        draft = LookupDraft()
        draft.begin([rng.randrange(letters) for _ in range(3000)])
        assert len(draft._link) <= 2 * 3000
        assert sum(map(len, draft._next)) <= 3 * 3000
