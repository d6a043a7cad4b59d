"""Every flag of ``specloop generate`` that is a request's option: flipped, it is seen in the settings and in the text.

A flag that is read and then forgotten would change the settings alone.
"""

import json
import random

import pytest

import specloop.pair
from scripted import Scripted, ToyTokenizer
from specloop import cli, cli_options
from specloop.pair import Pair
from versions import parts

PIECES = ["", "foo", " bar", "END", "a", "b", " ", "🙂"]


def logits(ids):
    """Changes its mind every 7 ids; meanwhile it repeats itself."""
    chance = random.Random(f"{len(ids) // 7} {ids[-1]}")
    return [chance.gauss(0.0, 1.0) - 1.5 * (token == 0) + 3.0 * (len(ids) > 30) * (token == 0) for token in range(8)]


@pytest.fixture
def report(monkeypatch, capsys):
    """Runs ``generate`` on a scripted model: the JSON object, without what depends on the clock."""
    costs = [1.0, 1.1, 1.2, 1.3, 1.4]
    model = Scripted(logits, 8, eos_ids=[0], context=512)

    def load(target, draft="auto", progress=None, **settings):
        pair = Pair(lambda: (model, ToyTokenizer(PIECES, [0]), None), settings=settings)
        pair.ready()
        pair._target.version.costs = costs
        return pair

    monkeypatch.setattr(specloop.pair, "load", load)

    def run(*arguments):
        code = cli.run(["generate", "a b a b", "--json", "--max-new-tokens", "40", *arguments])
        out, err = capsys.readouterr()
        assert code == 0, err
        found = json.loads(out)
        kept = {name: found.get(name) for name in ("text", "tokens", "finish_reason", "usage", "logprobs")}
        counts = {name: value for name, value in found["speculation"].items() if not name.endswith("_ms")}
        return found["settings"], kept, counts

    return run


HOT = ["--temperature", "1", "--seed", "3", "--k", "3"]
SHORT = ["--k", "3", "--max-fallbacks", "1"]
LOSSY = ["--rule", "threshold", "--k", "3"]
FLAGS = [  # option, with it, without it
    ("temperature", ["--temperature", "2", "--seed", "3"], ["--seed", "3"]),
    ("seed", [*HOT, "--seed", "4"], HOT),
    ("top_k", [*HOT, "--top-k", "1"], HOT),
    ("top_p", [*HOT, "--top-p", "0.2"], HOT),
    ("min_p", [*HOT, "--min-p", "0.9"], HOT),
    ("max_new_tokens", ["--max-new-tokens", "3"], []),
    ("min_new_tokens", ["--min-new-tokens", "40"], []),
    ("stop", ["--stop", "END"], []),
    ("logit_bias", ["--logit-bias", "2=-inf", "--logit-bias", "4=1.5"], []),
    ("repetition_penalty", ["--repetition-penalty", "1.8"], []),
    ("presence_penalty", ["--presence-penalty", "1"], []),
    ("frequency_penalty", ["--frequency-penalty", "0.5"], []),
    ("bad_words", ["--ban", "END", "--ban", "a"], []),
    ("grammar", ["--grammar", "regex:(foo|b| )*"], []),
    ("draft", ["--draft", "none"], []),
    ("k", ["--k", "2"], ["--k", "5"]),
    ("rule", [*HOT, "--rule", "block"], HOT),
    ("rule", LOSSY, ["--k", "3"]),
    ("theta", [*LOSSY, "--theta", "0.1"], LOSSY),
    ("theta_window", [*LOSSY, "--agreement", "0.8", "--theta-window", "8"], [*LOSSY, "--agreement", "0.8"]),
    ("agreement", [*LOSSY, "--agreement", "0.5"], LOSSY),
    ("on_fallbacks", [*SHORT, "--on-fallbacks", "stop"], SHORT),
    ("max_fallbacks", SHORT, ["--k", "3"]),
    ("draft_until", ["--k", "3", "--draft-until", "12"], ["--k", "3"]),
    ("verify_timeout", ["--k", "3", "--verify-timeout", "1e-9"], ["--k", "3"]),
    ("logprobs", ["--logprobs", "2"], []),
]


