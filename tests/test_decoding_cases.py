"""Faults that users met in other speculative decoders, as small cases with the right outcome.

Those that no other file holds; test_decoding_reports.py says where each one is.
"""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from loops import KINDS, KS, PROMPTS, TEMPERATURES, drafting, greedy, pair_on, play, run
from scripted import FunctionDraft, Scripted, ToyTokenizer, argmax, oracle, reading, request_for, scripted
from specdec_kernels import native, sample, verify
from specloop.decode import decode
from specloop.drafts.base import Proposal
from specloop.drafts.lookup import LookupDraft
from specloop.faults import MOST_FAULTS
from specloop.pair import Pair
from specloop.summary import summary


def play_one(request, model):
    return [token for _, token, _ in decode(model, [request])]


# ---- A: the law ------------------------------------------------------------------------------------------------------

DRAWS = 40_000


def frequencies(p, drafts, q=None):
    """How often each id is the first of a round with one draft; ``drafts``: a round's draft each."""
    n, v = len(drafts), len(p)
    logits = torch.tensor(p).log().expand(2 * n, v).contiguous()
    judged = verify(
        logits,
        torch.tensor(drafts),
        torch.arange(n + 1, dtype=torch.int32),
        draft_probs=None if q is None else torch.tensor(q).expand(n, v).contiguous(),
        seed=torch.arange(n),
        position=torch.full((n,), 7),
    )
    return (torch.bincount(judged.tokens[:, 0], minlength=v) / n).tolist()


def far(observed, expected, n=DRAWS):
    """The largest distance, in standard deviations."""
    return max(
        abs(o - e) / math.sqrt(max(e * (1 - e), 1e-9) / n) if e > 0 else o * n
        for o, e in zip(observed, expected, strict=True)
    )


def drawn(q):
    logits = torch.tensor(q).log().expand(DRAWS, len(q)).contiguous()
    return sample(logits, seed=torch.arange(DRAWS), position=torch.full((DRAWS,), 7), stream=0).tolist()


def test_a2_a_draft_that_is_chosen_and_not_drawn():
    p, q = (0.3, 0.5, 0.2), (0.4, 0.35, 0.25)
    assert far(frequencies(p, [0] * DRAWS), p) < 4.5
    wrong = frequencies(p, [0] * DRAWS, q)  # judged as if it had been drawn: what must not be
    assert far(wrong, (0.75, 0.25, 0.0)) < 4.5 and far(wrong, p) > 50


def test_a3_the_distribution_that_was_drawn_from():
    p, q = (0.4, 0.4, 0.2), (0.5, 0.3, 0.2)
    squared = [x * x / sum(y * y for y in q) for x in q]
    assert far(frequencies(p, drawn(q), q), p) < 4.5
    wrong = frequencies(p, drawn(q), squared)
    assert far(wrong, p) > 20
    assert wrong == pytest.approx([0.304, 0.424, 0.272], abs=0.01)


def test_a3_drafts_rounded_before_the_draw():
    """What is handed over has to be what was drawn from: rounded to bf16, both are."""
    p, q = (0.4, 0.4, 0.2), torch.tensor([0.513, 0.287, 0.2]).bfloat16().float()
    q = (q / q.sum()).tolist()
    assert far(frequencies(p, drawn(q), q), p) < 4.5


def test_a4_the_token_after_a_refusal():
    """From (p - q)+, not from p again, which would give (0.7, 0.3)."""
    p, q = (0.5, 0.5), (0.9, 0.1)
    observed = frequencies(p, drawn(q), q)
    assert far(observed, p) < 4.5 and far(observed, (0.7, 0.3)) > 50


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("k", KS)
def test_a9_random_numbers_belong_to_what_was_emitted(k, temperature):
    """After a stop inside a round the next 20 draws are those of a plain decoder that stopped there."""
    model = Scripted(lambda ids: [math.sin(3 * t + len(ids) + ids[-1]) for t in range(16)], 16)
    sampling = {"temperature": temperature, "seed": 11}
    seen = []
    first = request_for(
        model, [1], 40, LookupDraft(1), k=k, sampling=sampling, stop=lambda token: seen.append(token) or len(seen) == 9
    )
    assert play_one(first, model) == seen and first.finish_reason == "stop"
    more = play_one(request_for(model, first.ids, 20, k=0, sampling=sampling), model)
    ids = list(first.ids)
    for token in more:
        row = torch.tensor([model.logits(ids)])
        numbers = {"seed": torch.tensor([11]), "position": torch.tensor([len(ids)])} if temperature else {}
        assert sample(row, temperature=temperature, **numbers).item() == token
        ids.append(token)
    assert len(more) == 20


