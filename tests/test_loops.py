"""Texts do not depend on how they are drafted, batched or shown: all settings, all kinds of drafts."""

import pytest

from loops import GRID, KINDS, PROMPTS, TOKENS, drafting, greedy, pair_on, run, sample_of_the_grid


def check(setting, kind, monkeypatch):
    target, k, temperature, batch, shown = setting
    results = run(target, kind, k, temperature, batch, shown, monkeypatch)
    if temperature == 0:
        wanted = [list(greedy(target, prompt)[:n]) for prompt, n in zip(PROMPTS, TOKENS, strict=True)]
        assert [r.tokens for r in results] == wanted[:batch]
    for i, result in enumerate(results):  # alone, all at once
        if temperature or batch > 1:
            alone = alone_of(target, kind, k, temperature, i, monkeypatch)
            assert (result.tokens, result.text, result.finish_reason) == alone


_alone = {}


def alone_of(target, kind, k, temperature, i, monkeypatch):
    """The first prompts one after the other: everything of theirs, and nobody beside them."""
    key = (target, kind, k, temperature, i)
    if key not in _alone:
        pair = pair_on(target)
        with drafting(lambda: KINDS[kind](target, pair.model.vocab_size), monkeypatch):
            options = {"max_new_tokens": TOKENS[i], "temperature": temperature, "k": k, "seed": 3 + i}
            result = pair.generate(list(PROMPTS[i]), **options)
        _alone[key] = (result.tokens, result.text, result.finish_reason)
    return _alone[key]


SAMPLE = sample_of_the_grid()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", SAMPLE, ids=lambda setting: "-".join(map(str, setting)))
def test_settings(setting, kind, monkeypatch):
    check(setting, kind, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_settings(kind, monkeypatch):
    for setting in GRID:
        check(setting, kind, monkeypatch)


@pytest.mark.parametrize("target", ["scripted", "int8"])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_kinds_are_what_they_say(target, k, monkeypatch):
    """The bench itself: drafts that are never right, or always, or that fail, are counted as such."""
    of = {kind: run(target, kind, k, 0.0, 5, "whole", monkeypatch) for kind in KINDS}
    counts = {kind: [r.stats.speculation for r in results] for kind, results in of.items()}
    assert all(c.accepted == c.evaluated == c.proposed > 0 for c in counts["oracle"])
    assert all(c.accepted == 0 < c.evaluated for c in counts["anti"])
    assert all(0 < c.accepted < c.evaluated for c in counts["flaky"][:3])
    assert 0 < sum(c.accepted for c in counts["tree"]) < sum(c.evaluated for c in counts["tree"])
    assert all(c.faults for c in counts["faulty"][:3]) and not any(c.faults for c in counts["oracle"])
    assert all(c.rounds < n for c, n in zip(counts["oracle"], TOKENS, strict=True))


@pytest.mark.parametrize("kind", ["oracle", "flaky"])
def test_a_wrong_text_would_show(kind, monkeypatch):
    """A draft that is believed instead of verified."""
    import specloop.decode as loop

    judge = loop.judge

    def believing(logits, crew, proposals):
        verdicts = judge(logits, crew, proposals)
        for verdict, proposal in zip(verdicts, proposals, strict=True):
            if len(proposal.tokens) > verdict.accepted:
                verdict.tokens[:] = proposal.tokens
                verdict.accepted = len(proposal.tokens) - 1
        return verdicts

    monkeypatch.setattr(loop, "judge", believing)
    setting = ("scripted", 3, 0.0, 2, "whole")
    if kind == "oracle":  # nothing is refused, so nothing is wrong
        check(setting, kind, monkeypatch)
    else:
        with pytest.raises(AssertionError):
            check(setting, kind, monkeypatch)
