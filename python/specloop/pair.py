"""A target and its draft, ready to make text: ``load``, ``Pair.generate``, ``Pair.stream``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .errors import OptionError, PromptError
from .options import Options, check_draft, check_k, check_load, check_request, resolve_aliases
from .stats import Stats, peak_memory
from .stops import StopMatcher


@dataclass(frozen=True, slots=True)
class Event:
    """One emitted token. ``text`` is valid UTF-8, "" while a character or a possible stop string is incomplete.

    ``finish_reason`` is set in the last event. Only after a cancel may there be an event without a token (``token``
    None): the text that was held back.
    """

    token: int | None
    text: str
    from_draft: bool = False
    finish_reason: str | None = None


@dataclass(slots=True)
class Result:
    text: str
    tokens: list[int]  # emitted ids, with the one that ended the text (EOS, or the last of a stop string)
    finish_reason: str | None
    stats: Stats

    def as_dict(self) -> dict:
        head = {"text": self.text, "tokens": list(self.tokens), "finish_reason": self.finish_reason}
        return head | self.stats.as_dict()


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
    kv="f32",
    device="auto",
    **aliases,
) -> Pair:
    """Starts to load a model in the background and returns at once.

    ``target``: "smollm2" or the path of a GGUF. ``draft``: "auto", "lookup", "none". ``k``: "auto" (by measured cost
    and acceptance) or a number of drafts per round. ``progress(fraction)`` is called from the loading thread. Raises
    OptionError here; what is wrong with the model comes out of ``Pair.ready()`` or the first use.
    """
    named = {name: value for name, value in (("draft", draft), ("k", k)) if value != "auto"}
    named = resolve_aliases(named | aliases)
    draft, k = check_draft(named.pop("draft", "auto")), check_k(named.pop("k", "auto"))
    if named:
        raise TypeError(f"load() got an unexpected option {next(iter(named))!r}")
    check_load(dtype, context, threads, memory_budget, kv, device)

    def parts():
        from .loader import load_model

        return load_model(target, dtype=dtype, context=context, progress=progress)

    settings = {"model": str(target), "dtype": dtype, "context": context, "kv": kv, "threads": threads}
    return Pair(parts, draft=draft, k=k, settings=settings)


class Pair:
    """A loaded (or loading) target with its draft. May be used from several threads; every request has its own cache.

    ``parts``: returns (model, tokenizer, chat template or None); called once, in a thread of its own.
    """

    def __init__(self, parts: Callable, *, draft="lookup", k="auto", settings=None):
        self.draft, self.k = draft, k
        self.settings = settings or {}
        self.load_seconds: float | None = None
        self._model_lock = threading.Lock()  # held while the model's scratch memory is in use
        self._costs: list[float] | None = None
        self._costs_lock = threading.Lock()
        self._parts = self._error = None
        self._loading = threading.Thread(target=self._load, args=(parts,), name="specloop-load", daemon=True)
        self._loading.start()

    def _load(self, parts):
        import time

        start = time.perf_counter()
        try:
            self._parts = parts()
        except BaseException as error:
            self._error = error
        self.load_seconds = time.perf_counter() - start

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
        """Seconds of a pass over 1..9 rows, measured once, on first use."""
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
        elif isinstance(prompt, Sequence) and all(type(part) is int for part in prompt):
            return list(prompt)
        else:
            raise PromptError(f"prompt: expected a string, token ids or messages, got {type(prompt).__name__}")
        if messages is None:
            bos = [self.tokenizer.bos_id] if getattr(self.tokenizer, "add_bos", False) else []
            return bos + self.tokenizer.encode(prompt, special=False)
        if self.chat_template is None:
            raise OptionError("chat: the model has no chat template")
        from .text.chat import chat_prompt

        bos, eos = (self._token_text(getattr(self.tokenizer, name, None)) for name in ("bos_id", "eos_id"))
        return self.tokenizer.encode(chat_prompt(self.chat_template, messages, bos=bos, eos=eos))

    def _token_text(self, token: int | None) -> str:
        return "" if token is None else self.tokenizer.decode([token])


class Reader:
    """Ids in, text out: whole characters only, nothing of a stop string, nothing after it."""

    def __init__(self, tokenizer, stops: Sequence[str]):
        from .text.tokenizer import StreamDecoder

        self._decoder = StreamDecoder(tokenizer, special=False)
        self._stops = StopMatcher(stops)
        self._text = ""

    def push(self, token: int) -> bool:
        """Whether the text ends with this token."""
        self._text += self._stops.push(self._decoder.push(token))
        return self._stops.hit is not None

    def take(self, *, end: bool) -> str:
        """What became readable since the last call; at the end also what was held back."""
        if end:
            self._text += self._stops.push(self._decoder.flush()) + self._stops.flush()
        text, self._text = self._text, ""
        return text


class Stream:
    """A running request: iterate for its events, ``cancel()`` from any thread, ``result`` at any time."""

    def __init__(self, pair: Pair, ids: list[int], options: Options, cancel=None):
        import torch

        from .decode import Request, Sampling, decode

        if pair.settings.get("threads"):
            torch.set_num_threads(pair.settings["threads"])
        model, self._pair = pair.model, pair
        context = min(model.context, pair.settings.get("context", model.context))
        self._cancel = threading.Event()
        self._also = cancel.is_set if hasattr(cancel, "is_set") else cancel
        self._reader = Reader(pair.tokenizer, options.stop)
        self._prompt_tokens, self._texts = len(ids), []
        sampling = Sampling(options.temperature, options.top_k, options.top_p, options.min_p, options.seed)
        limit = min(len(ids) + options.max_new_tokens, context)
        self._request = Request(ids, limit, sampling, self._reader.push, self._cancelled)
        stats = self._request.stats
        stats.prompt_tokens, stats.timing.load_seconds = len(ids), pair.load_seconds
        stats.settings = pair.settings | options.as_dict()
        stats.backend = backend_name()
        stats.memory.resident = getattr(model, "nbytes", None)
        draft, controller = _draft(pair, options), _controller(pair, options)
        cache = model.new_cache(max(limit - 1, 1))
        self._tokens = decode(model, cache, self._request, draft, controller, pair._model_lock)

    def _cancelled(self) -> bool:
        return self._cancel.is_set() or bool(self._also and self._also())

    def cancel(self) -> None:
        """Ends the request within the round that is running; what was emitted stays."""
        self._cancel.set()

    def close(self) -> None:
        """Ends the request now. Call it from the thread that iterates."""
        self._tokens.close()
        if self._request.finish_reason is None:
            self._request.finish_reason = "cancelled"
        self._keep(self._reader.take(end=True))

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        token, from_draft = next(self._tokens, (None, False))
        reason = self._request.finish_reason
        text = self._keep(self._reader.take(end=reason is not None))
        if token is None and not text:
            raise StopIteration
        return Event(token, text, from_draft, reason)

    def _keep(self, text: str) -> str:
        self._texts.append(text)
        return text

    @property
    def result(self) -> Result:
        """What there is so far; complete once the iteration has ended."""
        request = self._request
        tokens = request.ids[self._prompt_tokens :]
        request.stats.completion_tokens = len(tokens)
        request.stats.memory.peak = peak_memory()
        return Result("".join(self._texts), tokens, request.finish_reason, request.stats)


def _draft(pair, options):
    from .drafts.lookup import LookupDraft
    from .faults import GuardedDraft

    most = options.k if isinstance(options.k, int) else 8
    draft = LookupDraft(max_tokens=max(most, 8)) if options.draft == "lookup" and options.k != 0 else None
    return GuardedDraft(draft, pair.model.vocab_size, pair.model.eos_ids)


def _controller(pair, options):
    from .controller import Auto, Fixed

    if options.draft == "none" or options.max_new_tokens < 2:
        return Fixed(0)
    return Auto(pair.costs) if options.k == "auto" else Fixed(options.k)


def backend_name() -> str | None:
    """Which backend does the work here, with its instruction set: "cpu/avx2", "reference"."""
    from specdec_kernels import native, registry

    try:
        name = registry.candidates("linear_int8", "cpu")[0][0]
    except registry.BackendUnavailable:
        return None
    return f"{name}/{native.cpu.isa()}" if name == "cpu" else name


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
