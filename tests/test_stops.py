"""Stop strings: where the text ends must not depend on how it was cut into pieces."""

import itertools
import random

import pytest

from specloop.errors import OptionError
from specloop.stops import StopMatcher


def run(stops, pieces):
    matcher = StopMatcher(stops)
    shown = []
    for piece in pieces:
        shown.append(matcher.push(piece))
        if matcher.hit is not None:
            break
    return "".join(shown) + matcher.flush(), matcher.hit


def test_a_hit_early_in_a_long_piece_is_found():
    assert run(["END"], ["foo", "fooENDbarbazbarbazbarbaz"]) == ("foofoo", "END")


def test_a_stop_string_across_pieces():
    assert run(["END"], ["a", "xE", "N", "Dz"]) == ("ax", "END")


def test_no_stop_string_passes_everything_at_once():
    matcher = StopMatcher()
    assert matcher.push("abc") == "abc" and matcher.flush() == ""


def test_only_what_could_become_a_stop_string_is_held_back():
    matcher = StopMatcher(["<end>", "e!"])
    assert matcher.push("one") == "on"
    assert matcher.push(" two <e") == "e two "
    assert matcher.push("x") == "<ex"
    assert matcher.hit is None


def test_the_tail_comes_out_at_the_end():
    assert run(["END"], ["go EN"]) == ("go EN", None)


def test_the_first_to_be_complete_wins_and_the_longest_of_those():
    assert run(["abcd", "bc"], ["abcd"]) == ("a", "bc")
    assert run(["bc", "abc"], ["xabc"]) == ("x", "abc")


def test_overlap_with_itself():
    assert run(["aab"], ["aaab"]) == ("a", "aab")


def test_nothing_is_shown_after_a_hit():
    matcher = StopMatcher(["x"])
    assert matcher.push("ax b") == "a"
    assert matcher.push("more") == "" and matcher.flush() == ""


@pytest.mark.parametrize("stops", [[""], ["a", ""], [3]])
def test_bad_stop_strings_are_refused(stops):
    with pytest.raises(OptionError, match="stop: expected"):
        StopMatcher(stops)


def test_a_single_string_is_one_stop_string():
    assert run("ab", ["aab"]) == ("a", "ab")


def test_every_way_to_cut_the_text_gives_the_same():
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choices("ab", k=8))
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        one_by_one = run(stops, text)
        ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
        hit = min(ends)[2] if ends else None
        assert one_by_one == (text[: min(ends)[0] - len(hit)] if ends else text, hit)
        for cuts in itertools.combinations(range(1, 8), 2):
            pieces = [text[a:b] for a, b in itertools.pairwise((0, *cuts, 8))]
            assert run(stops, pieces) == one_by_one, (stops, pieces)
