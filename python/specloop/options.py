"""Checks of all that a caller may choose, before any work begins. A message says what was expected and what came."""

from __future__ import annotations

import math
import os
import secrets
from dataclasses import asdict, dataclass
from numbers import Integral, Real

from .errors import OptionError, show
from .stops import check_stops

DRAFTS = ("auto", "lookup", "none")
DTYPES = ("int8", "bf16", "f32")
CACHES = ("int8", "f16", "f32")
MOST_DRAFTS = 64
MOST_THREADS = 256  # the system has an end, too, and OpenMP crashes where it is reached
LARGEST_FLOAT = 3.4028234663852886e38  # in float32, to which the kernels round
DEVICES = ("auto", "cpu", "cuda")
_LATER = "this version does not have it yet"


@dataclass(frozen=True)
class Options:
    """What one request runs with; every field checked, every default resolved."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop: tuple[str, ...]
    draft: str
    k: int | str
    rule: str
    chat: bool | None

    def as_dict(self) -> dict:
        return asdict(self) | {"stop": list(self.stop)}


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
    theta=None,
    chat=None,
    loaded=None,
) -> Options:
    """The options of one request, checked.

    ``seed`` None draws one where it matters. ``chat`` None uses the chat template if the model has one. ``stop`` is a
    string or several; the text ends before the first to be complete. ``k``: "auto" or drafts per round.
    ``draft``: "auto" is ``loaded``, the pair's; others are "lookup" and "none".
    """
    if rule != "lossless":
        raise OptionError(f"rule: expected 'lossless', got {rule!r} ({_LATER})")
    if theta is not None:
        raise OptionError("theta: belongs to a lossy rule, and this version has only 'lossless'")
    if chat not in (None, True, False):
        raise OptionError(f"chat: expected True, False or None, got {chat!r}")
    temperature = _real("temperature", temperature, 0.0, math.inf)
    if seed is None:
        seed = secrets.randbits(63) if temperature else 0
    return Options(
        max_new_tokens=_integer("max_new_tokens", max_new_tokens, 0),
        temperature=temperature,
        top_k=_integer("top_k", top_k, -1),
        top_p=_real("top_p", top_p, 0.0, 1.0),
        min_p=_real("min_p", min_p, 0.0, 1.0),
        seed=_integer("seed", seed, -(2**63), 2**63 - 1),
        stop=check_stops(stop),
        draft=check_draft(draft, loaded),
        k=check_k(k),
        rule=rule,
        chat=chat,
    )


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
        raise OptionError(f"draft: expected one of {', '.join(DRAFTS)}{more}, got {draft!r}")
    return draft


def check_target(target):
    """A pair's target: the name or the path of a model; what is wrong with the model itself shows when it is loaded."""
    if not isinstance(target, str | os.PathLike):
        raise OptionError(f"target: expected the name or the path of a model, got {show(target)}")
    return target


def check_draft_model(draft) -> str:
    """A pair's draft: as a request's, or the name of a model."""
    if isinstance(draft, str | os.PathLike) and draft not in DRAFTS:
        from .formats.locate import is_known

        if not is_known(draft):
            raise OptionError(f"draft: expected one of {', '.join(DRAFTS)} or the path of a model, got {str(draft)!r}")
        return os.fspath(draft)
    return check_draft(draft)


def check_k(k) -> int | str:
    return k if isinstance(k, str) and k == "auto" else _integer("k", k, 0, MOST_DRAFTS, or_auto=True)


def check_load(dtype, context, threads, memory_budget, kv, device) -> None:
    if dtype not in DTYPES:
        raise OptionError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    _integer("context", context, 2)
    if threads is not None:
        _integer("threads", threads, 1, MOST_THREADS)
    if memory_budget is not None and (isinstance(memory_budget, bool) or not isinstance(memory_budget, int | str)):
        raise OptionError(f"memory_budget: expected bytes or a string like '120MB', got {memory_budget!r}")
    if kv not in CACHES:
        raise OptionError(f"kv: expected one of {', '.join(CACHES)}, got {kv!r}")
    if device not in DEVICES:
        raise OptionError(f"device: expected one of {', '.join(DEVICES)}, got {device!r}")


def resolve_aliases(options: dict) -> dict:
    """The same options with Hugging Face's names replaced by ours."""
    options = dict(options)
    if options.pop("assistant_confidence_threshold", None) is not None:
        raise OptionError("assistant_confidence_threshold: a lookup draft has no confidence to compare it with")
    if options.get("prompt_lookup_num_tokens") is not None and options.get("num_assistant_tokens") is not None:
        raise OptionError("prompt_lookup_num_tokens: expected it or num_assistant_tokens, got both")
    lookup = options.pop("prompt_lookup_num_tokens", None)
    if lookup is not None:
        _put(options, "prompt_lookup_num_tokens", "draft", "lookup")
        _put(options, "prompt_lookup_num_tokens", "k", lookup)
    for alias, name in (("assistant_model", "draft"), ("num_assistant_tokens", "k")):
        value = options.pop(alias, None)
        if value is not None:
            _put(options, alias, name, value)
    return options


def _put(options, alias, name, value):
    if options.get(name, value) != value:
        raise OptionError(f"{alias}: means {name}={value!r}, but {name}={options[name]!r} was given, too")
    options[name] = value


def _integer(name, value, least, most=None, or_auto=False) -> int:
    wanted = f"an integer >= {least}" if most is None else f"an integer from {least} to {most}"
    wanted = f"'auto' or {wanted}" if or_auto else wanted
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise OptionError(f"{name}: expected {wanted}, got {show(value)}")
    if value < least or (most is not None and value > most):
        raise OptionError(f"{name}: expected {wanted}, got {show(value)}")
    return int(value)


def _real(name, value, least, most) -> float:
    wanted = f"a finite number >= {least:g}" if most == math.inf else f"a number from {least:g} to {most:g}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise OptionError(f"{name}: expected {wanted}, got {show(value)}")
    if not least <= value <= min(most, LARGEST_FLOAT):  # NaN is not either
        raise OptionError(f"{name}: expected {wanted}, got {show(value)}")
    return float(value)
