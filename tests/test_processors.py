"""What a request adds to and takes from its rows: as transformers has it, and row by row the same as alone."""

import itertools
import math
import random

import numpy as np
import pytest
import torch

from scripted import ToyTokenizer
from specloop.errors import OptionError
from specloop.options import check_request
from specloop.processors import NEVER, Penalties, Rows, as_mask, make_processor

VOCAB, EOS, PROMPT = 40, [3, 17], 5


def processor(prompt_tokens=PROMPT, vocab=VOCAB, tokenizer=None, **options):
    return make_processor(check_request(**options), prompt_tokens, vocab, EOS, tokenizer)


def logits(rows, seed=0, vocab=VOCAB):
    rows = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4
    rows[:, 1::7] = 0.0
    rows[:, 2::11] = NEVER
    return rows


def changed(made, rows, ids, tokens=(), parents=None):
    rows = rows.clone()
    made.rows(rows, ids, tokens, parents)
    return rows


def ids_of(n, seed=0, vocab=VOCAB):
    return random.Random(seed).choices(range(vocab), k=n)


def allow_by_sum(ids):
    """A pure function of the ids that never forbids everything."""
    return [token for token in range(VOCAB) if (token + sum(ids)) % 3]


OPTIONS = {
    "bias": {"logit_bias": {0: 2.5, 7: -math.inf, "39": -1.25}},
    "repetition": {"repetition_penalty": 1.3},
    "reward": {"repetition_penalty": 0.8},
    "presence": {"presence_penalty": 0.75},
    "frequency": {"frequency_penalty": 0.5},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 0.3},
    "words": {"bad_words": [[5], [6, 7], [1, 2, 3], [2, 3], [1, 1], [4, 4, 4, 4]]},
    "no end": {"min_new_tokens": 9},
    "allowed": {"allowed": allow_by_sum},
}
OPTIONS["all"] = {name: value for options in OPTIONS.values() for name, value in options.items()} | {
    "repetition_penalty": 1.2
}


def test_none_is_made_where_nothing_is_asked_for():
    assert processor() is None
    assert processor(temperature=1.0, top_k=3, stop="x", logprobs=2, callback=print) is None
    assert all(processor(**options) is not None for options in OPTIONS.values())


# ---- one row: what transformers does ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hf():
    return pytest.importorskip("transformers", reason="compares with transformers' processors").generation


@pytest.mark.parametrize("length", [PROMPT, PROMPT + 1, PROMPT + 8, PROMPT + 9, 60])
@pytest.mark.parametrize("name", ["bias", "repetition", "reward", "words", "no end", "allowed", "all"])
def test_one_row_is_that_of_transformers(hf, name, length):
    options = dict(OPTIONS[name]) | {"presence_penalty": 0.0, "frequency_penalty": 0.0}  # it has none
    theirs = hf.LogitsProcessorList()
    if "logit_bias" in options:
        theirs.append(hf.SequenceBiasLogitsProcessor({(int(token),): b for token, b in options["logit_bias"].items()}))
    if "repetition_penalty" in options:
        theirs.append(hf.RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    if "bad_words" in options:
        theirs.append(hf.NoBadWordsLogitsProcessor(options["bad_words"], EOS))
    if "min_new_tokens" in options:
        theirs.append(hf.MinNewTokensLengthLogitsProcessor(PROMPT, options["min_new_tokens"], EOS))
    if "allowed" in options:
        theirs.append(hf.PrefixConstrainedLogitsProcessor(lambda _, ids: allow_by_sum(ids.tolist()), 1))
    for seed in range(8):
        ids, rows = ids_of(length, seed, vocab=9 if seed % 2 else VOCAB), logits(1, seed)
        assert torch.equal(changed(processor(**options), rows, ids), theirs(torch.tensor([ids]), rows.clone()))


@pytest.mark.parametrize("presence, frequency", [(0.75, 0.0), (0.0, 0.5), (0.75, -0.5)])
def test_presence_and_frequency_count_the_answer_alone(presence, frequency):
    ids, rows = [8, 8, 9, 9, 9, 8, 10, 8, 11, 8], logits(1)
    want = rows[0].clone()
    for token, count in ((8, 3), (10, 1), (11, 1)):  # of ids[5:]
        want[token] -= frequency * count + presence
    made = processor(presence_penalty=presence, frequency_penalty=frequency)
    torch.testing.assert_close(changed(made, rows, ids)[0], want, rtol=0, atol=0)


# ---- many rows: each as if it were alone -----------------------------------------------------------------------------

CHAINS = [[], [8], [5, 6, 7, 1, 2], [4] * 8, [1, 2, 3, 1, 1, 17, 2, 3]]
TREES = [[-1, -1, -1], [-1, 0, 1, 0, -1, 4], [-1, -1, 0, 1, 2, 2, 3, 0]]


def alone(options, rows, ids, tokens, parents):
    """Every row by a processor of its own that has seen nothing else."""
    done, paths = [], [[]]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*paths[parent + 1], token])
    for row, path in zip(rows, paths, strict=True):
        done.append(changed(processor(**options), row[None], ids + path)[0])
    return torch.stack(done)


