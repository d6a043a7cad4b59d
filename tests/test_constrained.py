"""Bias, penalties, bans, masks, grammars and log-probabilities through the loop.

The ids are those of plain decoding, however many drafts a round had, and whoever shared it.
"""

import functools
import itertools
import math
import random
from collections import Counter

import pytest
import torch

from naive_rows import TreeDraft, plainly, processed
from scripted import FunctionDraft, Scripted, argmax, request_for, scripted
from specloop.decode import decode
from specloop.drafts.lookup import LookupDraft
from specloop.errors import OptionError
from specloop.grammar import Cursor
from specloop.options import check_request
from specloop.processors import Allowed, Penalties, Processor, make_processor
from specloop.threshold import Threshold

V, END, PROMPT, TOKENS = 11, 9, [1, 2, 1, 2, 1], 40
KS = [0, 1, 2, 3, 5, 8]


def odd_after_even(ids):
    return [token for token in range(V) if (token + ids[-1]) % 2 or token == END]


LONG = {"min_new_tokens": 30}  # the model would like to end much sooner
OPTIONS = {
    "bias": {"logit_bias": {1: -math.inf, 4: 1.5, 7: -1.0}},
    "repetition": {"repetition_penalty": 1.3},
    "frequency": {"frequency_penalty": 0.5},
    "presence": {"presence_penalty": 0.7},
    "words": {"bad_words": ((1,), (8, 2), (2, 8), (7, 0), (0, 7, 0), (2, 3))},
    "allowed": {"allowed": odd_after_even},
}
OPTIONS["penalties"] = OPTIONS["repetition"] | OPTIONS["frequency"]
OPTIONS["all"] = {name: value for options in OPTIONS.values() for name, value in options.items()}
OPTIONS = {name: options | LONG for name, options in OPTIONS.items()} | {"min": LONG}


@functools.cache
def taste(*context):
    chance = random.Random(str(context))
    return [chance.gauss(0.0, 1.0) + 0.8 * (token == END) for token in range(V)]


