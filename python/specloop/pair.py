"""A target and its draft, ready to make text: ``load``, ``Pair.generate``, ``Pair.stream``, ``Pair.swap``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from .batch import play
from .checks import flag, function
from .options import (
    BUILTIN,
    Options,
    check_draft_model,
    check_each,
    check_k,
    check_load,
    check_prompts,
    check_request,
    check_target,
    is_model,
    resolve_aliases,
)
from .prompts import prompt_ids
from .session import Result, Session
from .stage import Stage, opener
from .stats import BatchStats
from .streaming import Stream


def load(
    target="smollm2",
    draft="auto",
    *,
    dtype="int8",
    k="auto",
    context=2048,
    threads=None,
    progress: Callable[[float], None] | None = None,
    memory_budget=None,
    kv="int8",
    device="auto",
    require_draft=False,
    **aliases,
) -> Pair:
    """Starts to load a model, and its draft if that is one too, in the background and returns at once.

    ``target``: "smollm2" or the path of a GGUF, a pack, or a folder as Hugging Face has them. ``draft``: "lookup",
    "none", "builtin" (the draft that comes with the package for the target, behind a lookup), "auto" (the same, or
    lookup alone for a target that has none), the path of a draft file (formats/draft_file.py), or another model with
    the same vocabulary, named like a target.
    ``k``: "auto" (by measured cost and acceptance) or a number of drafts per round. ``kv``: what the cache holds,
    "int8", "f16" or "f32". ``device``: "cpu", "cuda" (AMD's GPUs, too), or "auto". ``memory_budget``: bytes, or "120MB"
    (10^6) or "120MiB" (2^20), for weights, cache, workspace, logits and draft together; weights of the target beyond it
    are read from a file in every pass.
    A draft whose file turns out to be unreadable is done without, and the statistics say why; ``require_draft`` makes
    that an error.
    ``progress(fraction)`` is called from the loading threads, one call at a time. Raises OptionError here; what is
    wrong with the model, the budget or the device comes out of ``Pair.ready()`` or the first use.
    """
    named = {name: value for name, value in (("draft", draft), ("k", k)) if value != "auto"}
    named = resolve_aliases(named | aliases)
    draft, k = check_draft_model(named.pop("draft", "auto")), check_k(named.pop("k", "auto"))
    if named:
        raise TypeError(f"load() got an unexpected option {next(iter(named))!r}")
    check_target(target)
    check_load(dtype, context, threads, memory_budget, kv, device)
    flag("require_draft", require_draft)
    function("progress", progress)
    settings = {"dtype": dtype, "context": context, "kv": kv}
    settings |= {"device": device, "threads": threads, "memory_budget": memory_budget}
    opened = opener(**settings)
    more = {"progress": progress, "opened": opened, "require_draft": require_draft}
    return Pair(target, draft=draft, k=k, settings=settings, warm_up=True, **more)


class Pair(Stage):
    """A loaded (or loading) target with its draft. May be used from several threads; every request has its own cache.

    ``ready``, ``cancel_load``, ``swap`` and ``close`` are those of :class:`Stage`.
    """

    def generate(self, prompt, *, cancel=None, **options) -> Result:
        """The whole text. ``prompt``: a string, chat messages (list of {"role", "content"}), or token ids.

        ``cancel``: a threading.Event or a function that says whether to stop. Options and their defaults:
        :func:`specloop.options.check_request`; Hugging Face's names are understood. What a callback raises ends the
        request and comes out of here. An error that ended the text has what there was until then as its ``result``.
        """
        return self.generate_batch([prompt], cancel=cancel, **options)[0]

    def stream(self, prompt, *, cancel=None, **options) -> Stream:
        """An iterator of :class:`Event`, one per token, as they are made. Options as in :meth:`generate`."""
        return Stream(self, self._session(prompt, options, cancel))

    def generate_batch(self, prompts, *, each=None, batch_size=None, cancel=None, **options) -> list[Result]:
        """The texts of several prompts, whose requests share passes: each weight is read once for all of them.

        Every text is the one that :meth:`generate` makes of its prompt. ``each``: a list with options of single
        requests, one dict per prompt (a seed, say). ``batch_size``: most requests at once; None = as many as memory
        allows. ``cancel`` ends all of them, and so does what a callback raises, which comes out of here. Raises what
        :meth:`generate` raises of a single request when the others are through; the error has all ``results``.
        """
        prompts = check_prompts(prompts)
        each = check_each(each, len(prompts), batch_size)
        batch = BatchStats() if len(prompts) > 1 else None
        options = resolve_aliases(options)
        more = [resolve_aliases(own) for own in each]
        of = lambda i: self._session(prompts[i], options | more[i], cancel, index=i, batch=batch)
        sessions = [of(i) for i in range(len(prompts))]
        todo = sessions
        while todo:  # again where the target was exchanged, and nobody has seen a token
            whole = not any(session.is_watched for session in todo)
            with contextlib.closing(play(self, todo, size=batch_size, whole=whole)) as tokens:
                for session, token, from_draft in tokens:
                    session.event(token, from_draft)
            todo = [session for session in todo if not session.ended()]
            for i in [session.index for session in todo]:
                sessions[i] = of(i)
            todo = [sessions[session.index] for session in todo]
        results = [session.result for session in sessions]
        for session in sessions:
            error = session.failure
            if error is not None:
                error.results = results
                raise error
        return results

    def _session(self, prompt, options, cancel, *, index=0, batch=None) -> Session:
        options, follows = self._checked(options)
        return Session(self, self.encode(prompt, options), options, cancel, follows=follows, index=index, batch=batch)

    def _checked(self, options) -> tuple[Options, bool]:
        """The options, and whether the draft is the pair's, to go with it when it is exchanged."""
        options = {"k": self.k, "draft": "auto"} | resolve_aliases(options)
        asked = options["draft"]
        if self.draft == "auto":  # still loading: as if it were a model, and again when that is known
            check_request(**options, loaded=BUILTIN)
            self.ready()
        return check_request(**options, loaded=self.draft), asked == "auto" or is_model(asked)

    def encode(self, prompt, options: Options) -> list[int]:
        """The prompt as token ids. Raises PromptError if there are none or they leave no room for an answer."""
        return prompt_ids(prompt, options.chat, self._version, self.context)


_lock = threading.Lock()
_latest: tuple[dict, Pair] | None = None  # module-level generate() and stream() keep the last model


def _pair(target, **options) -> Pair:
    global _latest
    wanted = {"target": target} | options
    with _lock:
        if _latest is None or _latest[0] != wanted:
            _latest = None  # the old model goes before the new one comes
            _latest = (wanted, load(**wanted))
        return _latest[1]


_LOADING = ("dtype", "context", "threads", "memory_budget", "kv", "device", "require_draft")


def generate(prompt, *, target="smollm2", **options) -> Result:
    """``load(target).generate(prompt)``; the model stays loaded for the next call."""
    return _pair(target, **_pop_loading(options)).generate(prompt, **options)


def stream(prompt, *, target="smollm2", **options) -> Stream:
    """``load(target).stream(prompt)``; the model stays loaded for the next call."""
    return _pair(target, **_pop_loading(options)).stream(prompt, **options)


def _pop_loading(options):
    return {name: options.pop(name) for name in _LOADING if name in options}
