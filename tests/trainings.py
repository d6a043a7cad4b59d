"""What tests of training share: a toy target, a corpus in its words, and drafts for it."""

import functools

import torch

from specloop.fingerprint import fingerprint
from specloop.train import initial
from specloop.train.corpus import Text, write_shard
from specloop.train.head_loss import with_ones
from specloop.train.plan import Settings
from specloop.train.samples import Samples, collate
from specloop.versions import Version
from tiny_llama import CONFIG, build
from versions import Vocabulary

POSITIONS = 256
IDS = torch.cat([torch.arange(16), torch.arange(16, CONFIG.vocab, 2)])  # that a draft can say


def new_target():
    """Its head makes distributions over some dozens of ids; a random toy's own are far more sure of themselves."""
    model = build("f32", tied=False)
    model.weights.head.mul_(0.3)
    return Version(model, Vocabulary(), None, "tiny")


@functools.cache
def target():
    return new_target()


@torch.inference_mode()
def texts(count, seed=0, answer=20, temperature=1.0):
    """Random prompts, and answers that the target draws."""
    model, g = target().model, torch.Generator().manual_seed(seed)
    for i in range(count):
        prompt = torch.randint(3, CONFIG.vocab, (4 + i % 5,), generator=g).tolist()
        cache, ids, rows, length = model.new_cache(64, features=True), list(prompt), [], answer - i % 4
        logits = model.forward(prompt, cache, last=1)
        for _ in range(length):
            rows.append(logits[0].clone())
            ids.append(int(torch.multinomial((logits[0] / temperature).softmax(0), 1, generator=g)))
            logits = model.forward(ids[-1:], cache, last=1)
        rows = torch.stack(rows)
        top = rows.log_softmax(1).topk(16)
        features = cache.features[: len(ids)].clone()
        numbers = torch.tensor(ids, dtype=torch.int32)
        yield Text(numbers, len(prompt), features, rows.logsumexp(1), top.indices.int(), top.values.half(), 1.0, i)


@functools.cache
def some_texts():
    return list(texts(96))


def write_corpus(folder, found=None):
    folder.mkdir(exist_ok=True)
    found = some_texts() if found is None else found
    about = {"target": fingerprint(target().model, target().tokenizer), "vocabulary": target().tokenizer.fingerprint}
    for number, start in enumerate(range(0, len(found), 48)):
        write_shard(folder, number, found[start : start + 48], about)
    return folder


def samples(folder):
    return Samples(folder, feature_size=CONFIG.hidden, vocab=CONFIG.vocab)


def columns(ids=IDS):
    made = torch.full((CONFIG.vocab,), -1)
    made[ids] = torch.arange(len(ids))
    return made


def feature_head(ids=IDS, seed=0):
    return initial.feature_head(target().model, ids, positions=POSITIONS, seed=seed)


def standalone(ids=IDS, parameters=420_000):
    return initial.standalone(target().model, ids, parameters, positions=POSITIONS)


def teacher_head(ids=IDS):
    return initial.rows_of(target().model.weights.head, ids)


def batch(found, ids=IDS, dtype=torch.float32):
    return collate(found, columns(ids), with_ones(teacher_head(ids)).to(dtype))


def settings(**given):
    return Settings(**({"steps": 6, "rows": 64, "vocabulary": 100, "fit_texts": 8, "precision": "f32"} | given))
