"""load, generate, stream on a scripted model: text, events, options, errors."""

import math
import subprocess
import sys
import threading
import time

import pytest

import specloop
from scripted import Scripted, ToyTokenizer, argmax, scripted
from specloop.options import check_request, resolve_aliases
from specloop.pair import Pair

EMOJI = "🙂".encode()
# ids: 0 end, 1 half an emoji, 2 the other half, 3.. words
PIECES = ["", EMOJI[:2], EMOJI[2:], "foo", "E", "N", "D", " bar", "END", "ENDbaz", "a", "b", " "]
EOS = 0


def pair_saying(script, *, template=None, draft="lookup", k=3, **settings):
    """A pair whose target says the ids of ``script``, whatever the prompt, then EOS."""
    prompts = {}

    def following(prefix):
        n = len(prefix) - prompts["length"]
        return script[n] if 0 <= n < len(script) else EOS

    model = scripted(following, len(PIECES), eos_ids=[EOS], context=256)
    tokenizer = ToyTokenizer(PIECES, [EOS])
    pair = Pair(lambda: (model, tokenizer, template), draft=draft, k=k, settings=settings)
    encode = pair.encode

    def spy(*args):
        ids = encode(*args)
        prompts["length"] = len(ids)
        return ids

    pair.encode = spy
    return pair


def text_of(ids):
    return b"".join(ToyTokenizer(PIECES).pieces[i] for i in ids).decode(errors="replace")


SCRIPTS = [
    [3, 7, 1, 2, 3, 7, 1, 2, 3, 7, 1, 2],
    [1, 2, 1, 2, 4, 5, 6],
    [10, 11, 10, 11, 10, 11, 1],  # ends inside a character
    [],
]


@pytest.mark.parametrize("k", [0, 1, 2, 3, 5, 8, "auto"])
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("draft", ["lookup", "none"])
def test_stream_and_generate_agree(script, k, draft):
    pair = pair_saying(script, k=k, draft=draft)
    events = list(pair.stream("ab ab", max_new_tokens=40))
    result = pair.generate("ab ab", max_new_tokens=40)
    assert [e.token for e in events] == result.tokens == [*script, EOS]
    assert "".join(e.text for e in events) == result.text == text_of(script)
    assert [e.finish_reason for e in events] == [None] * len(script) + ["stop"]
    for event in events:
        event.text.encode()  # valid, whole characters


def test_half_a_character_is_not_shown():
    events = list(pair_saying([3, 1, 2, 3]).stream("a"))
    assert [e.text for e in events] == ["foo", "", "🙂", "foo", ""]
    assert "\ufffd" not in "".join(e.text for e in events)


@pytest.mark.parametrize("k", [0, 1, 3, 8])
@pytest.mark.parametrize(
    "script, stop, text, count",
    [
        ([3, 8, 7, 7, 7], "END", "foo", 2),
        ([3, 4, 5, 6, 7], "END", "foo", 4),
        ([3, 9, 7], "END", "foo", 2),
        ([3, 4, 5, 3], "END", "fooENfoo", 5),  # held back, then shown; EOS is the fifth
        ([3, 4, 5], "END", "fooEN", 4),  # the tail comes out at the end
        ([3, 7, 3, 7], ["END", "bar"], "foo ", 2),
    ],
)
def test_stop_strings(script, stop, text, count, k):
    pair = pair_saying(script, k=k)
    events = list(pair.stream("foo foo bar", stop=stop, max_new_tokens=20))
    result = pair.generate("foo foo bar", stop=stop, max_new_tokens=20)
    assert result.text == text == "".join(e.text for e in events)
    assert result.tokens == [*script, EOS][:count] == [e.token for e in events]
    assert result.finish_reason == "stop" and result.stats.completion_tokens == count


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_max_new_tokens(n):
    result = pair_saying([3] * 20, k=8).generate("foo foo foo", max_new_tokens=n)
    assert result.text == "foo" * n and result.finish_reason == "length"
    events = list(pair_saying([3] * 20, k=8).stream("foo foo foo", max_new_tokens=n))
    assert len(events) == n and all(e.finish_reason == ("length" if i == n - 1 else None) for i, e in enumerate(events))


def test_the_held_back_tail_is_not_lost_at_the_length_limit():
    events = list(pair_saying([3, 4, 5, 6]).stream("a", stop="ENDE", max_new_tokens=3))
    assert [e.text for e in events] == ["foo", "", "EN"]


def test_the_context_is_the_limit():
    result = pair_saying([3] * 300, context=40).generate("ab ab", max_new_tokens=1000)
    assert result.finish_reason == "length" and result.stats.prompt_tokens + len(result.tokens) == 40


# ---- cancel ----------------------------------------------------------------------------------------------------------