def judged(rows, tokens, parents):
    """The rows that plain decoding can come to: no draft on the way that can't be, and no end."""
    can = [True]
    for token, parent in zip(tokens, parents, strict=True):
        can.append(can[parent + 1] and rows[parent + 1, token] > NEVER and token not in EOS)
    return can


@pytest.mark.parametrize("length", [PROMPT, 12, 50])
@pytest.mark.parametrize("name", OPTIONS)
def test_rows_of_chains_and_trees_are_those_of_texts_alone(name, length):
    made = processor(**OPTIONS[name])  # one for all calls: what it saw must not matter
    trees = [(ids_of(len(parents), i, 9), parents) for i, parents in enumerate(TREES)]
    for seed, (tokens, parents) in enumerate([(t, None) for t in CHAINS] + trees):
        ids, rows = ids_of(length, seed, 12), logits(len(tokens) + 1, seed)
        links = range(-1, len(tokens) - 1) if parents is None else parents
        found, want = changed(made, rows, ids, tokens, parents), alone(OPTIONS[name], rows, ids, tokens, links)
        can = torch.tensor(judged(want, tokens, links))
        assert torch.equal(found[can], want[can])


@pytest.mark.parametrize("name", ["penalties", "words", "no end", "allowed"])
def test_a_row_that_sees_one_id_too_few_would_show(name):
    """The comparison above: it must not hold for a wrong path."""
    tokens, ids = [1, 2, 1, 1, 4, 4, 4, 4], ids_of(12, 1, 12)
    rows = logits(len(tokens) + 1)
    late = changed(processor(**OPTIONS[name]), rows, ids, tokens, [-1, *range(-1, len(tokens) - 2)])
    assert not torch.equal(late, alone(OPTIONS[name], rows, ids, tokens, range(-1, len(tokens) - 1)))


def test_refused_drafts_leave_no_trace():
    made, ids = processor(**OPTIONS["all"]), ids_of(9)
    rows = logits(1)
    want = changed(made, rows, ids)
    changed(made, logits(6), ids, [8, 8, 8, 8, 8])
    assert torch.equal(changed(made, rows, ids), want)
    assert torch.equal(changed(made, rows, ids[:7]), changed(processor(**OPTIONS["all"]), rows, ids[:7]))


def test_the_last_bit_does_not_depend_on_the_number_of_rows():
    made, rows, ids = Penalties(0, 1.1, 0.3, 0.7), torch.randn(9, 4001), ids_of(300, vocab=4001)

    def run(rows, ids, tokens):
        rows = rows.clone()
        made(Rows(rows, ids, tokens, None))
        return rows

    many = run(rows, ids, ids[:8])
    assert torch.equal(many, torch.cat([run(rows[i : i + 1], ids + ids[:i], []) for i in range(9)]))


# ---- the order -------------------------------------------------------------------------------------------------------


def test_the_bias_comes_before_the_penalty():
    row = torch.zeros(1, VOCAB)
    row[0, 8] = -1.0
    made = processor(logit_bias={8: 3.0}, repetition_penalty=2.0)
    assert changed(made, row, [8])[0, 8] == 1.0  # (-1 + 3) / 2, and not -2 + 3


def test_what_is_forbidden_stays_so():
    made = processor(bad_words=[[8]], logit_bias={8: 100.0}, allowed=lambda ids: [8, 9])
    row = changed(made, logits(1), [1])[0]
    assert row[8] == NEVER and (row > NEVER).nonzero().flatten().tolist() == [9]


# ---- what functions may return ---------------------------------------------------------------------------------------


def test_masks_of_every_kind():
    want = torch.zeros(VOCAB, dtype=torch.bool)
    want[[2, 9]] = True
    kinds = [[9, 2], (2, 9), {2, 9}, iter([2, 9]), torch.tensor([2, 9]), np.array([2, 9]), want, want.numpy()]
    kinds += [want.tolist(), tuple(want.tolist()), [2, 2, 9], [np.int64(2), 9]]
    for kind in kinds:
        assert torch.equal(as_mask(kind, VOCAB), want)
    assert not as_mask([], VOCAB).any() and as_mask(range(VOCAB), VOCAB).all()


