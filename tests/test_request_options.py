"""Options of a request: bad ones name themselves before anything is decoded; good ones hold however a text is made."""

import json
import math

import pytest
import torch

import specloop
from loops import PROMPTS, TOKENS, pair_on, play
from naive_rows import plainly, processed
from scripted import Scripted, ToyTokenizer, argmax, scripted
from specloop.options import check_request, resolve_aliases
from specloop.pair import Pair

INT64 = 2**63


@pytest.mark.parametrize(
    "options",
    [
        {"rule": "typical"},
        {"rule": 3},
        {"theta": 0.3},  # of a rule that was not asked for
        {"theta_window": 64},
        {"agreement": 0.9},
        {"theta": 0.0, "rule": "threshold"},
        {"theta": -1, "rule": "threshold"},
        {"theta": math.nan, "rule": "threshold"},
        {"theta": math.inf, "rule": "threshold"},
        {"theta": "high", "rule": "threshold"},
        {"theta_window": 0, "rule": "threshold"},
        {"theta_window": 1.5, "rule": "threshold"},
        {"agreement": 0.0, "rule": "threshold"},
        {"agreement": 1.01, "rule": "threshold"},
        {"agreement": math.nan, "rule": "threshold"},
        {"confidence": -0.1},
        {"confidence": math.nan},
        {"confidence": 0.5},  # the draft is a lookup
        {"tree": 0},
        {"tree": -3},
        {"tree": True},
        {"tree": 8},  # the draft is a lookup
        {"seed": INT64},
        {"seed": -INT64 - 1},
        {"seed": 1.0},
        {"seed": True},
        {"logit_bias": [1, 2]},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {1: math.inf}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {13: 1.0}},  # the vocabulary has 13
        {"logit_bias": {"a": 1.0}},
        {"logit_bias": {1.5: 1.0}},
        {"logit_bias": {1: "much"}},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.2},
        {"repetition_penalty": math.inf},
        {"presence_penalty": math.nan},
        {"frequency_penalty": "some"},
        {"bad_words": "word"},
        {"bad_words": [""]},
        {"bad_words": [[]]},
        {"bad_words": [[1, -2]]},
        {"bad_words": [[1, 13]]},
        {"bad_words": [1]},
        {"bad_words": ["€"]},  # no token of the model can write it
        {"min_new_tokens": -1},
        {"min_new_tokens": 9, "max_new_tokens": 8},
        {"allowed": [1, 2]},
        {"allowed": torch.ones(13, dtype=torch.bool)},
        {"grammar": "yes"},
        {"grammar": 7},
        {"on_fallbacks": "panic"},
        {"max_fallbacks": 0},
        {"draft_until": -1},
        {"verify_timeout": 0},
        {"verify_timeout": math.nan},
        {"logprobs": -1},
        {"top_k": 2**63},
        {"theta_window": 2**63, "rule": "threshold"},
        {"logprobs": True},
        {"callback": "print"},
        {"draft_temperature": 0.5},
    ],
    ids=str,
)
def test_bad_options_name_themselves(options):
    with pytest.raises(specloop.OptionError, match=rf"^{next(iter(options))}: "):
        pair_on("scripted").stream([1], **options)


@pytest.mark.parametrize("prompts", [[], (), "text", 7, None])
def test_a_batch_has_prompts(prompts):
    with pytest.raises(specloop.PromptError, match="prompts: expected a list of at least one prompt"):
        pair_on("scripted").generate_batch(prompts)


def test_defaults_are_resolved_and_neutral():
    options = check_request()
    assert options.theta is options.theta_window is options.agreement is options.tree is options.logprobs is None
    lossy = check_request(rule="threshold")
    assert (lossy.theta_window, lossy.agreement) == (64, 0.98)
    assert (options.on_fallbacks, options.max_fallbacks, options.draft_until) == ("plain", 8, 4096)


def test_the_names_that_others_have():
    given = {"max_tokens": 5, "min_tokens": 2, "bad_words_ids": [[1]], "stop_strings": "x", "top_logprobs": 3}
    ours = {"max_new_tokens": 5, "min_new_tokens": 2, "bad_words": [[1]], "stop": "x", "logprobs": 3}
    assert resolve_aliases(given) == ours
    with pytest.raises(specloop.OptionError, match=r"^max_tokens: means max_new_tokens=5"):
        resolve_aliases({"max_tokens": 5, "max_new_tokens": 6})
    result = pair_on("scripted").generate([1], **given)
    assert len(result.tokens) <= 5 and len(result.logprobs) == len(result.tokens)