def test_cancel_from_the_stream():
    stream = pair_saying([3, 7] * 50, k=3).stream("a")
    first = [next(stream) for _ in range(4)]
    stream.cancel()
    assert list(stream) == []
    assert stream.result.finish_reason == "cancelled" and stream.result.tokens == [e.token for e in first]


def test_cancel_does_not_lose_text():
    stream = pair_saying([3, 4, 5, 6]).stream("a", stop="ENDE")
    texts = [next(stream).text for _ in range(3)]
    stream.cancel()
    tail = list(stream)
    assert texts == ["foo", "", ""] and [(e.token, e.text, e.finish_reason) for e in tail] == [
        (None, "EN", "cancelled")
    ]
    assert stream.result.text == "fooEN"


def test_close_in_the_middle_of_a_block():
    stream = pair_saying([3, 7] * 50, k=8).stream("foo bar foo bar foo bar")
    taken = [next(stream).token for _ in range(3)]
    stream.close()
    assert stream.result.tokens == taken and stream.result.finish_reason == "cancelled"
    assert list(stream) == []


@pytest.mark.parametrize("kind", ["event", "function"])
def test_cancel_of_generate_from_another_thread(kind):
    pair, flag = pair_saying([3, 7] * 50), threading.Event()
    inner = pair.model.forward

    def forward(tokens, cache, *, last):
        if cache.length > 20:
            flag.set()
        return inner(tokens, cache, last=last)

    pair.model.forward = forward
    result = pair.generate("a", cancel=flag if kind == "event" else flag.is_set)
    assert result.finish_reason == "cancelled" and 15 < len(result.tokens) < 30


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_what_a_callback_raises_ends_a_stream(error):
    def callback(event):
        if event.token == 7:
            raise error

    pair = pair_saying([3, 7] * 50)
    stream = pair.stream("a", callback=callback)
    with pytest.raises(type(error)) as raised:
        list(stream)
    assert raised.value is error
    assert list(stream) == [] and stream.result.tokens == [3, 7] and stream.result.finish_reason == "cancelled"
    assert all(seat.nbytes == 0 for seat in pair.place.seats())


@pytest.mark.parametrize("name", ["callback", "allowed"])
def test_a_function_that_raises_stop_iteration_does_not_end_the_text_silently(name):
    empty = iter(())
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(pair_saying([3, 7] * 50).stream("a", **{name: lambda _: next(empty)}))


def test_a_function_within_a_pass_can_not_use_the_pair():
    pair = pair_saying([3, 7])
    uses = [
        lambda ids: pair.generate([3], max_new_tokens=1),
        lambda ids: [token for token, _ in specloop.generate_candidates(pair, ids)],
        lambda ids: pair.swap(draft="none"),
    ]
    for allowed in uses:
        with pytest.raises(RuntimeError, match="within a pass of its own"):
            pair.generate("a", allowed=allowed)
    assert pair.generate("a", allowed=lambda ids: None if pair.context and pair.tokenizer else ()).tokens == [3, 7, EOS]


# ---- prompts ---------------------------------------------------------------------------------------------------------


def test_prompts_as_ids():
    result = pair_saying([3]).generate([10, 11])
    assert result.stats.prompt_tokens == 2 and result.text == "foo"


TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}b{% endif %}"


def test_chat_is_on_where_there_is_a_template():
    pair = pair_saying([3], template=TEMPLATE)
    assert pair.generate("a").stats.prompt_tokens == 3  # "a", " ", "b"
    assert pair.generate("a", chat=False).stats.prompt_tokens == 1
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert pair.generate(messages).stats.prompt_tokens == 5


def test_chat_without_a_template_is_an_error():
    with pytest.raises(specloop.OptionError, match="chat: the model has no chat template"):
        pair_saying([3]).generate("a", chat=True)


@pytest.mark.parametrize(
    "prompt, message",
    [
        ("", "at least one token"),
        ([], "at least one token"),
        ("a" * 256, "fewer tokens than the context of 256, got 256"),
        ([0, 13], r"token ids in \[0, 13\), got 13"),
        ([0, -1], "got -1"),
        (7, "expected a string"),
        ([0, "a"], "expected a string"),
        (None, "expected a string"),
        (b"a", "expected a string"),
    ],
)
def test_bad_prompts(prompt, message):
    with pytest.raises(specloop.PromptError, match=message):
        pair_saying([3]).stream(prompt)


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"k": -1},
        {"k": 65},
        {"k": 1.5},
        {"k": True},
        {"k": "many"},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": "hot"},
        {"temperature": 1e300},
        {"top_p": -0.1},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"min_p": -1},
        {"min_p": 2},
        {"top_k": -2},
        {"top_k": 1.0},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": [1]},
        {"stop": 5},
        {"max_new_tokens": -1},
        {"max_new_tokens": 1.0},
        {"seed": 2**63},
        {"seed": 0.5},
        {"draft": "model.gguf"},
        {"draft": 3},
        {"rule": "typical"},
        {"rule": None},
        {"theta": 0.3},
        {"chat": "yes"},
    ],
)
def test_bad_options_name_themselves(options):
    with pytest.raises(specloop.OptionError, match=f"^{next(iter(options))}: "):
        pair_saying([3]).stream("a", **options)