@pytest.mark.parametrize("option, given, without", FLAGS, ids=[flag[0] for flag in FLAGS])
def test_a_flag_changes_what_it_says(report, option, given, without):
    if option == "grammar":
        pytest.importorskip("llguidance", reason="tests a grammar, for which there is no library")
    (settings, text, counts), (before, plain, few) = report(*given), report(*without)
    assert settings[option] != before[option]
    assert (text, counts) != (plain, few)


def test_flags_of_a_draft_model(monkeypatch, capsys, tmp_path):
    (tmp_path / "draft.gguf").write_bytes(b"GGUF")
    opened = lambda name, progress, **_: parts(1)()

    def report(*arguments):
        monkeypatch.setattr(specloop.pair, "load", lambda _, draft, **__: Pair(parts(0), draft=draft, opened=opened))
        base = ["generate", "ab", "--json", "--max-new-tokens", "12", "--k", "2"]
        assert cli.run([*base, "--draft", str(tmp_path / "draft.gguf"), *arguments]) == 0
        return json.loads(capsys.readouterr().out)

    chains, trees, sure = report(), report("--tree", "6"), report("--confidence", "1")
    assert chains["tokens"] == trees["tokens"] == sure["tokens"]
    assert trees["settings"]["tree"] == 6 and sure["settings"]["confidence"] == 1.0
    assert sure["speculation"]["k_history"][0] == 1 < chains["speculation"]["k_history"][0]
    assert max(chains["speculation"]["k_history"]) == 2 < max(trees["speculation"]["k_history"])


def test_these_are_all_flags():
    tested = {flag[0] for flag in FLAGS} | {"tree", "confidence", "chat"}  # the latter: test_generate_api.py
    assert tested == set(cli_options.REQUEST)


def test_a_grammar_from_a_file(report, tmp_path):
    pytest.importorskip("llguidance", reason="tests a grammar, for which there is no library")
    (tmp_path / "words").write_text("regex:(foo){2}")
    _, text, _ = report("--grammar", f"@{tmp_path / 'words'}")
    assert text["text"] == "foofoo" and text["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--logit-bias", "2"], "logit_bias: expected ID=NUMBER, got '2'"),
        (["--logit-bias", "a=1"], "logit_bias: expected ID=NUMBER, got 'a=1'"),
        (["--logit-bias", "1=nan"], "logit_bias: expected a finite number, got nan"),
        (["--logit-bias", "99=1"], "logit_bias: expected token ids in [0, 8), got 99"),
        (["--ban", "x"], "bad_words: expected words that the model's tokens can write, got 'x'"),
        (["--repetition-penalty", "0"], "repetition_penalty: expected a finite number > 0, got 0.0"),
        (["--min-new-tokens", "41"], "min_new_tokens: expected an integer from 0 to 40, got 41"),
        (["--grammar", "a*"], "grammar: expected 'json'"),
        (["--grammar", "@no/such/file"], "no/such/file"),
        (["--theta", "0.3"], "theta: belongs to the rule 'threshold'"),
        (["--rule", "threshold", "--theta", "nan"], "theta: expected a finite number > 0, got nan"),
        (["--tree", "4"], "tree: only a model drafts trees"),
        (["--confidence", "0.4"], "confidence: only a draft model has one, and the draft is 'lookup'"),
        (["--confidence", "1.5"], "confidence: expected a number from 0 to 1"),
        (["--on-fallbacks", "panic"], "on_fallbacks: expected one of plain, stop, got 'panic'"),
    ],
)
def test_bad_flags(report, capsys, arguments, message):
    assert cli.run(["generate", "a b", "--max-new-tokens", "40", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1
