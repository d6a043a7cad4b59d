"""Drafts as they are trained are drafts as they are decoded: the same rows, chains, positions and labels."""

from dataclasses import replace

import pytest
import torch

from specloop.draft_loader import load_draft
from specloop.errors import OptionError
from specloop.fingerprint import fingerprint
from specloop.train.export import export, fitting
from specloop.train.networks import FeatureHead, Standalone, standalone_config
from tiny_llama import CONFIG
from trainings import IDS, batch, columns, feature_head, some_texts, standalone, target, teacher_head

DEPTHS = 3
pytestmark = pytest.mark.usefixtures("one_thread")


def stirred(draft, seed=0):
    """With no parameter at a special value."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            size = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=g) * size)
    return draft


def engine(draft, kind, folder):
    """The draft as the decoder has it, from a file."""
    t = target()
    about = {"name": "tiny", "fingerprint": fingerprint(t.model, t.tokenizer)}
    path = folder / f"{kind}.safetensors"
    export(path, draft, kind=kind, target=about, vocabulary=t.tokenizer.fingerprint, recipe={}, dtype="f32")
    return load_draft(path, t, kv="f32", context=128)[0]


@torch.inference_mode()
def decoded(head, text, start, depths):
    """Logits of a chain as the decoder drafts: true features up to ``start``, its own behind them."""
    cache = head.new_cache(64)
    cache.given = text.features, start
    ids = text.ids.tolist()
    made = [head.forward(ids[: start + 1], cache, last=1).clone()]
    made += [head.forward([ids[start + i]], cache, last=1).clone() for i in range(1, depths)]
    return torch.cat(made)


@torch.inference_mode()
def trained(draft, found):
    """{(text, row, depth): logits} of all rows that count, and the batch."""
    made = batch(found)
    states = draft(made, DEPTHS)
    states = torch.stack([states[i].roll(i, 0) for i in range(DEPTHS)])
    logits, counted, at = states @ draft.head.T, made.counted(DEPTHS), 0
    rows = {}
    for number, span in enumerate(made.spans):
        for j in range(span.chains):
            for depth in range(DEPTHS):
                if counted[depth, at + j]:
                    rows[number, span.first + j, depth] = logits[depth, at + j]
        at += span.chains
    return rows, made


def test_a_chain_in_training_is_the_chain_that_is_decoded(tmp_path):
    """Every row of every text at every depth, against the engine that reads the written file row by row. A mask that
    shows one row too many, a position or a feature shifted by one: all of it shows here."""
    draft = stirred(feature_head())
    head, found = engine(draft, "feature", tmp_path), some_texts()[:3]
    rows, _ = trained(draft, found)
    for number, text in enumerate(found):
        length = len(text.ids)
        for start in range(text.prompt - 1, length - 1):
            want = decoded(head, text, start, min(DEPTHS, length - 1 - start))
            for depth, row in enumerate(want):  # the decoder keeps its own features in bf16
                off = 0.02 if depth else 2e-4
                torch.testing.assert_close(rows.pop((number, start + depth, depth)), row, rtol=2e-4, atol=off)
    assert not rows  # the same rows, no others


@pytest.mark.parametrize("fault", ["feature", "position", "mask", "id"])
def test_faults_that_look_like_a_bad_draft_are_seen(tmp_path, monkeypatch, fault):
    from specloop.train import attention

    draft = stirred(feature_head())
    head, text = engine(draft, "feature", tmp_path), some_texts()[0]
    if fault == "feature":  # a row sees its own feature, which is that of the id it is to guess
        true = text.features
        shifted = text._replace(features=torch.cat([true[1:], true[-1:]]))
        rows, _ = trained(draft, [shifted])
    elif fault == "position":
        monkeypatch.setattr(draft, "rotary", lambda positions: (draft.cos[2 * positions], draft.sin[2 * positions]))
        rows, _ = trained(draft, [text])
    elif fault == "mask":
        one = attention._attend
        monkeypatch.setattr(attention, "_attend", lambda q, k, v, own, first: one(q, k, v, own, max(0, first - 1)))
        rows, _ = trained(draft, [text])
    else:
        draft.target_embedding = draft.target_embedding.roll(1, 0)
        rows, _ = trained(draft, [text])
    start = text.prompt + 2
    want = decoded(head, text, start, DEPTHS)
    assert any((rows[0, start + i, i] - want[i]).abs().max() > 0.05 for i in range(DEPTHS))


def test_a_model_of_its_own_is_the_one_that_is_decoded(tmp_path):
    draft = stirred(standalone())
    model, found = engine(draft, "model", tmp_path), some_texts()[:3]
    made = batch(found)
    with torch.inference_mode():
        logits = (draft(made)[0] @ draft.head.T).split([text.answer for text in found])
        for text, rows in zip(found, logits, strict=True):
            want = model.forward(text.ids[:-1].tolist(), model.new_cache(64), last=text.answer)
            torch.testing.assert_close(rows, want, rtol=2e-4, atol=2e-4)


def test_labels_are_the_targets_rows():
    """Answer row j is held against the distribution that the answer's id j was drawn from; prompts count nothing."""
    found = some_texts()[:4]
    made, at = batch(found), 0
    log_p = made.teacher.log_p(0, len(made.starts))
    assert len(made.starts) == sum(text.answer for text in found)
    for text in found:
        model = target().model
        cache, ids = model.new_cache(64), text.ids.tolist()
        with torch.inference_mode():
            whole = model.forward(ids[:-1], cache, last=text.answer).log_softmax(1)
        part = slice(at, at + text.answer)
        torch.testing.assert_close(log_p[part], whole[:, IDS], atol=0.03, rtol=0.01)  # features are bf16
        best = columns()[whole.argmax(1)]
        assert torch.equal(made.teacher.best[part], best)
        assert made.ids[made.starts[part]].tolist() == ids[text.prompt - 1 : -1]  # the row's own id
        assert made.positions[made.starts[part]].tolist() == list(range(text.prompt - 1, len(ids) - 1))
        shift = (log_p[part][1:] - whole[:-1, IDS]).abs().max()
        assert shift > 1  # labels of the row before would be others
        at += text.answer