def test_settings_are_json_whatever_was_chosen():
    pair = pair_on("scripted")
    chosen = {"logit_bias": {"3": -math.inf, 4: 2}, "bad_words": ["a", [1, 2]], "allowed": lambda ids: None}
    result = pair.generate([1], max_new_tokens=4, callback=[].append, logprobs=2, stop="zz", **chosen)
    report = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert report["settings"]["logit_bias"] == {"3": "-inf", "4": 2.0}
    assert report["settings"]["bad_words"] == ["a", [1, 2]] and "lambda" in report["settings"]["allowed"]
    assert [len(entry["top"]) for entry in report["logprobs"]] == [2] * 4


# ---- one text, however it is made ------------------------------------------------------------------------------------


def steps_of_two(ids):
    return [token for token in range(13) if (token - ids[-1]) % 13 not in (0, 5)]


SETS = {
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.2},
    "bans": {"logit_bias": {4: -math.inf, 7: 1.0}, "bad_words": [[1], [2, 3], [9, 0, 5]]},
    "mask": {"allowed": steps_of_two, "frequency_penalty": 0.8},
}


@pytest.mark.parametrize("shown", ["whole", "stream"])
@pytest.mark.parametrize("name", SETS)
def test_texts_alone_and_together(name, shown):
    pair, options = pair_on("scripted"), SETS[name]
    want = [plainly(pair.model, list(p), n, **options) for p, n in zip(PROMPTS, TOKENS, strict=True)]
    for k, batch in [(0, 1), (0, 5), (1, 2), (3, 1), (5, 5), (8, 2), ("auto", 5)]:
        results = play(pair, PROMPTS[:batch], TOKENS[:batch], shown, k=k, **options)
        assert [result.tokens for result in results] == want[:batch]


@pytest.mark.parametrize("kv", ["int8", "f32"])
def test_a_real_model_with_either_cache(kv):
    pair = pair_on(kv)
    size = pair.model.vocab_size
    odd = torch.arange(size) % 2 == 1
    options = {
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.5,
        "bad_words": [[5, 9], [7]],
        "allowed": lambda ids: ~odd if len(ids) % 3 else None,
        "min_new_tokens": 7,
        "logprobs": 3,
    }
    plain = play(pair, PROMPTS, TOKENS, "whole", k=0, **options)
    assert plain[0].tokens != play(pair, PROMPTS[:1], TOKENS[:1], "whole", k=0)[0].tokens
    for k in (1, 3, 8):
        for found, want in zip(play(pair, PROMPTS, TOKENS, "whole", k=k, **options), plain, strict=True):
            assert found.tokens == want.tokens
            for (own, top), (plain_own, plain_top) in zip(found.logprobs, want.logprobs, strict=True):
                assert own == pytest.approx(plain_own, abs=1e-5) and [i for i, _ in top] == [i for i, _ in plain_top]


def test_every_request_of_a_batch_has_options_of_its_own():
    pair, prompt = pair_on("scripted"), list(PROMPTS[2])
    each = [*SETS.values(), {}, {"max_new_tokens": 3}, {"min_new_tokens": 20}]
    results = pair.generate_batch([prompt] * len(each), each=each, max_new_tokens=20, k=3)
    for options, result in zip(each, results, strict=True):
        naive = {name: value for name, value in options.items() if name != "max_new_tokens"}
        assert result.tokens == plainly(pair.model, prompt, options.get("max_new_tokens", 20), **naive)
    assert results[0].tokens != results[3].tokens


class Filled(ToyTokenizer):
    """The same vocabulary, filled up to another size."""

    fingerprint = "letters"

    def __init__(self, size):
        super().__init__([*"abcdefghijk", *[""] * (size - 11)])


def test_after_an_exchange_of_the_target_the_options_hold_on():
    """Also where the other model's rows are wider: unused ids at the end make no other vocabulary."""

    def parts(size, shift):
        logits = lambda ids: [math.sin(3 * token + ids[-1] + shift) - 9 * (token > 10) for token in range(size)]
        return lambda: (Scripted(logits, size), Filled(size), None)

    options = {"allowed": lambda ids: [t for t in range(11) if t != ids[-1]], "frequency_penalty": 0.9}
    with Pair(parts(12, 0), draft="none") as pair:
        stream = pair.stream([1, 2, 1, 2], max_new_tokens=24, **options)
        ids = [1, 2, 1, 2, *plainly(pair.model, [1, 2, 1, 2], 7, **options)]
        seen = [next(stream).token for _ in range(7)]
        pair.swap(target=parts(16, 1))
        seen += [event.token for event in stream]
        while len(ids) < 28:
            ids.append(argmax(processed(pair.model.logits(ids), ids, 4, **options)))
        assert seen == ids[4:] and stream.result.stats.swaps == 1 and pair.model.vocab_size == 16