def test_a11_acceptance_that_means_nothing_is_called_so(monkeypatch):
    """A draft that speaks once and is right once: 100 %, and no gain."""
    pair = pair_on("scripted")

    class Rare(FunctionDraft):
        def outlook(self):
            return 0, 1 if len(self.ids) == len(PROMPTS[0]) + 4 else 0

    with drafting(lambda: Rare(lambda ids, j: greedy("scripted", PROMPTS[0])[4]), monkeypatch):
        result = pair.generate(list(PROMPTS[0]), max_new_tokens=12, k=3)
    report = result.as_dict()["speculation"]
    assert report["acceptance_rate"] == 1.0 and report["rounds_without_draft"] == report["rounds"] - 1 == 10
    assert report["mean_draft_length"] < 0.1 and report["tokens_per_pass"] < 1.1
    assert "fewer than one draft per round" in summary(result)


class Drawing:
    """Draws nothing: point masses of the target's own, handed over with logits of which some rows are NaN."""

    name, timely = "drawing", True

    def __init__(self, model, bad):
        self.model, self.bad, self.ids, self.calls = model, bad, [], 0

    def begin(self, ids):
        self.ids = list(ids)

    def append(self, ids):
        self.ids.extend(ids)

    def outlook(self):
        return 0, 4

    def propose(self, k):
        self.calls += 1
        tokens, rows = [], torch.zeros(k, self.model.vocab_size)
        for j in range(k):
            tokens.append(argmax(self.model.logits(self.ids + tokens)))
            rows[j, tokens[j]] = 50.0
        if self.calls in self.bad:
            rows[1] = float("nan")
        return Proposal(tokens, logits=rows)


def by_content():
    return scripted(lambda ids: (sum(ids) * 5 + len(ids) + ids[-1]) % 11, 11)


def test_a12_nan_in_the_second_of_four_drafts(caplog):
    model = by_content()
    wanted = play_one(request_for(model, [1, 2], 60), model)
    request = request_for(model, [1, 2], 60, Drawing(model, {2}), k=4)
    assert play_one(request, model) == wanted
    counts = request.stats.speculation
    assert counts.k_history[:3] == [4, 1, 4] and counts.accepted == counts.evaluated and counts.off_reason is None
    assert counts.fault_count == 1 and "NaN" in counts.faults[0]
    assert [(e["round"], e["event"]) for e in counts.events] == [(2, "fault")]
    always = request_for(model, [1, 2], 60, Drawing(model, range(1000)), k=4)
    assert play_one(always, model) == wanted
    assert always.stats.speculation.k_history[MOST_FAULTS : MOST_FAULTS + 10] == [0] * 10
    assert len([r for r in caplog.records if "speculation off" in r.message]) == 1


# ---- B: caches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["scripted", "int8", "f32"])
def test_b10_the_next_request_with_the_same_beginning_starts_cold(target, monkeypatch):
    """Tokens that were accepted and not emitted are in no cache that anybody sees."""
    pair = pair_on(target)
    text = greedy(target, PROMPTS[0])
    with drafting(lambda: KINDS["oracle"](target, pair.model.vocab_size), monkeypatch):
        stream = pair.stream(list(PROMPTS[0]), max_new_tokens=12, k=5)
        for _ in range(2):
            next(stream)
        stream.close()
        assert stream.result.tokens == list(text[:2]) and stream.result.finish_reason == "cancelled"
        again = pair.generate(list(PROMPTS[0]), max_new_tokens=12, k=5)
        on = pair.generate([*PROMPTS[0], *text[:2]], max_new_tokens=6, k=0)
    assert again.tokens == list(text[:12]) and on.tokens == list(text[2:8])
    assert all(seat.nbytes == 0 for seat in pair.place.seats())


# ---- C: ends ---------------------------------------------------------------------------------------------------------


