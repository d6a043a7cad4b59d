"""The flags of the command line, and what their texts mean."""

# ruff: noqa: UP045 (typer on Python 3.10 reads Optional)
from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from .errors import OptionError

Flag = typer.Option

# ---- the models ------------------------------------------------------------------------------------------------------

Model = Annotated[str, Flag("--model", help="smollm2, or the path of a GGUF, a pack, or a Hugging Face folder")]
Draft = Annotated[str, Flag("--draft", help="auto, lookup, none, builtin, or the path of a draft or a model")]
Required = Annotated[bool, Flag("--require-draft", help="a draft model that can't be read is an error")]
Dtype = Annotated[str, Flag("--dtype", help="int8, bf16 or f32")]
Kv = Annotated[str, Flag("--kv", help="key-value cache: int8, f16 or f32")]
Context = Annotated[int, Flag("--context", help="most tokens, prompt and answer together")]
Budget = Annotated[Optional[str], Flag("--memory-budget", help="e.g. 120MB; weights beyond it stream")]
Device = Annotated[str, Flag("--device", help="auto, cpu or cuda")]
Threads = Annotated[Optional[int], Flag("--threads", help="CPU threads; default: torch's own choice")]

# ---- the text --------------------------------------------------------------------------------------------------------

Temperature = Annotated[float, Flag("--temperature", help="0 = greedy")]
TopK = Annotated[int, Flag("--top-k", help="0 = off")]
TopP = Annotated[float, Flag("--top-p", help="1 = off")]
MinP = Annotated[float, Flag("--min-p", help="0 = off")]
Seed = Annotated[Optional[int], Flag("--seed", help="default: a new one each time")]
MaxNewTokens = Annotated[int, Flag("--max-new-tokens")]
MinNewTokens = Annotated[int, Flag("--min-new-tokens", help="no end before so many")]
Stop = Annotated[Optional[list[str]], Flag("--stop", help="may be given several times")]
Chat = Annotated[Optional[bool], Flag("--chat/--raw", help="default: chat if the model has a template")]
Bias = Annotated[Optional[list[str]], Flag("--logit-bias", metavar="ID=B", help="may be given several times")]
Repetition = Annotated[float, Flag("--repetition-penalty", help="of prompt and answer, as a factor; 1 = off")]
Presence = Annotated[float, Flag("--presence-penalty", help="of what the answer has; 0 = off")]
Frequency = Annotated[float, Flag("--frequency-penalty", help="the same per occurrence; 0 = off")]
Ban = Annotated[Optional[list[str]], Flag("--ban", help="a word that may not come; may be given several times")]
GrammarText = Annotated[
    Optional[str], Flag("--grammar", help="json, a JSON schema, regex:..., lark:..., ebnf:..., or @FILE with one")
]

# ---- drafting --------------------------------------------------------------------------------------------------------

K = Annotated[str, Flag("--k", help="drafts per round: auto, or a number")]
Rule = Annotated[str, Flag("--rule", help="lossless, block (lossless, too) or threshold (lossy)")]
Theta = Annotated[Optional[float], Flag("--theta", help="where the threshold starts")]
ThetaWindow = Annotated[Optional[int], Flag("--theta-window", help="tokens over which it adapts; default 64")]
Agreement = Annotated[Optional[float], Flag("--agreement", help="share of greedy tokens that it keeps; default 0.98")]
Tree = Annotated[Optional[int], Flag("--tree", help="most drafts of a tree, by a draft model; default: chains")]
Confidence = Annotated[float, Flag("--confidence", help="a draft model's chain ends below this probability; 0 = off")]
OnFallbacks = Annotated[str, Flag("--on-fallbacks", help="plain or stop, when drafts fail again and again")]
MaxFallbacks = Annotated[int, Flag("--max-fallbacks", help="so many rounds in a row")]
DraftUntil = Annotated[int, Flag("--draft-until", help="no drafts beyond so many tokens")]
VerifyTimeout = Annotated[Optional[float], Flag("--verify-timeout", help="seconds; longer passes turn drafting off")]

# ---- what comes back -------------------------------------------------------------------------------------------------

Logprobs = Annotated[Optional[int], Flag("--logprobs", help="with --json: log-probabilities, and of the n best")]
Stats = Annotated[bool, Flag("--stats", help="a line about it on stderr meanwhile, statistics after it")]
Json = Annotated[bool, Flag("--json", help="print one JSON object")]

# ---- measuring -------------------------------------------------------------------------------------------------------

Categories = Annotated[Optional[list[str]], Flag("--category", help="only these; may be repeated")]
Plot = Annotated[Optional[str], Flag("--plot", help="write a chart to this file")]
Drafts = Annotated[
    Optional[list[str]], Flag("--draft", help="as of generate; may be given several times; default: auto")
]
Ks = Annotated[Optional[list[str]], Flag("--k", help="may be given several times; default: auto and 3")]
Temperatures = Annotated[
    Optional[list[float]], Flag("--temperature", help="may be given several times; default: 0, 0.7 and 1")
]
Penalties = Annotated[
    Optional[list[float]], Flag("--repetition-penalty", help="may be given several times; default: 1 (off) and 1.1")
]
Quick = Annotated[bool, Flag("--quick", help="three prompts of each category, once each")]
Pairs = Annotated[Optional[int], Flag("--pairs", help="of plain and drafted answers, per figure; default: 15")]

REQUEST = (
    "temperature", "top_k", "top_p", "min_p", "seed", "max_new_tokens", "min_new_tokens", "stop", "chat",
    "logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words", "grammar",
    "draft", "k", "rule", "theta", "theta_window", "agreement", "tree", "confidence",
    "on_fallbacks", "max_fallbacks", "draft_until", "verify_timeout", "logprobs",
)  # fmt: skip
"""Arguments of ``generate`` that are options of a request, by the same names."""


def request_options(given: dict) -> dict:
    """Those of the command's arguments, as :func:`specloop.options.check_request` takes them."""
    from .options import check_draft_model

    options = {name: given[name] for name in REQUEST}
    options["draft"] = check_draft_model(options["draft"])
    options["k"] = k_of(options["k"])
    options["stop"] = options["stop"] or ()
    options["bad_words"] = options["bad_words"] or ()
    options["logit_bias"] = _bias(options["logit_bias"] or ())
    grammar = options["grammar"]
    if grammar is not None and grammar.startswith("@"):
        options["grammar"] = Path(grammar[1:]).read_text(encoding="utf-8")
    return options


def _bias(texts) -> dict[int, float]:
    bias = {}
    for text in texts:
        token, _, value = text.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise OptionError(f"logit_bias: expected ID=NUMBER, got {text!r}") from None
    return bias


def k_of(text):
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise OptionError(f"k: expected 'auto' or an integer, got {text!r}") from None


def bytes_of(text):
    """A budget as the loader takes it: a plain number counts bytes."""
    return int(text) if text is not None and text.isascii() and text.isdigit() else text
