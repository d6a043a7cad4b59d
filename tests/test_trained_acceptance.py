"""What the trainer says of a draft is what the decoder finds."""

import pytest
import torch

from specloop.drafts.lookup import LookupDraft
from specloop.fingerprint import fingerprint
from specloop.pair import Pair
from specloop.stage import opener
from specloop.train.corpus import Text
from specloop.train.export import export
from specloop.train.head_loss import compare
from specloop.train.trainer import DRAFT, Trainer
from trainings import (
    IDS,
    batch,
    feature_head,
    new_target,
    samples,
    settings,
    standalone,
    target,
    teacher_head,
    write_corpus,
)

pytestmark = pytest.mark.usefixtures("one_thread")
DEPTHS, PROMPTS, TOKENS = 3, 40, 64
OPENED = {"dtype": "f32", "kv": "f32", "context": 128, "device": "cpu", "threads": None, "memory_budget": None}


@pytest.mark.parametrize("kind", ["feature", "model"])
def test_the_decoder_accepts_what_the_trainer_says(tmp_path, monkeypatch, kind):
    """A draft trained for some steps; texts that the decoder makes with it at T = 1, of which the trainer then says how
    much should have been accepted. The first guess of a round has a context that the target drew: there both must be
    the same, up to chance, which leaves 1 % here. Behind an accepted guess contexts are likelier ones for both.
    """
    monkeypatch.setattr(LookupDraft, "outlook", lambda self: (0, 0))
    t = target()
    draft = feature_head() if kind == "feature" else standalone()
    about = {"name": "tiny", "fingerprint": fingerprint(t.model, t.tokenizer)}

    def write(path, values, recipe):
        named = {"kind": kind, "target": about, "vocabulary": t.tokenizer.fingerprint}
        export(path, draft, values=values, recipe=recipe, dtype="f32", **named)

    told = settings(kind=kind, steps=16, rows=200, rate=3e-3, ema=0.8, losses={"kl": 1.0})
    trainer = Trainer(draft, samples(write_corpus(tmp_path)), told, teacher_head(), tmp_path, about={}, export=write)
    trainer.run()
    evaluated, accepted, texts = [0] * DEPTHS, [0] * DEPTHS, []
    loads = new_target()  # the pair closes it
    with Pair(
        lambda: (loads.model, loads.tokenizer, None), draft=str(tmp_path / DRAFT), k=DEPTHS, opened=opener(**OPENED)
    ) as pair:
        prompts = [[3 + (7 * i + 11 * j) % 190 for j in range(5)] for i in range(PROMPTS)]
        each = [{"seed": i} for i in range(PROMPTS)]
        for prompt, made in zip(
            prompts,
            pair.generate_batch(prompts, each=each, temperature=1.0, max_new_tokens=TOKENS, batch_size=8),
            strict=True,
        ):
            counts = made.stats.speculation
            assert counts.faults == []
            for found, more in ((evaluated, counts.evaluated_at), (accepted, counts.accepted_at)):
                for i, n in enumerate(more):
                    found[i] += n
            texts.append(text_of(prompt + made.tokens, len(prompt)))
    whole = batch(texts)
    with torch.no_grad():
        depths = DEPTHS if kind == "feature" else 1
        states = draft_states(draft, trainer.ema, whole, depths)
        seen, *_ = compare(
            states, trainer.ema["head"], whole.teacher, whole.counted(depths), {"kl": 1.0}, torch.float32
        )
    alpha = seen.means()[0][1].tolist()
    found = [a / e for a, e in zip(accepted, evaluated, strict=True)]
    assert evaluated[0] > 1200 and 0.2 < alpha[0] < 0.9
    assert abs(found[0] - alpha[0]) < 0.02, (found, alpha, evaluated)
    for i in range(1, depths):
        assert abs(found[i] - alpha[i]) < 0.05, (found, alpha, evaluated)
    assert len(IDS) < t.model.vocab_size  # under a cut vocabulary


def draft_states(draft, values, made, depths):
    states = torch.func.functional_call(draft, values, (made, depths))
    return torch.stack([states[i].roll(i, 0) for i in range(depths)])


@torch.inference_mode()
def text_of(ids, prompt):
    """What the target says of a text."""
    model = target().model
    cache = model.new_cache(128, features=True)
    rows = model.forward(ids, cache, last=len(ids))[prompt - 1 : -1]
    top = rows.log_softmax(1).topk(16)
    numbers = torch.tensor(ids, dtype=torch.int32)
    features = cache.features[: len(ids)].clone()
    return Text(numbers, prompt, features, rows.logsumexp(1), top.indices.int(), top.values.half())