def letters(script, **options):
    """A pair that says ``script`` after any prompt of one letter."""
    model = reading(script, vocab_size=9, eos_ids=[8], **options)
    return Pair(lambda: (model, ToyTokenizer(["foo", "EN", "D", "bar", "baz", "END", "qu", "x", ""]), None)), model


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("stop", [("END",), ("baz",), ()])
def test_c5_text_ids_and_log_probabilities_end_together(k, stop, monkeypatch):
    script = [0, 6, 5, 3, 4, 3, 4, 8, 3]
    pair, model = letters(script)
    with drafting(lambda: oracle(model), monkeypatch):
        (result,) = play(pair, [[7]], [20], "stream", stop=stop, k=k, logprobs=2)
    n = {("END",): 3, ("baz",): 5, (): 8}[stop]
    assert result.tokens == script[:n] and result.finish_reason == "stop"
    assert result.text == {("END",): "fooqu", ("baz",): "fooquENDbar", (): "fooquENDbarbazbarbaz"}[stop]
    assert len(result.logprobs) == n and all(len(top) == 2 for _, top in result.logprobs)
    assert result.stats.completion_tokens == result.stats.speculation.tokens == n


# ---- E, G: flags, contexts, the same figures everywhere --------------------------------------------------------------


@pytest.mark.parametrize(
    "flag, changed",
    [
        ({"k": 1}, "k_history"),
        ({"draft": "none"}, "proposed"),
        ({"draft_until": 12}, "proposed"),
        ({"rule": "block"}, None),
        ({"max_fallbacks": 1}, "fallbacks"),
        ({"on_fallbacks": "stop", "max_fallbacks": 1}, "tokens"),
    ],
)
def test_e6_every_flag_of_drafting_has_an_effect(flag, changed, monkeypatch):
    pair = pair_on("scripted")
    kind = "anti" if "max_fallbacks" in flag else "flaky"
    with drafting(lambda: KINDS[kind]("scripted", pair.model.vocab_size), monkeypatch):
        plain, other = (pair.generate(list(PROMPTS[0]), max_new_tokens=12, **({"k": 3} | o)) for o in ({}, flag))
    settings = other.as_dict()["settings"]
    assert {name: settings[name] for name in flag} == flag
    if changed == "tokens":
        assert other.finish_reason == "fallbacks" and other.tokens == plain.tokens[: len(other.tokens)] != plain.tokens
    else:
        assert other.tokens == plain.tokens
        assert changed is None or other.as_dict()["speculation"][changed] != plain.as_dict()["speculation"][changed]


def test_g4_one_request_beyond_its_length_and_the_others_draft_on(monkeypatch):
    results = run("scripted", "oracle", 3, 0.0, 5, "whole", monkeypatch, draft_until=16)
    for prompt, result in zip(PROMPTS, results, strict=True):
        counts, at = result.stats.speculation, len(prompt)
        for k, accepted in zip(counts.k_history, counts.accepted_history, strict=True):
            assert (k == 0) if at >= 16 else k > 0 or at + 1 >= len(prompt) + len(result.tokens)
            at += accepted + 1
    assert results[3].stats.speculation.proposed == 0 and results[1].stats.speculation.proposed > 3


def test_g5_the_command_line_and_python_count_alike(monkeypatch, capsys):
    from specloop import cli

    pair = pair_on("scripted")
    monkeypatch.setattr("specloop.pair.load", lambda *args, **kwargs: pair)
    options = {"max_new_tokens": 40, "k": 4, "temperature": 0.7, "seed": 5, "draft": "lookup"}
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    assert cli.run(["generate", "fjhhm", "--json", *flags]) == 0
    said = json.loads(capsys.readouterr().out)
    result = pair.generate("fjhhm", **options).as_dict()
    timeless = lambda report: {name: value for name, value in report.items() if not name.endswith("_ms")}
    assert said["tokens"] == result["tokens"] and result["speculation"]["proposed"] > 0
    assert timeless(said["speculation"]) == timeless(result["speculation"])


# ---- I: faults, reports ----------------------------------------------------------------------------------------------


def test_i2_a_draft_that_dies_in_round_seven():
    model = by_content()
    wanted = play_one(request_for(model, [1, 2], 60), model)
    draft = oracle(model)
    propose, calls = draft.propose, []

    def dying(k):
        calls.append(k)
        if len(calls) == 7:
            raise MemoryError
        return propose(k)

    draft.propose = dying
    request = request_for(model, [1, 2], 60, draft, k=3)
    assert play_one(request, model) == wanted
    counts = request.stats.speculation
    assert counts.k_history[5:8] == [3, 0, 3]
    assert counts.events == [{"round": 7, "event": "fault", "reason": counts.faults[0]}]
    assert "MemoryError" in counts.faults[0] and counts.as_dict()["faults"] == counts.faults