def test_unknown_options_are_not_swallowed():
    with pytest.raises(TypeError, match="repetition_penalties"):
        pair_saying([3]).generate("a", repetition_penalties=1.1)
    with pytest.raises(TypeError, match="repetition_penalties"):
        specloop.load(repetition_penalties=1.1)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "int4"},
        {"context": 1},
        {"context": "long"},
        {"threads": 0},
        {"threads": 100_000},
        {"memory_budget": 1.5},
        {"kv": "bf16"},
        {"device": "tpu"},
        {"draft": "x"},
        {"k": -1},
    ],
)
def test_bad_load_options(options):
    with pytest.raises(specloop.OptionError, match=f"^{next(iter(options))}: "):
        specloop.load("nothing", **options)


def test_aliases():
    assert resolve_aliases({"assistant_model": "lookup", "num_assistant_tokens": 4}) == {"draft": "lookup", "k": 4}
    assert resolve_aliases({"prompt_lookup_num_tokens": 5}) == {"draft": "lookup", "k": 5}
    assert resolve_aliases({"assistant_confidence_threshold": 0.4}) == {"confidence": 0.4}
    assert resolve_aliases({"assistant_model": None, "top_p": 0.5}) == {"top_p": 0.5}
    for bad in (
        {"num_assistant_tokens": 4, "k": 5},
        {"prompt_lookup_num_tokens": 4, "draft": "none"},
        {"prompt_lookup_num_tokens": 4, "num_assistant_tokens": 4},
    ):
        with pytest.raises(specloop.OptionError):
            resolve_aliases(bad)


def test_aliases_have_an_effect():
    pair = pair_saying([3, 7] * 20, draft="none", k="auto")
    stats = pair.generate("foo bar foo bar", prompt_lookup_num_tokens=2).stats
    assert max(stats.speculation.k_history) == 2 and stats.settings["draft"] == "lookup" and stats.settings["k"] == 2


def test_seeds():
    def sampled(**options):
        model = Scripted(lambda prefix: [-9.0, -9.0, -9.0] + [math.sin(7 * t + len(prefix)) for t in range(10)], 13)
        pair = Pair(lambda: (model, ToyTokenizer(PIECES), None), k=2)
        return pair.generate("ab ab", temperature=1.0, max_new_tokens=30, **options)

    assert sampled(seed=1).tokens == sampled(seed=1).tokens != sampled(seed=2).tokens
    drawn = sampled()
    assert sampled(seed=drawn.stats.settings["seed"]).tokens == drawn.tokens
    assert check_request().seed == 0


@pytest.mark.parametrize("flag", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"temperature": 0.0}])
def test_every_sampling_option_has_an_effect(flag):
    model = Scripted(lambda prefix: [math.sin(7 * t + len(prefix)) for t in range(13)], 13)
    pair = Pair(lambda: (model, ToyTokenizer(PIECES), None), k=2)
    hot = {"temperature": 5.0, "seed": 3, "max_new_tokens": 20}
    greedy = [12]
    for _ in range(20):
        greedy.append(argmax(model.logits(greedy)))
    assert pair.generate([12], **hot | flag).tokens == greedy[1:] != pair.generate([12], **hot).tokens


# ---- statistics ------------------------------------------------------------------------------------------------------


def test_the_json_object():
    report = pair_saying([3, 7] * 10, k=2).generate("foo bar foo bar", max_new_tokens=12).as_dict()
    assert set(report) == {
        "text", "tokens", "finish_reason", "usage", "speculation", "memory", "timing", "backend", "settings",
    }  # fmt: skip
    s = report["speculation"]
    assert s["acceptance_rate"] == s["accepted"] / s["evaluated"] and s["tokens_per_pass"] == 12 / s["rounds"]
    assert len(s["k_history"]) == s["rounds"] and sum(s["k_history"]) == s["proposed"]
    assert report["usage"] == {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17}
    assert report["timing"]["tokens_per_second"] > 0 and report["timing"]["load_s"] is not None
    assert report["memory"]["peak"] > 2**20 and report["memory"]["budget"] is None


@pytest.mark.parametrize("options", [{"max_new_tokens": 0}, {"k": 0}, {"draft": "none"}])
def test_unknown_is_null_and_never_zero(options):
    result = pair_saying([3, 7]).generate("foo", **options)
    s, timing = result.as_dict()["speculation"], result.as_dict()["timing"]
    assert s["acceptance_rate"] is None and s["per_position"] == [] and s["draft_ms"] is None and s["theta"] is None
    if not result.tokens:
        assert s["tokens_per_pass"] is None and s["verify_ms"] is None and timing["tokens_per_second"] is None
    else:
        assert s["off_reason"]