# ---- errors of a caller's function -----------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 3])
def test_a_mask_of_the_wrong_width(k):
    pair, good = pair_on("scripted"), pair_on("scripted").generate(list(PROMPTS[0]), max_new_tokens=9).tokens

    def allowed(ids):
        return torch.ones(13 if len(ids) < len(PROMPTS[0]) + 5 else 12, dtype=torch.bool)

    with pytest.raises(specloop.OptionError, match=r"^allowed: expected a mask of 13 booleans, got .*\[12\]") as error:
        pair.generate(list(PROMPTS[0]), max_new_tokens=9, k=k, allowed=allowed)
    assert error.value.result.tokens == good[:5] and error.value.result.finish_reason is None
    assert pair.generate(list(PROMPTS[0]), max_new_tokens=9).tokens == good  # the pair goes on


# ---- stop strings and log-probabilities ------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 3, 12])
def test_a_stop_string_deep_in_an_accepted_block(k):
    pieces = ["", "foo", "EN", "D", "bar", "baz", "q"]
    says = [1, 4, 5, 1, 4, 5, 1, 2, 3, 4, 5, 1]
    model = scripted(lambda ids: says[(len(ids) - 1) % 12], 7, context=200)
    pair = Pair(lambda: (model, ToyTokenizer(pieces), None), draft="lookup", k=k)
    prompt = [6, *says, *says]  # the next twelve are a look-up
    options = {"stop": "END", "logprobs": 2, "max_new_tokens": 30, "frequency_penalty": 0.01}
    result, stream = pair.generate(prompt, **options), pair.stream(prompt, **options)
    events = list(stream)
    assert result.text == "foobarbazfoobarbazfoo" == "".join(event.text for event in events)
    assert result.tokens == says[:9] == [event.token for event in events]
    assert len(result.logprobs) == 9 == len(stream.result.logprobs) and result.finish_reason == "stop"
    assert result.stats.completion_tokens == 9
    if k == 12:
        assert result.stats.speculation.rounds <= 2
    for token, (own, top) in zip(result.tokens, result.logprobs, strict=True):
        assert top[0] == (token, pytest.approx(own, abs=1e-5)) and own < 0


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probabilities_are_of_the_row_before_temperature_and_filters(temperature):
    model = Scripted(lambda ids: [math.sin(3 * token + len(ids)) for token in range(13)], 13)
    pair = Pair(lambda: (model, ToyTokenizer([chr(97 + i) for i in range(13)]), None), draft="lookup", k=2)
    options = {"temperature": temperature, "top_k": 5, "seed": 4, "logprobs": 0, "max_new_tokens": 20}
    result = pair.generate([1, 2, 1, 2, 1], **options, logit_bias={3: 1.0})
    ids = [1, 2, 1, 2, 1]
    for token, (own, top) in zip(result.tokens, result.logprobs, strict=True):
        row = torch.tensor(model.logits(ids)).double()
        row[3] += 1.0
        assert own == pytest.approx(float(torch.log_softmax(row, 0)[token]), abs=1e-5) and not top
        ids.append(token)


def test_greedy_needs_no_seed_and_sampling_draws_one():
    assert check_request().seed == 0
    assert check_request(temperature=1.0).seed != check_request(temperature=1.0).seed


def test_the_largest_numbers_beside_others():
    most = 2**63 - 1
    each = [{"top_k": most, "seed": most}, {"top_k": 2, "seed": -most - 1}, {"rule": "threshold", "theta_window": most}]
    options = {"temperature": 1.0, "max_new_tokens": 5}
    results = pair_on("scripted").generate_batch([[1], [2], [3]], each=each, **options)
    alone = [pair_on("scripted").generate([i], **own, **options) for i, own in enumerate(each[:2], 1)]
    assert [r.tokens for r in results[:2]] == [r.tokens for r in alone] and len(results[2].tokens) == 5
