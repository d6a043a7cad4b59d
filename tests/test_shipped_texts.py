"""Texts that the package ships for measurements: made by the scripts next to this file, and fit for their purpose."""

import difflib
import json
import re

import pytest

import make_agreement_prompts
import make_copy_edits
from specloop.evaluate import evaluation_prompts
from specloop.measure import load_prompts

MAKERS = [make_copy_edits, make_agreement_prompts]


def read(maker):
    return json.loads(maker.FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.FILE.name)
def test_the_file_is_what_its_script_makes(maker):
    assert maker.FILE.read_text(encoding="utf-8") == maker.as_text()


def test_copy_edits():
    edits = read(make_copy_edits)
    assert len(edits) >= 100 and len({edit["kind"] for edit in edits}) >= 6
    assert len({edit["instruction"] + edit["input"] for edit in edits}) == len(edits)
    for edit in edits:
        before, after = edit["input"].split(), edit["reference"].split()
        assert 30 <= len(before) <= 90, edit
        same = difflib.SequenceMatcher(None, before, after, autojunk=False).ratio()
        assert 0.6 < same < 1.0, edit  # most of it is copied, and something is not
        assert not set("[]<>@|") & set(edit["reference"]) or edit["kind"] == "rename", edit  # no markup is left
        assert edit["input"] == edit["input"].strip() and edit["reference"] == edit["reference"].strip()


def test_renamed_code_differs_in_the_name_alone():
    for edit in read(make_copy_edits):
        if edit["kind"] == "rename":
            words = edit["instruction"].split()
            old, new = words[3], words[5]
            assert re.sub(rf"\b{old}\b", new, edit["input"]) == edit["reference"], edit
            assert not re.search(rf"\b{new}\b", edit["input"]), edit


def test_agreement_prompts():
    prompts = [p["prompt"] for p in read(make_agreement_prompts)]
    assert len(prompts) == len(set(prompts)) >= 200
    assert all(0 < len(prompt.split()) < 90 for prompt in prompts)
    measured = {p["prompt"] for p in load_prompts()} | {edit["instruction"] for edit in read(make_copy_edits)}
    assert not measured & set(prompts)


@pytest.mark.parametrize("chunk", [4, 256])
def test_agreement_is_counted_by_a_plain_pass(chunk, monkeypatch):
    """The judge of the lossy rule: wherever a token is not what its own prefix asks for, and by how much."""
    import bench_threshold

    from loops import PROMPTS, greedy, pair_on

    monkeypatch.setattr(bench_threshold, "CHUNK", chunk)
    pair, prompt = pair_on("f32"), list(PROMPTS[3])
    tokens = list(greedy("f32", PROMPTS[3]))
    assert bench_threshold.judge(pair, prompt, tokens) == ([True] * len(tokens), [0.0] * len(tokens))
    tokens[5] = (tokens[5] + 1) % pair.model.vocab_size
    agreed, gaps = bench_threshold.judge(pair, prompt, tokens)
    assert agreed[:6] == [True] * 5 + [False]
    for i in range(5, len(tokens)):  # what comes behind is judged by the text as it now is
        ids = [*prompt, *tokens[:i]]
        row = pair.model.forward(ids, pair.model.new_cache(len(ids)), last=1)[0]
        assert agreed[i] == (row.argmax().item() == tokens[i])
        assert gaps[i] == pytest.approx((row.max() - row[tokens[i]]).item(), abs=1e-4)


def test_evaluation_prompts():
    """Held apart from the other texts, some of which serve to choose or to train: no eight words in a row."""
    prompts = evaluation_prompts()
    groups = {c: [p for p in prompts if p["category"] == c] for c in dict.fromkeys(p["category"] for p in prompts)}
    assert list(groups) == ["chat", "code", "classify", "summarise", "repeat", "edit"]
    for group in groups.values():
        assert len(group) == 15 and sum(p.get("quick", False) for p in group) == 3
        assert any(len(p["turns"]) == 2 for p in group) and all(1 <= len(p["turns"]) <= 2 for p in group)
    assert len({turn for p in prompts for turn in p["turns"]}) == sum(len(p["turns"]) for p in prompts)
    assert all(turn == turn.strip() and turn for p in prompts for turn in p["turns"])
    others = [p["prompt"] for p in load_prompts() + read(make_agreement_prompts)]
    others += [edit["instruction"] + "\n\n" + edit["input"] for edit in read(make_copy_edits)]
    measured = set().union(*(runs(turn) for p in prompts for turn in p["turns"]))
    assert len(measured) > 2000 and not measured & set().union(*map(runs, others))


def runs(text, length=8):
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}