# ---- loading ---------------------------------------------------------------------------------------------------------


def test_loading_happens_in_the_background():
    release = threading.Event()

    def parts():
        release.wait(10)
        return scripted(lambda prefix: 0, 13, eos_ids=[0]), ToyTokenizer(PIECES), None

    pair = Pair(parts, k=0)
    assert pair.ready(timeout=0.01) is False
    release.set()
    assert pair.ready() is True and pair.generate("a").finish_reason == "stop" and pair.load_seconds > 0


def test_a_failed_load_is_raised_at_every_use():
    pair = specloop.load("no/such/file.gguf")
    for use in (pair.ready, lambda: pair.generate("a"), lambda: pair.stream("a")):
        with pytest.raises(specloop.ModelError, match="no such file"):
            use()


def test_costs_are_measured_once_and_only_if_needed():
    pair = pair_saying([3, 7] * 5)
    pair.generate("a", k=2)
    pair.generate("a", draft="none")
    assert pair._target.version.costs is None
    assert pair.generate("a", k="auto").text and pair.costs is pair.costs and len(pair.costs) == 16


def test_requests_in_two_threads():
    def slow(prefix):
        time.sleep(0.0005)
        return (sum(prefix) + len(prefix)) % 10 + 3

    pair = Pair(lambda: (scripted(slow, 13), ToyTokenizer(PIECES), None), k=3)
    want = {n: pair.generate([n, n + 1], max_new_tokens=30).tokens for n in range(4)}
    found = {}
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: pair.generate([n, n + 1], max_new_tokens=30).tokens}))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == want


def test_import_is_light():
    code = "import sys, specloop; print('torch' in sys.modules, 'typer' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "False"]


def test_module_level_names():
    assert callable(specloop.generate) and callable(specloop.stream) and callable(specloop.load)
    assert "Pair" in dir(specloop)
    with pytest.raises(AttributeError, match="nothing"):
        specloop.nothing  # noqa: B018


def test_likeliest_ids_of_hard_rows():
    """A NaN has no probability, and the first +inf has all of it: as in the log-probability of the token itself."""
    inf, nan = math.inf, math.nan
    rows = [[1.0, nan, 0.0, nan, -inf], [0.0, -inf, inf, inf, nan]]
    model = Scripted(lambda prefix: rows[len(prefix) % 2], 5)
    pair = Pair(lambda: (model, ToyTokenizer("abcde"), None), draft="none")
    result = pair.generate([1, 2], max_new_tokens=2, logprobs=3)
    assert result.tokens == [0, 2]
    (first, top), (second, other) = result.logprobs
    assert [token for token, _ in top] == [0, 2] and top[0][1] == pytest.approx(-math.log1p(math.exp(-1)))
    assert first == pytest.approx(top[0][1]) and second == 0.0 and other == [(2, 0.0)]


# ---- statistics of batches -------------------------------------------------------------------------------------------


def test_a_batch_tells_of_itself():
    model = scripted(lambda prefix: 10 + len(prefix) % 2, len(PIECES), eos_ids=[EOS], context=256)
    pair = Pair(lambda: (model, ToyTokenizer(PIECES, [EOS]), None), draft="lookup", k=3)
    prompts = [[10, 11] * 4, [3, 7, 3], [10, 11, 10]]
    results = pair.generate_batch(prompts, each=[{"max_new_tokens": n} for n in (20, 5, 12)])
    alone = [pair.generate(p, max_new_tokens=n) for p, n in zip(prompts, (20, 5, 12), strict=True)]
    assert [r.tokens for r in results] == [r.tokens for r in alone]
    batch = results[0].stats.batch
    assert all(r.stats.batch is batch for r in results) and alone[0].stats.batch is None
    assert "batch" not in alone[0].as_dict()
    report = results[1].as_dict()["batch"]
    assert (report["joined"], report["put_off"], report["finished"], report["tokens"]) == (3, 0, 3, 37)
    assert report["passes"] == len(report["size_history"]) and max(report["size_history"]) == 3
    assert sum(report["size_history"]) == report["speculation"]["rounds"]
    assert report["tokens_per_pass"] == 37 / report["passes"]
    for name in ("rounds", "proposed", "evaluated", "accepted", "committed"):
        assert report["speculation"][name] == sum(getattr(r.stats.speculation, name) for r in results)
    assert report["rows"] >= report["speculation"]["proposed"] + report["speculation"]["rounds"]
    assert report["speculation"]["by_source"]["lookup"]["committed"] == report["speculation"]["committed"] > 0