@pytest.mark.parametrize(
    "answer, message",
    [
        (torch.ones(39, dtype=torch.bool), r"a mask of 40 booleans, got one of shape \[39\]"),
        ([True] * 41, r"a mask of 40 booleans, got one of shape \[41\]"),
        (np.ones((1, 40), bool), r"a mask of 40 booleans, got one of shape \[1, 40\]"),
        ([1, 40], r"token ids in \[0, 40\), got 40"),
        ([-1], "got -1"),
        ([1, True], "expected token ids, got True"),
        (torch.ones(40), "expected token ids, got 1.0"),
        ("all", "expected token ids, got 'a'"),
        (7, "expected booleans, ids or None, got 7"),
        ([], "at least one id to follow 6 ids, got none"),
        (torch.zeros(40, dtype=torch.bool), "at least one id to follow 6 ids, got none"),
    ],
)
def test_answers_that_are_no_masks(answer, message):
    with pytest.raises(OptionError, match=f"^allowed: .*{message}"):
        changed(processor(allowed=lambda ids: answer), logits(1), ids_of(6))


def test_a_function_is_asked_only_for_texts_that_can_be():
    asked = []

    def allowed(ids):
        asked.append(ids)
        assert ids[:2] == [1, 2] and all((a + b) % 2 for a, b in itertools.pairwise(ids))
        return [token for token in range(VOCAB) if (token + ids[-1]) % 2]

    made = processor(allowed=allowed)
    changed(made, logits(5), [1, 2], [5, 6, 8, 9])  # 8 may not follow 6
    assert asked == [[1, 2], [1, 2, 5], [1, 2, 5, 6]]
    asked.clear()
    changed(made, logits(4), [1, 2], [5, 17, 4])  # 5 may be followed by even ids only; 17 is an end, and odd
    assert asked == [[1, 2], [1, 2, 5]]
    asked.clear()
    changed(made, logits(3), [1, 2], [17, 4])  # behind the end
    assert asked == [[1, 2]]
    asked.clear()
    changed(made, logits(6), [1, 2], [5, 6, 4, 7, 8], [-1, 0, -1, 2, 1])  # 4 may not follow 2, nor 8 a 6
    assert asked == [[1, 2], [1, 2, 5], [1, 2, 5, 6]]


def test_the_list_that_a_function_gets_is_its_own():
    ids = [1, 2]
    changed(processor(allowed=lambda given: given.clear()), logits(2), ids, [4])
    assert ids == [1, 2]


def test_a_function_that_fails_behind_a_draft_forbids_what_follows():
    def allowed(ids):
        if len(ids) > 4:
            raise KeyError("no such state")

    made, rows = processor(allowed=allowed), logits(5)
    found = changed(made, rows, [1, 2], [4, 5, 6, 7])
    assert torch.equal(found[:3], rows[:3])
    assert (found[3] == NEVER).all() and torch.equal(found[4], rows[4])  # the row behind it is never judged
    with pytest.raises(KeyError, match="no such state"):
        changed(made, rows[:1], [1, 2, 4, 5, 6])


# ---- words -----------------------------------------------------------------------------------------------------------


def test_strings_are_banned_alone_and_after_a_space():
    tokenizer = ToyTokenizer(["", "foo", " foo", "b", "ar", " ", "x"])
    made = processor(vocab=7, tokenizer=tokenizer, bad_words=["foo", "bar", [6]])
    row = torch.zeros(1, 7)
    banned = lambda *before: (changed(made, row, list(before))[0] == NEVER).nonzero().flatten().tolist()
    assert banned(0) == [1, 2, 6] and banned(3) == [1, 2, 4, 6] and banned(5, 3) == [1, 2, 4, 6]
    with pytest.raises(OptionError, match="bad_words: expected words that the model's tokens can write, got 'q'"):
        processor(vocab=7, tokenizer=tokenizer, bad_words=["q"])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"logit_bias": {40: 1.0}}, r"logit_bias: expected token ids in \[0, 40\), got 40"),
        ({"bad_words": [[1, 99]]}, r"bad_words: expected token ids in \[0, 40\), got 99"),
    ],
)
def test_ids_that_are_not_the_models(options, message):
    with pytest.raises(OptionError, match=message):
        processor(**options)


@pytest.mark.slow
def test_it_takes_little_time():
    """All options on nine rows of a real vocabulary: a small part of a pass over them (some 15 ms)."""
    import time

    made = processor(
        vocab=49152, repetition_penalty=1.1, presence_penalty=0.5, bad_words=[[5], [1, 2]], min_new_tokens=9
    )
    ids, rows = ids_of(2048, vocab=49152), torch.randn(9, 49152)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        made.rows(rows, ids, [1, 2, 3, 4, 5, 6, 7, 8])
        times.append(time.perf_counter() - start)
    assert min(times) < 3e-3