def repeating(seed=0):
    """A model whose taste changes every 16 ids; meanwhile it repeats itself, in texts that a nudge changes."""
    return Scripted(lambda ids: taste(seed, len(ids) // 16, ids[-1], ids[-2] % 2), V, eos_ids=[END])


def made(options, prompt=PROMPT):
    return make_processor(check_request(max_new_tokens=TOKENS, **options), len(prompt), V, [END], None)


def oracle_of(model, options):
    return lambda ids: argmax(processed(model.logits(ids), ids, len(PROMPT), [END], **options))


def drafts_of(model, options):
    right = oracle_of(model, options)
    return {
        "none": None,
        "oracle": FunctionDraft(lambda ids, j: right(ids)),
        "blind": FunctionDraft(lambda ids, j: argmax(model.logits(ids))),  # knows nothing of the options
        "flaky": FunctionDraft(lambda ids, j: (right(ids) + (len(ids) % 3 == 0)) % V),
        "forbidden": FunctionDraft(lambda ids, j: 1),
        "lookup": LookupDraft(1),
        "tree": TreeDraft(lambda ids, j: (right(ids) + (j in (0, 4))) % V, V, [-1, -1, 0, 1, 1, 3, 5]),
    }


def run(model, options, *, prompt=PROMPT, tokens=TOKENS, **named):
    request = request_for(model, prompt, tokens, processor=made(options, prompt), **named)
    list(decode(model, [request]))
    if request.failure is not None:
        raise request.failure
    return request


@pytest.mark.parametrize("kind", ["none", "oracle", "blind", "flaky", "forbidden", "lookup", "tree"])
@pytest.mark.parametrize("name", OPTIONS)
def test_ids_are_those_of_plain_decoding(name, kind):
    options = OPTIONS[name]
    for k in KS[:1] if kind == "none" else KS[1:]:
        want, model = plainly(repeating(k), PROMPT, TOKENS, **options), repeating(k)  # a text of its own
        request = run(model, options, draft=drafts_of(model, options)[kind], k=k)
        assert request.ids[len(PROMPT) :] == want
        counts = request.stats.speculation
        if kind == "oracle":
            assert counts.accepted == counts.evaluated > 0
        if kind == "tree" and k > 1:
            assert counts.accepted > counts.rounds / 2


def test_every_option_changes_the_text():
    texts = [
        tuple(tuple(plainly(repeating(seed), PROMPT, TOKENS, **options)) for seed in range(5))
        for options in [{}, *OPTIONS.values()]
    ]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("kind", ["flaky", "tree", "lookup"])
def test_requests_with_options_of_their_own_share_rounds(kind):
    model, requests = repeating(), []
    for options in OPTIONS.values():
        draft = drafts_of(model, options)[kind]
        requests.append(request_for(model, PROMPT, TOKENS, draft, k=3, processor=made(options)))
    requests.append(request_for(model, PROMPT, TOKENS, drafts_of(model, {})[kind], k=5))  # without any
    crew = list(requests)
    list(decode(model, crew))
    for request, options in zip(requests, [*OPTIONS.values(), {}], strict=True):
        assert request.ids[len(PROMPT) :] == plainly(repeating(), PROMPT, TOKENS, **options)


@pytest.mark.parametrize("kind", ["oracle", "flaky", "forbidden", "tree"])
def test_what_was_counted_is_a_recount_of_the_text(kind):
    options, model = OPTIONS["penalties"], repeating()
    request = run(model, options, draft=drafts_of(model, options)[kind], k=5)
    penalties = next(step for step in request.processor.steps if isinstance(step, Penalties))
    ids, counted = request.ids, penalties._ids
    assert counted == ids[: len(counted)] and len(ids) - 6 <= len(counted) < len(ids)  # as of the last round
    counts = dict(zip(penalties._tokens.tolist(), penalties._count.tolist(), strict=True))
    assert {t: n for t, n in counts.items() if n} == Counter(counted[len(PROMPT) :]) and set(counts) == set(counted)


class TooFew(Processor):
    """Rows behind the first see one id too few."""

    def rows(self, logits, ids, tokens, parents=None):
        for row in range(len(tokens) + 1):
            super().rows(logits[row : row + 1], ids + tokens[: max(row - 1, 0)], [])


class PerRound(Processor):
    """Every row sees the committed ids alone, as if things were counted once per round."""

    def rows(self, logits, ids, tokens, parents=None):
        for row in range(len(tokens) + 1):
            super().rows(logits[row : row + 1], ids, [])


@pytest.mark.parametrize("fault", [TooFew, PerRound])
@pytest.mark.parametrize("name", ["repetition", "frequency", "presence", "words", "min", "allowed"])
def test_such_faults_would_be_found(name, fault):
    options, differ = OPTIONS[name], 0
    for seed in range(10):
        request = request_for(repeating(seed), PROMPT, TOKENS, drafts_of(repeating(seed), options)["blind"], k=5)
        request.processor = fault(made(options).steps)
        list(decode(repeating(seed), [request]))
        differ += request.ids[len(PROMPT) :] != plainly(repeating(seed), PROMPT, TOKENS, **options)
    assert differ


# ---- the reported cases ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", KS)
def test_a_forbidden_id_never_comes_though_draft_and_target_want_it(k):
    model = scripted(lambda prefix: 5, V)
    request = run(model, {"logit_bias": {5: -math.inf}}, draft=FunctionDraft(lambda ids, j: 5), k=k)
    assert 5 not in request.ids and len(request.ids) == len(PROMPT) + TOKENS


RULES = {
    "token": dict,
    "block": dict,
    "threshold": lambda: {"threshold": Threshold(0.05, 4, 0.5)},  # lends whatever it can
}


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
@pytest.mark.parametrize("rule", RULES)
def test_what_is_forbidden_never_comes_under_any_rule(rule, temperature):
    options = {"bad_words": [[3], [2, 4]], "logit_bias": {5: -math.inf}, "min_new_tokens": 30}
    for seed in range(4):
        draft = FunctionDraft(lambda ids, j, seed=seed: (seed, 3, 5, END, 2, 4)[(len(ids) * 7 + j) % 6])
        named = {"draft": draft, "k": seed + 1, "sampling": {"temperature": temperature, "seed": seed}}
        request = run(repeating(seed), options, rule=rule, **RULES[rule](), **named)
        text = request.ids[len(PROMPT) - 1 :]
        assert not {3, 5} & set(text[1:]) and (2, 4) not in set(itertools.pairwise(text))
        assert END not in text[:30]


@pytest.mark.parametrize("k", KS)
def test_min_new_tokens_counts_tokens_and_not_rounds(k):
    says = scripted(lambda prefix: END if len(prefix) == len(PROMPT) + 4 else 3, V, eos_ids=[END])  # the fifth
    request = run(says, {"min_new_tokens": 4}, draft=FunctionDraft(lambda ids, j: argmax(says.logits(ids))), k=k)
    assert request.ids[len(PROMPT) :] == [3, 3, 3, 3, END] and request.finish_reason == "stop"
    always = scripted(lambda prefix: END, V, eos_ids=[END])
    request = run(always, {"min_new_tokens": 4}, draft=FunctionDraft(lambda ids, j: (END, 10)[j % 2]), k=k)
    assert len(request.ids) == len(PROMPT) + 5 and request.ids.index(END) == len(PROMPT) + 4


@pytest.mark.parametrize("k", KS)
def test_max_new_tokens_is_exact_though_the_lookup_has_more(k):
    model = repeating()
    request = run(model, {"repetition_penalty": 1.1, "min_new_tokens": 2}, draft=LookupDraft(1), k=k, tokens=2)
    assert len(request.ids) == len(PROMPT) + 2 and request.finish_reason == "length"


class Digits:
    """[0-2]{3} in ids 0..2; what should not be asked of it is noted."""

    def __init__(self):
        self.taken, self.wrong = [], []

    def forward(self, token):
        if len(self.taken) == 3 or token > 2:
            self.wrong.append((list(self.taken), token))
        self.taken.append(token)
        return True

    def back(self, count):
        if not 0 < count <= len(self.taken):
            self.wrong.append((list(self.taken), -count))
        del self.taken[len(self.taken) - count :]

    def mask(self):
        return torch.arange(V) < 3 if len(self.taken) < 3 else None


DIGIT_DRAFTS = {
    "letters": lambda ids, j: 7,
    "digits, and on": lambda ids, j: (len(ids) * 2) % 3,
    "right, then a fourth": lambda ids, j: [2, 1, 0, 1, 2][(len(ids) + len(PROMPT)) % 5],
    "beyond the end": lambda ids, j: (0, END, 1, 2)[j % 4],
}


@pytest.mark.parametrize("draft", DIGIT_DRAFTS)
@pytest.mark.parametrize("k", KS)
def test_a_grammar_is_followed_and_never_asked_after_its_end(draft, k):
    def text(draft, k):
        model = Scripted(lambda prefix: [math.sin(3 * t + 2 * len(prefix)) for t in range(V)], V, eos_ids=[END])
        matcher = Digits()
        steps = [Allowed(Cursor(matcher, len(PROMPT), V, [END]).allowed, V, [END])]
        request = request_for(model, PROMPT, 20, draft, k=k, processor=Processor(steps))
        list(decode(model, [request]))
        assert matcher.wrong == [] and request.finish_reason == "stop"
        return request.ids[len(PROMPT) :]

    found = text(FunctionDraft(DIGIT_DRAFTS[draft]), k)
    assert found == text(None, 0) and len(found) == 4 and max(found[:3]) < 3 and found[3] == END


# ---- errors of a caller's function -----------------------------------------------------------------------------------


@pytest.mark.parametrize("k, rule", [*((k, "token") for k in KS), (3, "block"), (3, "threshold")])
@pytest.mark.parametrize(
    "answer, error, message",
    [
        (None, KeyError, "no such state"),
        ([], OptionError, "allowed: expected at least one id"),
        ([V], OptionError, r"allowed: expected token ids in \[0, 11\), got 11"),
        (torch.ones(V + 1, dtype=torch.bool), OptionError, "allowed: expected a mask of 11 booleans"),
    ],
)
def test_a_function_that_fails_ends_the_text_where_plain_decoding_would(answer, error, message, k, rule):
    def allowed(ids):
        if len(ids) < len(PROMPT) + 7:
            return odd_after_even(ids)
        if answer is None:
            raise KeyError("no such state")
        return answer

    model, options = repeating(), LONG | {"allowed": allowed}
    others = [request_for(model, PROMPT, 20, LookupDraft(1), k=2, processor=made(LONG)) for _ in range(2)]
    right = oracle_of(model, OPTIONS["allowed"])
    named = {
        "k": k,
        "processor": made(options),
        "rule": rule,
        "threshold": Threshold() if rule == "threshold" else None,
    }
    request = request_for(model, PROMPT, 20, FunctionDraft(lambda ids, j: right(ids)), **named)
    list(decode(model, [others[0], request, others[1]]))
    with pytest.raises(error, match=message):
        raise request.failure
    assert request.ids[len(PROMPT) :] == plainly(repeating(), PROMPT, 7, **OPTIONS["allowed"])
    for other in others:  # go on as if nothing had happened
        assert other.failure is None and other.ids[len(PROMPT) :] == plainly(repeating(), PROMPT, 20, **LONG)


# ---- seeds and random numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 3])
def test_seeds(k):
    """The same seed, the same text; another one differs within 32 ids; company changes nothing."""
    options = {"frequency_penalty": 0.3, "min_new_tokens": 32}

    def requests(model, *seeds):
        return [
            request_for(model, PROMPT, 32, LookupDraft(1), k=k, processor=made(options), sampling=sampling)
            for sampling in ({"temperature": 1.0, "seed": seed} for seed in seeds)
        ]

    def texts(*seeds):
        model = repeating()
        crew = requests(model, *seeds)
        kept = list(crew)
        list(decode(model, crew))
        return [request.ids for request in kept]

    (one,), (again,), (other,) = texts(1), texts(1), texts(2)
    assert one == again != other
    assert texts(1, 2) == [one, other] and texts(2, -(2**63), 1)[::2] == [other, one]


@pytest.mark.parametrize("k", KS)
def test_random_numbers_belong_to_emitted_ids_alone(k):
    """After a stop inside a round, twenty more ids are those of a generator that never saw the ids behind the stop."""
    sampling, options = {"temperature": 1.0, "seed": 5}, {"frequency_penalty": 0.3, "min_new_tokens": TOKENS}
    model, seen = repeating(), []

    def stop(token):
        seen.append(token)
        return len(seen) == 7

    draft = lambda: FunctionDraft(lambda ids, j: argmax(model.logits(ids)))
    request = run(model, options, draft=draft(), k=k, sampling=sampling, stop=stop)
    assert len(request.ids) == len(PROMPT) + 7

    def go_on(draft, k):
        later = request_for(model, request.ids, 20, draft, k=k, processor=made(options), sampling=sampling)
        list(decode(model, [later]))
        return later.ids

    assert go_on(None, 0) == go_on(None, 0)
    assert go_on(draft(), k) == go_on(draft(), k)
    if k == 0:  # one text in two pieces is the text in one piece
        whole = run(model, options, sampling=sampling, tokens=27)
        assert go_on(None, 0) == whole.ids


# ---- log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["oracle", "flaky", "tree"])
@pytest.mark.parametrize("name", ["penalties", "words", "all"])
def test_log_probabilities_are_those_of_plain_decoding(name, kind):
    options = OPTIONS[name]

    def scored(kind, k):
        model = repeating()
        named = {"logprobs": [], "top_logprobs": 3, "draft": drafts_of(model, options)[kind], "k": k}
        return run(model, options, **named)

    plain = scored("none", 0)
    ids = plain.ids[len(PROMPT) :]
    assert len(plain.logprobs) == len(ids)
    for n, (own, top) in enumerate(plain.logprobs):
        before = PROMPT + ids[:n]
        row = torch.tensor(processed(repeating().logits(before), before, len(PROMPT), [END], **options))
        logs = torch.log_softmax(row.double(), 0)
        assert own == pytest.approx(float(logs[ids[n]]), abs=1e-5) and top[0][0] == ids[n]
        best = [value for value in logs.topk(3).values.tolist() if value > -math.inf]
        assert [value for _, value in top] == pytest.approx(best, abs=1e-5)
    for k in (1, 3, 8):
        found = scored(kind, k)
        assert found.ids == plain.ids and len(found.logprobs) == len(ids)
        for (own, top), (want, want_top) in zip(found.logprobs, plain.logprobs, strict=True):
            assert own == pytest.approx(want, abs=1e-5) and [i for i, _ in top] == [i for i, _ in want_top]
