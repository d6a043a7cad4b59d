"""From a corpus folder and a target's name to a trained draft in a folder."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import asdict, replace

import torch

from ..errors import ModelError, OptionError
from ..fingerprint import fingerprint
from ..loader import choose_device, load_model
from ..pair import load
from ..versions import Version
from . import checkpoint, export, initial, vocabulary
from .corpus import shard_numbers
from .generate import Settings as Writing
from .generate import generate_corpus
from .logged import log_contexts
from .plan import Settings
from .samples import Samples
from .trainer import CHECKPOINT, DRAFT, Trainer

LOGGED = "logged"  # folder of the contexts that a training has logged itself
CONTEXT = 2048  # positions that a draft is trained for, at most
SHARDS = 16  # of a new corpus: some 4,000 texts


def write_corpus(corpus, settings, *, shards, target="smollm2", dtype="int8", device="auto", threads=None, **more):
    """Has the target write those of so many shards that are missing in ``corpus``. ``shards`` None: as many as there
    are, ``SHARDS`` where there are none. ``settings``: generate.Settings; ``more``: as :func:`generate_corpus`.

    Returns its report, or None where nothing is missing.
    """
    there = shard_numbers(corpus) if os.path.isdir(corpus) else []
    if shards is None:
        shards = 0 if there else SHARDS
    settings.check()
    if set(range(shards)) <= set(there):
        return None
    if threads is not None:
        torch.set_num_threads(threads)
    context = settings.prompt_tokens + settings.answer_tokens
    loaded = load_model(target, dtype=dtype, context=context, device=choose_device(device))
    return generate_corpus(Version(*loaded, str(target)), corpus, shards=shards, settings=settings, **more)


def train(
    corpus,
    folder,
    settings: Settings,
    *,
    target="smollm2",
    dtype="int8",
    device="auto",
    threads=None,
    logged=None,
    writing=None,
    start=None,
    **more,
):
    """Trains on the shards that are in ``corpus`` now, and writes checkpoint, draft and log to ``folder``.

    Goes on where ``folder`` has a state, with the shards that it was begun with. ``start``: the folder of another
    training, whose averaged weights are the first ones here, with its ids; None = initial.py's.
    ``target``, ``dtype``: the model that made the corpus, as it made it.
    ``logged``: a folder of a corpus' form with contexts of real speculative runs, to end with, or None. With
    ``settings.logged_shards`` it makes one itself: trains to ``logged_from``, has the target write texts with the draft
    as it is then (logged.py; ``writing``: generate.Settings) into ``folder``/logged, and goes on with these.
    ``more``: as :class:`Trainer`. Returns the trainer and whether it came to its end.
    """
    _keep_memory()
    if threads is not None:
        torch.set_num_threads(threads)
    device = choose_device(device)
    model, tokenizer, _ = load_model(target, dtype=dtype, context=CONTEXT)
    config, weights = model.config, model.weights
    if not hasattr(weights, "layers"):
        raise ModelError(f"target: expected a model whose weights are in memory, got {target}, which streams")
    name, mark = os.path.basename(str(target)), fingerprint(model, tokenizer)
    whose = {"feature_size": config.hidden, "vocab": config.vocab, "target": mark}
    begun = os.path.join(folder, CHECKPOINT)
    state = checkpoint.load(begun)[1] if os.path.exists(begun) else {}
    samples = Samples(corpus, names=state.get("shards"), **whose)
    own, mine = settings.logged_shards > 0, os.path.join(folder, LOGGED)
    if own and logged is not None:
        raise OptionError(f"logged: expected none where a training logs some itself (logged_shards), got {logged}")

    def opened(folder, names=None):
        return Samples(folder, names=names, held_out=0, **whose)

    def log(tell):
        told = writing or Writing(seed=settings.seed)
        form = {"dtype": dtype, "context": told.prompt_tokens + told.answer_tokens, "device": device}
        form |= {"k": settings.depths, "threads": threads, "require_draft": True}
        with load(target, os.path.join(folder, DRAFT), **form) as pair:
            more = {"shards": settings.logged_shards, "k": settings.depths, "progress": tell}
            log_contexts(pair, mine, settings=told, **more)
        return opened(mine)

    if own and state.get("logged"):
        more["logged"] = opened(mine, state["logged"])
    else:
        more |= {"logged": None if logged is None else opened(logged), "log": log if own else None}
    given = None if start is None else checkpoint.load(os.path.join(start, CHECKPOINT))
    if given is None:
        chosen = vocabulary.choose(samples.counts(), tokenizer, settings.vocabulary)
    else:
        chosen = vocabulary.covering(given[0]["draft_ids"], samples.counts())
    make = {"positions": model.context + settings.depths, "seed": settings.seed}
    if settings.kind == "feature":
        draft = initial.feature_head(model, chosen.ids, **make)
    else:
        draft = initial.standalone(model, chosen.ids, settings.parameters, **make)
    if given is not None:
        checkpoint.take_averages(start, given[0], draft)
        settings = replace(settings, fit_texts=0)
    teacher_head = initial.rows_of(weights.head, chosen.ids)
    about = {"target": str(target), "dtype": dtype, "vocabulary": tokenizer.fingerprint, "model": asdict(config)}
    about["start"] = given and {"folder": os.path.basename(os.path.abspath(start)), "crc32": given[1].get("crc32")}

    def write(path, values, recipe):
        recipe = recipe | {"coverage": chosen.coverage, "dtype": dtype}
        named = {
            "kind": settings.kind,
            "target": {"name": name, "fingerprint": mark},
            "vocabulary": tokenizer.fingerprint,
        }
        export.export(path, draft, values=values, recipe=recipe, dtype=export.fitting(draft.config), **named)

    del model, weights  # the draft has what it needs of them
    trainer = Trainer(draft, samples, settings, teacher_head, folder, about=about, export=write, device=device, **more)
    return trainer, trainer.run()


def _keep_memory():
    """Makes the C library keep freed memory: a step allocates gigabytes in large pieces, and getting each of them from
    the system anew takes longer than computing on it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        mallopt(-1, 1 << 34 if ctypes.sizeof(ctypes.c_int) > 4 else (1 << 31) - 1)  # M_TRIM_THRESHOLD
