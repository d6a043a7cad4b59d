"""The flags of ``specloop train``."""

# ruff: noqa: UP045 (typer on Python 3.10 reads Optional)
from __future__ import annotations

from typing import Annotated, Optional

import typer

from .checks import real
from .errors import OptionError

Flag = typer.Option

Corpus = Annotated[str, typer.Argument(help="folder with the target's text and hidden states; made if it is not there")]
Shards = Annotated[
    Optional[int],
    Flag("--shards", help="the target writes those of so many that are missing; default: as last time, or 16"),
]
AnswerTokens = Annotated[
    Optional[int], Flag("--answer-tokens", help="most tokens of an answer that the target writes; default: 192")
]
MadeUp = Annotated[
    Optional[float], Flag("--made-up", help="share of the prompts that the target makes up, too; default: 0.3")
]
Target = Annotated[str, Flag("--target", help="smollm2, or a path: the model that made the corpus")]
Dtype = Annotated[str, Flag("--dtype", help="int8, bf16 or f32: what the corpus was made with")]
Out = Annotated[str, Flag("--out", help="folder for checkpoint, draft and log; training goes on where it has a state")]
Kind = Annotated[str, Flag("--kind", help="feature: a layer on the target's hidden states; model: a model of its own")]
Minutes = Annotated[Optional[float], Flag("--minutes", help="when it ends; the schedule follows the clock")]
Steps = Annotated[Optional[int], Flag("--steps", help="when it ends; the same bits every time")]
Rows = Annotated[int, Flag("--rows", help="answer tokens per step")]
MicroRows = Annotated[Optional[int], Flag("--micro-rows", help="of them at once; default: as memory allows")]
Depths = Annotated[int, Flag("--depths", help="unrolled steps of a feature head")]
Loss = Annotated[
    Optional[list[str]],
    Flag("--loss", metavar="NAME=W", help="kl, reverse_kl, jsd, tv, lk, ce, contrastive; default lk=1 and ce=0.1"),
]
Rate = Annotated[float, Flag("--rate", help="highest learning rate")]
LastRate = Annotated[float, Flag("--last-rate", help="where its cosine ends")]
Ema = Annotated[float, Flag("--ema", help="of the weights, per step")]
Seed = Annotated[int, Flag("--seed")]
Vocabulary = Annotated[
    Optional[int], Flag("--vocabulary", help="ids that the draft can say; default: the start's, or 8192")
]
Parameters = Annotated[float, Flag("--parameters", help="of a model of its own, e.g. 13.5e6")]
Precision = Annotated[str, Flag("--precision", help="auto, f32, bf16 or fp16")]
Checkpointing = Annotated[bool, Flag("--checkpointing", help="less memory, more time: activations are made again")]
Start = Annotated[
    Optional[str],
    Flag("--start", help="folder of another training, a draft's file, or builtin: what it begins with"),
]
Logged = Annotated[Optional[str], Flag("--logged", help="folder like CORPUS, of speculative runs, to end with")]
LoggedShards = Annotated[int, Flag("--logged-shards", help="of such runs, which it makes itself, with its own draft")]
Device = Annotated[str, Flag("--device", help="auto, cpu or cuda")]
Threads = Annotated[Optional[int], Flag("--threads", help="CPU threads; default: torch's own choice")]


def settings_of(given: dict):
    """The :class:`Settings` of the command's arguments."""
    from .train.plan import Settings

    same = (
        "kind",
        "minutes",
        "steps",
        "rows",
        "micro_rows",
        "depths",
        "rate",
        "last_rate",
        "ema",
        "seed",
        "vocabulary",
        "logged_shards",
    )
    named = {name: given[name] for name in (*same, "precision", "checkpointing")}
    losses = {} if given["loss"] is None else {"losses": _losses(given["loss"])}
    if named["minutes"] is None and named["steps"] is None:
        named["minutes"] = 45.0
    return Settings(**named, parameters=int(real("parameters", given["parameters"], 1)), **losses)


def writing_of(given: dict):
    """The corpus' settings of the command's arguments, and the names of those that were given for the corpus alone."""
    from .train.generate import Settings

    named = {name: given[name] for name in ("answer_tokens", "made_up") if given[name] is not None}
    return Settings(seed=given["seed"], **named), tuple(named)


def _losses(texts):
    losses = {}
    for text in texts:
        name, _, weight = text.partition("=")
        try:
            losses[name] = float(weight or 1)
        except ValueError:
            raise OptionError(f"loss: expected NAME=WEIGHT, got {text!r}") from None
    return losses
