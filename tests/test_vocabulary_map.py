"""Vocabularies by content, and maps of cut ones: what is refused, and that proposals come in the target's ids."""

import pytest

from scripted import Scripted, ToyTokenizer
from specloop.drafts.model import ModelDraft
from specloop.drafts.vocabulary import check_map, difference
from specloop.errors import ModelError, OptionError
from specloop.faults import GuardedDraft
from specloop.versions import Place, Version
from versions import pair_of

CUT = [0, 2, 5, 9]


class Tokens(ToyTokenizer):
    def __init__(self, pieces, **special):
        super().__init__(pieces)
        self.vocab_size = len(pieces)
        self.__dict__.update(special)


# ---- by content ------------------------------------------------------------------------------------------------------


def test_the_error_names_the_first_id_that_differs():
    assert difference(Tokens("abdc"), Tokens("abcd")) == "id 2 is b'd' there and should be b'c'"
    assert difference(Tokens("abcd"), Tokens("abc")) == "id 3 is b'd' there and should be nothing"
    assert difference(Tokens("abc"), Tokens("abcd")) == "id 3 is nothing there and should be b'd'"
    assert difference(Tokens("abc", bos_id=1), Tokens("abc")) == "its bos_id is 1 and should be None"
    ends = Tokens("abc", eos_ids=frozenset([2]))
    assert difference(ends, Tokens("abc")) == "texts end with [2] there and should with []"


def test_two_ids_swapped_are_refused_at_load():
    """Same size, same name: only the content tells."""

    def swapped():
        model, tokenizer, template = parts()
        tokenizer.pieces[65], tokenizer.pieces[66] = tokenizer.pieces[66], tokenizer.pieces[65]
        tokenizer.fingerprint = "other"
        return model, tokenizer, template

    from versions import parts as of

    parts = of(1)
    with pair_of(1, draft=swapped) as pair, pytest.raises(OptionError, match=r"^draft: .*id 65 is b'B' .* b'A'"):
        pair.ready()


# ---- maps ------------------------------------------------------------------------------------------------------------

BAD = {
    "empty": ([], None, "list of ids"),
    "no list": (7, None, "list of ids"),
    "twice": ([0, 2, 2, 9], None, "got 2 twice at 2"),
    "out of order": ([0, 5, 2, 9], None, "got 2 behind 5 at 2"),
    "offsets instead of ids": ([0, 1, 3, 0], None, "got 0 behind 3 at 3"),
    "too large": ([0, 2, 5, 10], None, r"\[0, 10\), got 10 at 3"),
    "negative": ([-1, 2], None, "got -1 at 0"),
    "no integers": ([0, 2.0], None, "integers, got 2.0 at 1"),
    "too short": (CUT[:3], 4, r"\(4\), got 3"),
    "too long": (CUT, 3, r"\(3\), got 4"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_map_is_refused(name):
    ids, columns, message = BAD[name]
    with pytest.raises(ModelError, match=f"^draft_ids: .*{message}"):
        check_map(ids, 10, columns)


def test_a_map_of_everything_is_none():
    import torch

    assert check_map(list(range(10)), 10) is None
    assert check_map(torch.tensor(CUT), 10, 4).tolist() == CUT == check_map(tuple(CUT), 10).tolist()


# ---- proposals -------------------------------------------------------------------------------------------------------


class Cut(Scripted):
    """Reads 10 ids and says 4 of them: ``logits`` gives rows of 4."""

    def forward(self, tokens, cache, *, last):
        self.vocab_size, rows = 4, None
        cache.ids.extend(tokens)
        import torch

        rows = [self.logits(cache.ids[: cache.length - last + 1 + i]) for i in range(last)]
        self.vocab_size = 10
        return torch.tensor(rows, dtype=torch.float32).reshape(last, 4)


def seat_of(model, capacity=100):
    place = Place()
    place.version = Version(model, None, None)
    return place.seat(capacity)


@pytest.mark.parametrize("tree", [0, 6])
def test_proposals_are_the_targets_ids(tree):
    model = Cut(lambda prefix: [float((len(prefix) + c) % 4) for c in range(4)], 10)
    draft = GuardedDraft(ModelDraft(seat_of(model), 10, ids=check_map(CUT, 10), tree=tree), 10)
    ids = [1, 7, 3]  # the prompt may have any of the target's
    assert draft.outlook(ids) == (0, 8)
    found = draft.propose(3)
    assert draft.faults == [] and set(found.tokens) <= set(CUT)
    if not tree:  # the best column after n ids is 3 - n (mod 4)
        assert found.tokens == [CUT[(3 - n) % 4] for n in (3, 4, 5)]
