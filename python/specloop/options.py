"""Checks of all that a caller may choose, before any work begins. A message says what was expected and what came."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from numbers import Integral, Real

from .checks import function, integer, one_of, real
from .errors import OptionError, PromptError, show
from .stops import check_stops

DRAFTS = ("auto", "lookup", "none")
BUILTIN = "builtin"  # the draft in the package for the target, which "auto" takes if there is one
DTYPES = ("int8", "bf16", "f32")
CACHES = ("int8", "f16", "f32")
RULES = ("lossless", "block", "threshold")
FALLBACKS = ("plain", "stop")
LARGEST_INT = 2**63 - 1  # of the kernels' and of containers' numbers
MOST_DRAFTS = 64  # per round, of a chain or a tree
MOST_THREADS = 256  # the system has an end, too, and OpenMP crashes where it is reached
DEVICES = ("auto", "cpu", "cuda")
THETA_WINDOW, AGREEMENT = 64, 0.98  # of the rule "threshold"


@dataclass(frozen=True)
class Options:
    """What one request runs with; every field checked, every default resolved. See :func:`check_request`."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    seeded: bool  # the seed was given, not drawn: it has to make the same text again
    stop: tuple[str, ...]
    draft: str
    k: int | str
    rule: str
    chat: bool | None
    # What changes the rows before they are judged (processors.py).
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    min_new_tokens: int = 0
    allowed: Callable | None = None
    grammar: str | dict | None = None
    # The rule "threshold" (threshold.py); None with the others.
    theta: float | None = None  # None with "threshold", too: its own start
    theta_window: int | None = None
    agreement: float | None = None
    # Drafting.
    tree: int | None = None  # most nodes; None = chains
    confidence: float = 0.0  # of the draft model; 0 = chains do not end for want of it
    draft_until: int = 4096  # ids, prompt included
    on_fallbacks: str = "plain"
    max_fallbacks: int = 8
    verify_timeout: float | None = None  # seconds; None = from the measured cost
    # What comes back.
    logprobs: int | None = None  # so many alternatives per emitted id; None = none at all
    callback: Callable | None = None

    def as_dict(self) -> dict:
        """For JSON: a function is its name."""
        named = lambda call: call and getattr(call, "__qualname__", type(call).__name__)
        plain = asdict(replace(self, allowed=None, callback=None)) | {"stop": list(self.stop)}
        bias = {str(token): bias if math.isfinite(bias) else str(bias) for token, bias in self.logit_bias.items()}
        words = [word if isinstance(word, str) else list(word) for word in self.bad_words]
        functions = {"allowed": named(self.allowed), "callback": named(self.callback)}
        return plain | {"logit_bias": bias, "bad_words": words} | functions


