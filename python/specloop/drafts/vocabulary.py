"""Which of the target's ids a draft's logits stand for.

Ids have to mean the same to both models, which their tokenizers' contents say, not their sizes. A draft reads all of
the target's ids; it may know fewer to *say*. Such a model has ``draft_ids``: the target's ids that its columns of
logits stand for, ascending, so that the order of equal logits is the order of ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ModelError, OptionError, show

if TYPE_CHECKING:
    from torch import Tensor


def check_ids(ids, vocab_size: int, columns: int | None = None, name: str = "draft_ids") -> list[int]:
    """A map as a list of integers. ``vocab_size``: of the target. ``columns``: of the logits, where that is known.

    Raises ModelError that names the first entry that is wrong: out of range, not ascending or there twice; or that
    there are too many or too few.
    """
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if not isinstance(ids, list | tuple) or not ids:
        raise ModelError(f"{name}: expected a list of ids, got {show(ids)}")
    before = -1
    for at, token in enumerate(ids):
        if type(token) is not int:
            raise ModelError(f"{name}: expected integers, got {show(token)} at {at}")
        if not 0 <= token < vocab_size:
            raise ModelError(f"{name}: expected ids in [0, {vocab_size}), got {token} at {at}")
        if token <= before:
            what = "twice" if token == before else f"behind {before}"
            raise ModelError(f"{name}: expected ascending ids, got {token} {what} at {at}")
        before = token
    if columns is not None and len(ids) != columns:
        raise ModelError(f"{name}: expected one id per column of the draft's logits ({columns}), got {len(ids)}")
    return list(ids)


def map_of(model, vocab_size: int) -> Tensor | None:
    """The map of a draft model as ``verify`` takes it, int32; None if it has none, or names every id and so says
    nothing. ``vocab_size``: of the target. Raises ModelError as ``check_ids`` does.
    """
    import torch

    ids = getattr(model, "draft_ids", None)
    if ids is None or len(ids := check_ids(ids, vocab_size)) == vocab_size:
        return None
    return torch.tensor(ids, dtype=torch.int32, device=getattr(model, "device", "cpu"))


def check_same(what: str, version, other) -> None:
    """Raises OptionError unless ids mean the same to both versions (versions.py): compared by content."""
    mine, wanted = (getattr(v.tokenizer, "fingerprint", v.tokenizer) for v in (version, other))
    if mine == wanted:
        return
    sizes = [getattr(v.tokenizer, "vocab_size", "?") for v in (version, other)]
    raise OptionError(
        f"{what}: expected a model with the vocabulary of {other.name} ({sizes[1]} tokens), "
        f"{version.name} has another one ({sizes[0]} tokens): {difference(version.tokenizer, other.tokenizer)}"
    )


def difference(mine, wanted) -> str:
    """Where two tokenizers differ first."""
    sizes = [getattr(t, "vocab_size", 0) for t in (mine, wanted)]
    for token in range(max(sizes)):
        pieces = [t.token_bytes(token) if token < size else None for t, size in zip((mine, wanted), sizes, strict=True)]
        if pieces[0] != pieces[1]:
            shown = ["nothing" if piece is None else show(piece) for piece in pieces]
            return f"id {token} is {shown[0]} there and should be {shown[1]}"
    for name in ("bos_id", "pad_id"):
        ids = [getattr(t, name, None) for t in (mine, wanted)]
        if ids[0] != ids[1]:
            return f"its {name} is {ids[0]} and should be {ids[1]}"
    ends = [sorted(getattr(t, "eos_ids", ())) for t in (mine, wanted)]
    if ends[0] != ends[1]:
        return f"texts end with {ends[0]} there and should with {ends[1]}"
    return "some ids are control tokens in one and text in the other"