@pytest.mark.parametrize("options", [{"max_new_tokens": 0}, {"k": 0}, {"draft": "none"}, {"max_new_tokens": 1}])
@pytest.mark.parametrize("shown", ["whole", "stream"])
def test_i7_statistics_of_requests_that_do_next_to_nothing(options, shown):
    pair = pair_on("scripted")
    options = {"max_new_tokens": 5, "k": 3} | options
    if shown == "whole":
        report = pair.generate([1], **options).as_dict()
    else:
        stream = pair.stream([1], **options)
        stream.result.as_dict()  # before anything has happened, too
        list(stream)
        report = stream.result.as_dict()
    said = report["speculation"]
    assert said["acceptance_rate"] is None and said["accepted_of_proposed"] is None and said["proposed"] == 0
    assert said["per_position"] == said["acceptance_histogram"] == [] and said["by_source"] == {}
    rounds = options["max_new_tokens"]
    assert said["rounds"] == said["rounds_without_draft"] == rounds
    assert (said["tokens_per_pass"], said["verify_ms"] is None) == ((1.0, False) if rounds else (None, True))
    assert (report["timing"]["tokens_per_second"] is None) == (rounds == 0)
    json.dumps(report, allow_nan=False)


def test_i7_which_tokens_came_from_which_draft(monkeypatch):
    from specloop.drafts.chain import ChainDraft

    pair = pair_on("scripted")
    chain = lambda: ChainDraft([LookupDraft(), KINDS["flaky"]("scripted", pair.model.vocab_size)])
    with drafting(chain, monkeypatch):
        events = list(pair.stream(list(PROMPTS[2]), max_new_tokens=21, k=3))
        result = pair.generate(list(PROMPTS[2]), max_new_tokens=21, k=3)
    said = result.as_dict()["speculation"]
    assert set(said["by_source"]) == {"lookup", "knowing"}
    for name in ("proposed", "evaluated", "accepted", "committed"):
        assert sum(part[name] for part in said["by_source"].values()) == said[name]
    for name in ("evaluated_at", "accepted_at"):  # by position, each drafter's own
        parts = [part[name] + [0] * 3 for part in said["by_source"].values()]
        assert [sum(at) for at in zip(*(part[:3] for part in parts), strict=True)] == (said[name] + [0] * 3)[:3]
    for part in said["by_source"].values():
        assert sum(part["evaluated_at"]) == part["evaluated"] and sum(part["accepted_at"]) == part["accepted"]
        assert part["per_position"] == [a / n for a, n in zip(part["accepted_at"], part["evaluated_at"], strict=True)]
    assert sum(event.from_draft for event in events) == said["committed"] > 0


def readme_examples():
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("number", range(len(readme_examples())))
def test_i9_the_examples_run(number, request, capsys):
    example = readme_examples()[number]
    if "specloop" in example:
        request.getfixturevalue("smollm2")
        if native.cpu is None:
            pytest.skip(f"135M parameters take minutes in plain PyTorch: {native.cpu_reason}")
    exec(compile(example, f"README, example {number}", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_a_lossy_text_says_so(monkeypatch):
    pair = pair_on("scripted")
    with drafting(lambda: KINDS["flaky"]("scripted", pair.model.vocab_size), monkeypatch):
        result = pair.generate(list(PROMPTS[1]), max_new_tokens=21, k=3, rule="threshold", theta=0.4, theta_window=9)
    said = result.as_dict()["speculation"]
    assert (said["threshold"]["start"], said["threshold"]["window"], said["threshold"]["set_point"]) == (0.4, 9, 0.98)
    assert len(said["threshold"]["path"]) == said["rounds"] and said["theta"] > 0
    assert said["threshold"]["agreement"] == 1.0 and said["threshold"]["mean_gap"] == 0.0  # too short to lend
    assert "lossy: 0 tokens lent" in summary(result) and "agreement with greedy decoding 1.0000" in summary(result)
    assert pair.generate([1], max_new_tokens=3).as_dict()["speculation"]["threshold"] is None