def check_request(
    *,
    max_new_tokens=128,
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=None,
    stop=(),
    draft="auto",
    k="auto",
    rule="lossless",
    chat=None,
    logit_bias=None,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    bad_words=(),
    min_new_tokens=0,
    allowed=None,
    grammar=None,
    theta=None,
    theta_window=None,
    agreement=None,
    tree=None,
    confidence=None,
    draft_until=4096,
    on_fallbacks="plain",
    max_fallbacks=8,
    verify_timeout=None,
    logprobs=None,
    callback=None,
    loaded=None,
) -> Options:
    """The options of one request, checked. ``loaded``: the draft that the pair has.

    The text: ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off; a ``seed`` makes the same
    text again, None draws one where it matters; the text ends before the first of ``stop``, a string or several, to be
    complete; ``chat`` None uses the chat template if the model has one.

    What is added to or taken from the model's logits, in this order, on every row that is judged:
    ``logit_bias`` {id: number or -inf}; ``repetition_penalty`` (of prompt and answer, as in transformers: a positive
    logit is divided by it, another multiplied), ``frequency_penalty`` per occurrence and ``presence_penalty`` once (of
    the answer, as OpenAI's); ``bad_words``: strings, or sequences of ids whose last one may not follow the others;
    ``min_new_tokens``: no end-of-sequence id before so many; ``allowed(ids)``, a pure function of all ids so far: what
    may come next, as V booleans, as ids, or None for everything; ``grammar``: see grammar.py.

    Drafting: ``draft``: "auto" is ``loaded``; others are "lookup" and "none". ``k``: "auto" or drafts per round;
    ``tree``: most nodes of a tree of drafts, ``k`` deep (1: a set of candidates for the next id), which only a model
    makes; a chain of a model ends with the first token whose probability it puts below ``confidence``. There are no
    drafts beyond ``draft_until`` ids, nor for a while after ``max_fallbacks`` rounds in a row in
    which drafting failed, where ``on_fallbacks`` "stop" ends the text instead. ``verify_timeout``: seconds for a pass;
    a longer one is followed by rounds without drafts. ``rule``: "lossless", "block" (lossless, too) or "threshold"
    (lossy): starts at ``theta`` and adapts it so that over ``theta_window`` tokens a share of ``agreement`` is what
    greedy decoding would have said.

    What comes back: ``logprobs`` n adds each id's log-probability and the n best; ``callback(event)`` sees every event.

    There is no temperature of the draft's own: drafts are drawn at the request's, as the draft's rows are judged at it.
    A colder or warmer draft would leave the law of the text as it is and only change how many drafts are accepted.
    """
    one_of("rule", rule, RULES)
    if chat not in (None, True, False):
        raise OptionError(f"chat: expected True, False or None, got {show(chat)}")
    temperature = real("temperature", temperature, 0.0)
    seeded = seed is not None
    if not seeded:
        seed = secrets.randbits(63) if temperature else 0
    max_new_tokens = integer("max_new_tokens", max_new_tokens, 0)
    draft = check_draft(draft, loaded)
    return Options(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=integer("top_k", top_k, -1, LARGEST_INT),
        top_p=real("top_p", top_p, 0.0, 1.0),
        min_p=real("min_p", min_p, 0.0, 1.0),
        seed=integer("seed", seed, -LARGEST_INT - 1, LARGEST_INT),
        seeded=seeded,
        stop=check_stops(stop),
        draft=draft,
        k=check_k(k),
        rule=rule,
        chat=chat,
        logit_bias=_bias(logit_bias),
        repetition_penalty=real("repetition_penalty", repetition_penalty, 0.0, above=True),
        presence_penalty=real("presence_penalty", presence_penalty),
        frequency_penalty=real("frequency_penalty", frequency_penalty),
        bad_words=_bad_words(bad_words),
        min_new_tokens=integer("min_new_tokens", min_new_tokens, 0, max_new_tokens),
        allowed=function("allowed", allowed),
        grammar=_grammar(grammar),
        tree=_tree(tree, draft),
        confidence=_confidence(confidence, draft),
        draft_until=integer("draft_until", draft_until, 0),
        on_fallbacks=one_of("on_fallbacks", on_fallbacks, FALLBACKS),
        max_fallbacks=integer("max_fallbacks", max_fallbacks, 1),
        verify_timeout=None if verify_timeout is None else real("verify_timeout", verify_timeout, 0.0, above=True),
        logprobs=None if logprobs is None else integer("logprobs", logprobs, 0),
        callback=function("callback", callback),
        **_threshold(rule, theta, theta_window, agreement),
    )


def _threshold(rule, theta, window, agreement):
    given = {"theta": theta, "theta_window": window, "agreement": agreement}
    if rule != "threshold":
        name = next((name for name, value in given.items() if value is not None), None)
        if name is not None:
            raise OptionError(f"{name}: belongs to the rule 'threshold', and the rule is {rule!r}")
        return given
    return {
        "theta": None if theta is None else real("theta", theta, 0.0, above=True),
        "theta_window": integer("theta_window", THETA_WINDOW if window is None else window, 1, LARGEST_INT),
        "agreement": real("agreement", AGREEMENT if agreement is None else agreement, 0.0, 1.0, above=True),
    }


def _bias(bias) -> dict[int, float]:
    """-inf is taken, too. Whether the ids are the model's is seen when the model is there."""
    if bias is None:
        return {}
    if not isinstance(bias, Mapping):
        raise OptionError(f"logit_bias: expected a dict of ids and numbers, got {show(bias)}")
    checked = {}
    for token, value in bias.items():
        if isinstance(token, str) and token.isascii() and token.isdigit():  # JSON has no other keys
            token = int(token)
        forbidden = isinstance(value, Real) and value == -math.inf
        checked[integer("logit_bias", token, 0)] = -math.inf if forbidden else real("logit_bias", value)
    return checked


def _bad_words(words) -> tuple:
    if words is None:
        return ()
    if isinstance(words, str) or not isinstance(words, Sequence):
        raise OptionError(f"bad_words: expected strings or sequences of ids, got {show(words)}")
    checked = []
    for word in words:
        ids = isinstance(word, Sequence) and all(
            isinstance(token, Integral) and not isinstance(token, bool) and token >= 0 for token in word
        )
        if not isinstance(word, str) and not ids:
            raise OptionError(f"bad_words: expected strings or sequences of ids, got {show(word)}")
        if not len(word):
            raise OptionError(f"bad_words: expected words that are not empty, got {show(word)}")
        checked.append(word if isinstance(word, str) else tuple(map(int, word)))
    return tuple(checked)


def _grammar(grammar):
    if grammar is not None:
        from .grammar import parse  # with torch, which takes a second

        parse(grammar)
    return grammar


