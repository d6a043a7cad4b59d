"""Vocabularies by content; drafts that know fewer ids to say: maps that are refused, proposals in the target's ids."""

import pytest
import torch

import specloop
from loop_laws import Cut, model_draft
from scripted import ToyTokenizer
from specloop.convert import convert
from specloop.drafts.vocabulary import check_ids, difference, map_of
from specloop.errors import ModelError, OptionError
from specloop.faults import GuardedDraft
from specloop.formats.huggingface import HuggingFaceCheckpoint
from specloop.loader import load_model
from test_huggingface import CONFIG, EMBEDDING, HEAD, tensors, write
from versions import pair_of, parts

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


def test_two_ids_swapped_are_refused_when_loaded():
    """Same size, same name: only the content tells."""

    def swapped():
        model, tokenizer, template = parts(1)()
        tokenizer.pieces[65], tokenizer.pieces[66] = tokenizer.pieces[66], tokenizer.pieces[65]
        tokenizer.fingerprint = "other"
        return model, tokenizer, template

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
        check_ids(ids, 10, columns)


def test_a_map_of_everything_says_nothing():
    class Model:
        draft_ids = None

    model = Model()
    assert map_of(model, 10) is None
    model.draft_ids = list(range(10))
    assert map_of(model, 10) is None
    for ids in (CUT, tuple(CUT), torch.tensor(CUT)):
        model.draft_ids = ids
        found = map_of(model, 10)
        assert found.tolist() == CUT and found.dtype == torch.int32


@pytest.mark.parametrize("tree", [0, 6])
def test_proposals_are_the_targets_ids(tree):
    model = Cut(
        lambda prefix: [float((len(prefix) + CUT.index(t)) % 4) if t in CUT else 9.0 for t in range(10)], 10, CUT
    )
    draft = GuardedDraft(model_draft(model, 10, tree=tree), 10)
    ids = [1, 7, 3]  # the prompt may have any of the target's
    assert draft.outlook(ids) == (0, 8)
    found = draft.propose(3)
    assert draft.faults == [] and set(found.tokens) <= set(CUT)
    if not tree:  # the best column after n ids is 3 - n (mod 4)
        assert found.tokens == [CUT[(3 - n) % 4] for n in (3, 4, 5)]


# ---- models in files -------------------------------------------------------------------------------------------------

SAYS = [*range(3, 300, 3)]  # 99 ids, and no end among them: 2 ends a text


def cut_model(folder, ids=SAYS, rows=None, **changes):
    """The model of test_huggingface.py with the head's rows for ``ids`` alone."""
    named = tensors()
    named[HEAD] = ("F32", named[EMBEDDING][1][ids[:rows] if rows else ids].contiguous())
    return write(folder, named, config=CONFIG | {"tie_word_embeddings": False, "draft_ids": ids} | changes)


@pytest.fixture
def folders(tmp_path):
    return str(write(tmp_path / "whole", tensors())), cut_model(tmp_path / "cut")


@pytest.mark.parametrize("dtype", ["f32", "int8"])
@pytest.mark.parametrize("packed", [False, True], ids=["folder", "pack"])
def test_rows_are_those_of_the_whole_model(folders, tmp_path, dtype, packed):
    whole, cut = folders
    if packed:
        with HuggingFaceCheckpoint(cut) as checkpoint:
            convert(checkpoint, tmp_path / "cut.pack", dtype=dtype)
        cut = tmp_path / "cut.pack"
    one, other = (load_model(path, dtype=dtype, kv=dtype)[0] for path in (whole, cut))
    ids = [5, 100, 7, 415, 42]
    rows = [model.forward(ids, model.new_cache(8), last=5) for model in (one, other)]
    assert other.draft_ids == tuple(SAYS) and rows[1].shape == (5, 99)
    assert torch.equal(rows[0][:, SAYS], rows[1])
    asked = specloop.generate_candidates(other, ids, 3)
    assert {token for token, _ in asked} <= set(SAYS)
    with pytest.raises(OptionError, match=r"^k: expected an integer from 1 to 99, got 100"):
        specloop.generate_candidates(other, ids, 100)


@pytest.mark.parametrize("tree", [None, 7])
def test_a_draft_that_says_fewer_ids(folders, tree):
    """Report F3: it does not know the id that ends the text; the target says it."""
    whole, cut = folders
    options = {"dtype": "f32", "kv": "f32", "context": 64}
    with specloop.load(whole, cut, k=3, **options) as pair, specloop.load(whole, "none", **options) as plain:
        proposed = 0
        for start in range(12):
            prompt = [start * 31 % 416, 7]
            result = pair.generate(prompt, max_new_tokens=40, tree=tree)
            counts = result.stats.speculation
            assert result.tokens == plain.generate(prompt, max_new_tokens=40).tokens and counts.faults == []
            proposed += counts.by_source["model"].proposed if "model" in counts.by_source else 0
        assert proposed
        if tree is None:
            result = pair.generate([5, 7], max_new_tokens=40, temperature=1.0, seed=3)
            assert result.stats.speculation.faults == [] and "model" in result.stats.speculation.by_source


def test_it_accepts_what_it_can_say(folders):
    """The cut model is the target's own: where the target says one of its ids, it proposed that one."""
    whole, cut = (load_model(path, dtype="f32", kv="f32")[0] for path in folders)
    from scripted import request_for
    from specloop.decode import decode
    from specloop.drafts.model import ModelDraft
    from specloop.versions import Place, Version

    place = Place()
    place.version = Version(cut, None, None)
    draft = ModelDraft(place.seat(64), whole.vocab_size, ids=map_of(cut, whole.vocab_size))
    request = request_for(whole, [5, 7], 50, draft, k=1)
    list(decode(whole, [request]))
    said = request.ids[2:]
    at, accepted = 0, 0
    while at < len(said):
        good = said[at] in SAYS and at + 1 < len(said)
        accepted, at = accepted + good, at + 1 + good
    assert request.stats.speculation.accepted == accepted and request.draft.faults == []


def test_a_cut_model_is_no_target(folders):
    with specloop.load(folders[1], "none") as pair, pytest.raises(OptionError, match=r"^target: .* can only draft"):
        pair.ready()


WRONG = {
    "a row too few": ({}, {"rows": 98}, r"lm_head.weight: expected shape \[99, 32\], got \[98, 32\]"),
    "twice": ({"draft_ids": [*SAYS[:5], *SAYS[4:98]]}, {}, "got 15 twice at 5"),
    "out of range": ({"draft_ids": [*SAYS[:98], 416]}, {}, r"\[0, 416\), got 416 at 98"),
    "no list": ({"draft_ids": "0-99"}, {}, "expected a list of ids"),
    "the embedding is the head": ({"tie_word_embeddings": True}, {}, "a head of their own rows"),
}


@pytest.mark.parametrize("name", WRONG)
def test_files_that_do_not_fit_their_map(tmp_path, name):
    changes, options, message = WRONG[name]
    with pytest.raises(ModelError, match=message):
        load_model(cut_model(tmp_path / "cut", **options, **changes), dtype="f32", kv="f32")
