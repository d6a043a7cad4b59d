"""A target and its draft, ready to make text: ``load``, ``Pair.generate``, ``Pair.stream``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from .errors import OptionError, PromptError
from .options import Options, check_draft, check_k, check_load, check_request, resolve_aliases
from .streaming import Result, Stream


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
    **aliases,
) -> Pair:
    """Starts to load a model in the background and returns at once.

    ``target``: "smollm2" or the path of a GGUF, a pack, or a folder as Hugging Face has them. ``draft``: "auto",
    "lookup", "none". ``k``: "auto" (by measured cost and acceptance) or a number of drafts per round. ``kv``: what the
    cache holds, "int8", "f16" or "f32". ``device``: "cpu", "cuda" (AMD's GPUs, too), or "auto". ``memory_budget``:
    bytes, or "120MB" (10^6) or "120MiB" (2^20), for weights, cache, workspace and logits together; weights beyond it
    are read from a file in every pass.
    ``progress(fraction)`` is called from the loading thread. Raises OptionError here; what is wrong with the model,
    the budget or the device comes out of ``Pair.ready()`` or the first use.
    """
    named = {name: value for name, value in (("draft", draft), ("k", k)) if value != "auto"}
    named = resolve_aliases(named | aliases)
    draft, k = check_draft(named.pop("draft", "auto")), check_k(named.pop("k", "auto"))
    if named:
        raise TypeError(f"load() got an unexpected option {next(iter(named))!r}")
    check_load(dtype, context, threads, memory_budget, kv, device)

    def parts():
        from .loader import load_model

        if threads:
            import torch

            torch.set_num_threads(threads)
        options = {"dtype": dtype, "kv": kv, "context": context, "device": device, "memory_budget": memory_budget}
        return load_model(target, progress=progress, **options)

    settings = {"model": str(target), "dtype": dtype, "context": context, "kv": kv}
    settings |= {"device": device, "threads": threads, "memory_budget": memory_budget}
    return Pair(parts, draft=draft, k=k, settings=settings, warm_up=True)


class Pair:
    """A loaded (or loading) target with its draft. May be used from several threads; every request has its own cache.

    ``parts``: returns (model, tokenizer, chat template or None); called once, in a thread of its own. ``warm_up``: that
    thread then makes the passes that rounds consist of, so that the first round takes no longer than others.
    """

    def __init__(self, parts: Callable, *, draft="lookup", k="auto", settings=None, warm_up=False):
        self.draft, self.k = draft, k
        self.settings = settings or {}
        self.load_seconds: float | None = None
        self._model_lock = threading.Lock()  # held while the model's scratch memory is in use
        self._costs: list[float] | None = None
        self._costs_lock = threading.Lock()
        self._parts = self._error = None
        self._loading = threading.Thread(target=self._load, args=(parts, warm_up), name="specloop-load", daemon=True)
        self._loading.start()

    def _load(self, parts, warm_up):
        start = time.perf_counter()
        try:
            loaded = parts()
            if warm_up:
                self._warm_up(loaded[0])
            self._parts = loaded
        except BaseException as error:
            self._error = error
        self.load_seconds = time.perf_counter() - start

    def _warm_up(self, model):
        from .controller import measure_costs, warm_up

        if self.draft != "none" and self.k == "auto":
            self._costs = measure_costs(model)
        else:
            warm_up(model, 1, 1 if self.draft == "none" else self.k + 1)

    def ready(self, timeout: float | None = None) -> bool:
        """Waits until the model is loaded (at most ``timeout`` seconds): whether it is. Raises what loading raised."""
        self._loading.join(timeout)
        if self._error is not None:
            raise self._error
        return self._parts is not None

    @property
    def model(self):
        self.ready()
        return self._parts[0]

    @property
    def tokenizer(self):
        self.ready()
        return self._parts[1]

    @property
    def chat_template(self) -> str | None:
        self.ready()
        return self._parts[2]

    @property
    def costs(self) -> list[float]:
        """Seconds of a pass over 1..9 rows, measured once: by the warm-up if ``k`` is "auto", else on first use."""
        from .controller import measure_costs

        with self._costs_lock:
            if self._costs is None:
                with self._model_lock:
                    self._costs = measure_costs(self.model)
            return self._costs

    def generate(self, prompt, *, cancel=None, **options) -> Result:
        """The whole text. ``prompt``: a string, chat messages (list of {"role", "content"}), or token ids.

        ``cancel``: a threading.Event or a function that says whether to stop. Options and their defaults:
        :func:`specloop.options.check_request`; Hugging Face's names are understood.
        """
        stream = self.stream(prompt, cancel=cancel, **options)
        for _ in stream:
            pass
        return stream.result

    def stream(self, prompt, *, cancel=None, **options) -> Stream:
        """An iterator of :class:`Event`, one per token, as they are made. Options as in :meth:`generate`."""
        options = check_request(**({"draft": self.draft, "k": self.k} | resolve_aliases(options)))
        return Stream(self, self.encode(prompt, options), options, cancel)

    def encode(self, prompt, options: Options) -> list[int]:
        """The prompt as token ids. Raises PromptError if there are none or they leave no room for an answer."""
        ids, model = self._ids(prompt, options.chat), self.model
        context = min(model.context, self.settings.get("context", model.context))
        if not ids:
            raise PromptError("prompt: expected at least one token, got none")
        bad = next((token for token in ids if not 0 <= token < model.vocab_size), None)
        if bad is not None:
            raise PromptError(f"prompt: expected token ids in [0, {model.vocab_size}), got {bad}")
        if len(ids) >= context:
            raise PromptError(f"prompt: expected fewer tokens than the context of {context}, got {len(ids)}")
        return ids

    def _ids(self, prompt, chat) -> list[int]:
        messages = None
        if isinstance(prompt, str):
            if chat is None:
                chat = self.chat_template is not None
            if chat:
                messages = [{"role": "user", "content": prompt}]
        elif isinstance(prompt, Sequence) and prompt and all(isinstance(part, dict) for part in prompt):
            messages = list(prompt)
        elif (
            isinstance(prompt, Sequence)
            and not isinstance(prompt, bytes | bytearray)
            and all(type(p) is int for p in prompt)
        ):
            return list(prompt)
        else:
            raise PromptError(f"prompt: expected a string, token ids or messages, got {type(prompt).__name__}")
        if messages is None:
            bos = [self.tokenizer.bos_id] if getattr(self.tokenizer, "add_bos", False) else []
            return bos + self.tokenizer.encode(prompt, special=False)
        if self.chat_template is None:
            raise OptionError("chat: the model has no chat template")
        from .text.prompt import encode_messages

        return encode_messages(self.chat_template, messages, self.tokenizer)


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


_LOADING = ("dtype", "context", "threads", "memory_budget", "kv", "device")


def generate(prompt, *, target="smollm2", **options) -> Result:
    """``load(target).generate(prompt)``; the model stays loaded for the next call."""
    return _pair(target, **_pop_loading(options)).generate(prompt, **options)


def stream(prompt, *, target="smollm2", **options) -> Stream:
    """``load(target).stream(prompt)``; the model stays loaded for the next call."""
    return _pair(target, **_pop_loading(options)).stream(prompt, **options)


def _pop_loading(options):
    return {name: options.pop(name) for name in _LOADING if name in options}
