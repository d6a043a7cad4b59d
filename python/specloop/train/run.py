"""From a corpus folder and a target's name to a trained draft in a folder."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import asdict, replace

import torch

from ..checks import integer
from ..errors import FormatError, ModelError, OptionError
from ..fingerprint import fingerprint
from ..loader import choose_device, load_model
from ..options import check_load
from ..pair import load
from ..versions import Version
from . import checkpoint, export, initial, vocabulary
from .corpus import shard_numbers
from .generate import Settings as Writing
from .generate import generate_corpus
from .lock import alone
from .logged import log_contexts
from .manifest import WANTED, compare, read_manifest, want
from .plan import Settings
from .samples import Samples
from .start import read as read_start
from .trainer import CHECKPOINT, DRAFT, Trainer

LOGGED = "logged"  # folder of the contexts that a training has logged itself
CONTEXT = 2048  # of the target, and positions that a draft is trained for, more where texts are longer
SHARDS = 16  # of a new corpus: some 4,000 texts


def write_corpus(
    corpus, settings, *, shards=None, given=(), target="smollm2", dtype="int8", device="auto", threads=None, **more
):
    """Has the target write those of so many shards that are missing in ``corpus``. ``shards`` None: as many as were
    asked for last; as there are, where the folder doesn't say; ``SHARDS`` where there are none. ``settings``:
    generate.Settings, of which those that are named in ``given`` are held against the corpus even where nothing is
    missing. ``more``: as :func:`generate_corpus`.

    Returns its report, or None where nothing is missing.
    """
    check_load(dtype, CONTEXT, threads, None, "int8", device)
    settings.check()
    told, there = ((read_manifest(corpus) or {}), shard_numbers(corpus)) if os.path.isdir(corpus) else ({}, [])
    if shards is not None:
        integer("shards", shards, 1)
    wanted = shards or told.get(WANTED) or (0 if there else SHARDS)
    if set(range(wanted)) <= set(there):
        if told:
            of_corpus = {"seed": told.get("seed"), **(told.get("settings") or {})}
            compare(corpus, *({name: made[name] for name in given} for made in (of_corpus, asdict(settings))))
            want(corpus, wanted)
        return None
    if threads is not None:
        torch.set_num_threads(threads)
    context = settings.prompt_tokens + settings.answer_tokens
    loaded = load_model(target, dtype=dtype, context=context, device=choose_device(device))
    return generate_corpus(Version(*loaded, str(target)), corpus, shards=wanted, settings=settings, **more)


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
    training, a draft's file, or "builtin", whose weights are the first ones here, with its ids; None = initial.py's.
    ``target``, ``dtype``: the model that made the corpus, as it made it.
    ``logged``: a folder of a corpus' form with contexts of real speculative runs, to end with, or None. With
    ``settings.logged_shards`` it makes one itself: trains to ``logged_from``, has the target write texts with the draft
    as it is then (logged.py; ``writing``: generate.Settings) into ``folder``/logged, and goes on with these.
    ``more``: as :class:`Trainer`. Returns the trainer and whether it came to its end.

    Raises OptionError for values that can't be used, another training's state, or a folder that another training is
    running in; FormatError, ModelError; and what :meth:`Trainer.run` raises.
    """
    check_load(dtype, CONTEXT, threads, None, "int8", device)
    if settings.logged_shards and logged is not None:
        raise OptionError(f"logged: expected none where a training logs some itself (logged_shards), got {logged}")
    _keep_memory()
    if threads is not None:
        torch.set_num_threads(threads)
    device = choose_device(device)
    model, tokenizer, _ = load_model(target, dtype=dtype, context=CONTEXT)
    if not hasattr(model.weights, "layers"):
        raise ModelError(f"target: expected a model whose weights are in memory, got {target}, which streams")
    with alone(folder, f"out: another training is running in {folder}"):
        named = {"target": target, "dtype": dtype, "device": device, "threads": threads}
        more |= {"logged": logged, "writing": writing, "start": start}
        trainer = _trainer(corpus, folder, settings, model, tokenizer, **named, **more)
        del model  # the draft has what it needs of it
        return trainer, trainer.run()


def _trainer(
    corpus, folder, settings, model, tokenizer, *, target, dtype, device, threads, logged, writing, start, **more
):
    """The trainer of :func:`train`."""
    config, mark = model.config, fingerprint(model, tokenizer)
    whose = {"feature_size": config.hidden, "vocab": config.vocab, "target": mark, "dtype": dtype}
    begun = os.path.join(folder, CHECKPOINT)
    state = checkpoint.load(begun)[1] if os.path.exists(begun) else {}
    samples = Samples(corpus, names=state.get("shards"), **whose)
    own, mine = settings.logged_shards > 0, os.path.join(folder, LOGGED)

    def opened(folder):
        found = Samples(folder, names=state.get("logged"), held_out=0, **whose)
        for shard in found.shards:
            if not shard.logged:  # it would train on prompts that are held out
                raise FormatError(f"{shard.path}: expected contexts of speculative runs, got no tensor reached")
        return found

    def log(tell):
        told = writing or Writing(seed=settings.seed)
        form = {"dtype": dtype, "context": told.prompt_tokens + told.answer_tokens, "device": device}
        form |= {"k": settings.depths, "threads": threads, "require_draft": True}
        with load(target, os.path.join(folder, DRAFT), **form) as pair:
            more = {"shards": settings.logged_shards, "k": settings.depths, "progress": tell}
            log_contexts(pair, mine, settings=told, **more)
        return opened(mine)

    if own and state.get("logged"):
        more["logged"] = opened(mine)
    else:
        more |= {"logged": None if logged is None else opened(logged), "log": log if own else None}
    about = {"target": str(target), "dtype": dtype, "vocabulary": tokenizer.fingerprint, "fingerprint": mark}
    about |= {"model": asdict(config), "start": None}
    if start is None:
        settings = replace(settings, vocabulary=settings.vocabulary or vocabulary.SIZE)
        chosen = vocabulary.choose(samples.counts(), tokenizer, settings.vocabulary)
    else:
        first = read_start(start, kind=settings.kind, about=about, size=settings.vocabulary)
        settings = replace(settings, vocabulary=settings.vocabulary or first.vocabulary, fit_texts=0)
        chosen = vocabulary.among(first.ids, samples.counts(), tokenizer, settings.vocabulary)
        first = first.cut(chosen.ids)
        about["start"] = first.about
    make = {"positions": model.context + settings.depths, "seed": settings.seed}
    if settings.kind == "feature":
        draft = initial.feature_head(model, chosen.ids, **make)
    else:
        draft = initial.standalone(model, chosen.ids, settings.parameters, **make)
    if start is not None:
        first.give(draft)
    name, teacher_head = os.path.basename(str(target)), initial.rows_of(model.weights.head, chosen.ids)

    def write(path, values, recipe):
        recipe = recipe | {"coverage": chosen.coverage, "dtype": dtype}
        named = {"kind": settings.kind, "target": {"name": name, "fingerprint": mark}}
        named |= {"vocabulary": tokenizer.fingerprint, "dtype": export.fitting(draft.config)}
        export.export(path, draft, values=values, recipe=recipe, **named)

    return Trainer(draft, samples, settings, teacher_head, folder, about=about, export=write, device=device, **more)


def _keep_memory():
    """Makes the C library keep freed memory: a step allocates gigabytes in large pieces, and getting each of them from
    the system anew takes longer than computing on it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        mallopt(-1, 1 << 34 if ctypes.sizeof(ctypes.c_int) > 4 else (1 << 31) - 1)  # M_TRIM_THRESHOLD