def _tree(tree, draft):
    if tree is None:
        return None
    tree = integer("tree", tree, 1, MOST_DRAFTS)
    if not is_model(draft):
        raise OptionError(f"tree: only a model drafts trees, and the draft is {draft!r}")
    return tree


def _confidence(confidence, draft):
    confidence = 0.0 if confidence is None else real("confidence", confidence, 0.0, 1.0)
    if confidence and not is_model(draft):
        raise OptionError(f"confidence: only a draft model has one, and the draft is {draft!r}")
    return confidence


def check_prompts(prompts) -> list:
    """The prompts of a batch, at least one."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence) or not len(prompts):
        raise PromptError(f"prompts: expected a list of at least one prompt, got {show(prompts)}")
    return list(prompts)


def check_each(each, prompts, batch_size) -> list[dict]:
    """Options of single requests of a batch: a dict for each of so many prompts."""
    if batch_size is not None:
        integer("batch_size", batch_size, 1)
    if each is None:
        return [{}] * prompts
    if not isinstance(each, Sequence) or len(each) != prompts or not all(isinstance(e, Mapping) for e in each):
        raise OptionError(f"each: expected a list of {prompts} dicts, one per prompt, got {show(each)}")
    return list(each)


def is_model(draft) -> bool:
    """Whether a draft that was checked is a model, by its name or by what makes it."""
    return draft not in DRAFTS


def check_draft(draft, loaded=None) -> str:
    """A request's draft: "auto" is what the pair has (``loaded``), or else the best that there is: lookup."""
    if draft is None:
        return "none"
    if draft == "auto":
        return loaded or "lookup"
    if draft not in DRAFTS and draft != loaded:
        more = f" or {loaded}, which is loaded" if loaded not in (None, *DRAFTS) else ""
        raise OptionError(f"draft: expected one of {', '.join(DRAFTS)}{more}, got {show(draft)}")
    return draft


def check_target(target):
    """A pair's target: the name or the path of a model; what is wrong with the model itself shows when it is loaded."""
    if not isinstance(target, str | os.PathLike):
        raise OptionError(f"target: expected the name or the path of a model, got {show(target)}")
    return target


def check_draft_model(draft) -> str:
    """A pair's draft: as a request's, "builtin", or the name of a model; which one "auto" is shows with the target."""
    if isinstance(draft, str | os.PathLike) and draft not in (*DRAFTS, BUILTIN):
        from .formats.locate import is_known

        if not is_known(draft):
            known = ", ".join((*DRAFTS, BUILTIN))
            raise OptionError(f"draft: expected one of {known} or the path of a model, got {str(draft)!r}")
        return os.fspath(draft)
    return draft if draft in ("auto", BUILTIN) else check_draft(draft)


def check_k(k) -> int | str:
    return k if isinstance(k, str) and k == "auto" else integer("k", k, 0, MOST_DRAFTS, instead="'auto'")


def check_load(dtype, context, threads, memory_budget, kv, device) -> None:
    one_of("dtype", dtype, DTYPES)
    integer("context", context, 2)
    if threads is not None:
        integer("threads", threads, 1, MOST_THREADS)
    if memory_budget is not None and (isinstance(memory_budget, bool) or not isinstance(memory_budget, int | str)):
        raise OptionError(f"memory_budget: expected bytes or a string like '120MB', got {show(memory_budget)}")
    one_of("kv", kv, CACHES)
    one_of("device", device, DEVICES)


ALIASES = {  # of Hugging Face's, OpenAI's and vLLM's names
    "assistant_model": "draft",
    "num_assistant_tokens": "k",
    "assistant_confidence_threshold": "confidence",
    "num_speculative_tokens": "k",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "bad_words_ids": "bad_words",
    "stop_strings": "stop",
    "top_logprobs": "logprobs",
}


def resolve_aliases(options: dict) -> dict:
    """The same options with the names that others have for them replaced by ours."""
    options = dict(options)
    if options.pop("draft_temperature", None) is not None:
        raise OptionError("draft_temperature: there is none, drafts are drawn at the request's own temperature")
    if options.get("prompt_lookup_num_tokens") is not None and options.get("num_assistant_tokens") is not None:
        raise OptionError("prompt_lookup_num_tokens: expected it or num_assistant_tokens, got both")
    lookup = options.pop("prompt_lookup_num_tokens", None)
    if lookup is not None:
        _put(options, "prompt_lookup_num_tokens", "draft", "lookup")
        _put(options, "prompt_lookup_num_tokens", "k", lookup)
    for alias, name in ALIASES.items():
        value = options.pop(alias, None)
        if value is not None:
            _put(options, alias, name, value)
    return options


def _put(options, alias, name, value):
    if options.get(name, value) != value:
        raise OptionError(f"{alias}: means {name}={value!r}, but {name}={options[name]!r} was given, too")
    options[name] = value