def test_no_gradient_comes_from_behind_a_row():
    """The row of a chain does not depend on ids or features that the decoder would not have."""
    draft, text = stirred(feature_head()), some_texts()[0]
    row = text.prompt + 4

    def logits(changed):
        rows, _ = trained(draft, [changed])
        return [rows[0, row, depth] for depth in range(DEPTHS)]

    base = logits(text)
    later = text.ids.clone()
    later[row + 1 :] = 5
    features = text.features.clone()
    features[row:] = 1
    for depth, (a, b) in enumerate(zip(base, logits(text._replace(ids=later, features=features)), strict=True)):
        assert torch.equal(a, b), depth
    features = text.features.clone()
    features[row - 2] += 1  # which depth 2 replaces by its own, and depths 0 and 1 read
    a, b = base, logits(text._replace(features=features))
    assert torch.equal(a[2], b[2]) and not torch.equal(a[0], b[0]) and not torch.equal(a[1], b[1])


def test_first_weights():
    """Fitted, a head is already worth something, without its layer."""
    from specloop.train.head_loss import compare
    from specloop.train.initial import fit

    draft, found = feature_head(), some_texts()

    def alpha():
        made = batch(found[48:])
        with torch.no_grad():
            counted = made.counted(1)
            seen, *_ = compare(draft(made, 1), draft.head, made.teacher, counted, {"kl": 1.0}, torch.float32)
        return seen.means()[0][1].item()

    (layer,) = draft.layers
    assert torch.equal(layer.qkv, target().model.weights.layers[-1].qkv)
    before = alpha()
    fit(draft, found[:48], lambda text: batch([text]))
    assert alpha() > before + 0.005
    assert not layer.down.any() and not layer.attention_out.any() and 0.05 < layer.gate_up.std() < 0.2
    assert torch.equal(draft.head, teacher_head())


REAL = replace(CONFIG, vocab=49152, hidden=576, heads=9, kv_heads=3, head_dim=64)
LEAST = 1_875_968  # of these ids


@pytest.mark.parametrize("parameters", [6_700_000, 13_500_000, 27_000_000, 600_000_000])
def test_sizes_of_models(parameters):
    config = standalone_config(REAL, parameters, 8192)
    with torch.device("meta"):
        draft = Standalone(config, torch.arange(8192, device="cpu"), positions=8)
    found = sum(p.numel() for p in draft.parameters())
    assert abs(found / parameters - 1) < 0.05 and config.layers == 4
    assert config.hidden == config.heads * config.head_dim and config.hidden % 32 == 0 and fitting(config) == "int8"


@pytest.mark.parametrize("parameters", [20_000, LEAST - 1])
def test_sizes_that_no_model_has(parameters):
    with pytest.raises(OptionError, match=f"parameters: expected at least {LEAST} for 49152 ids, 8192 of which it can"):
        standalone_config(REAL, parameters, 8192)
    config = standalone_config(REAL, LEAST, 8192)
    assert config.hidden == 32 and config.intermediate == 64


def test_kinds():
    assert isinstance(feature_head(), FeatureHead) and isinstance(standalone(), Standalone)
    assert not any("target_embedding" in name for name, _ in feature_head().named_parameters())
