"""What a request adds to and takes from the rows of logits before they are judged: bias, penalties, bans, grammars.

In a round the target sees ``ids`` (committed) and drafts behind them at once. Row i is what follows the ids and the
drafts *on the way to row i*, no more and no less: row 0 follows the ids, the row of a draft follows all drafts from the
first (or from the root of a tree) down to that one. Plain decoding is the case of one row. So a text does not depend on
how many drafts a round had, as long as everything here is a function of those ids alone: what was refused leaves no
trace.

In this order (that of transformers, where it has them), every step on every row:

1. bias: l_v += b_v.
2. repetition (Keskar et al. 2019), for every id that occurs, prompt included: l_v /= r if l_v > 0, else l_v *= r.
3. frequency and presence (OpenAI's), for every id in the answer so far, n_v times: l_v -= f * n_v + p.
4. banned words: l_v = -inf if v would complete one.
5. no end before so many ids of the answer: l_v = -inf for the model's end-of-sequence ids.
6. what is allowed: l_v = -inf for everything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from numbers import Integral

import torch
from torch import Tensor

from .errors import OptionError, show
from .grammar import PIECE
from .options import Options

NEVER = -math.inf


class Rows:
    """The rows of one round, with what comes before each: ``before(i)`` = the ids, then ``paths[i]``."""

    def __init__(self, logits: Tensor, ids: Sequence[int], tokens: Sequence[int], parents: Sequence[int] | None):
        self.logits, self.ids, self.tokens = logits, ids, tokens
        self.parents = range(-1, len(tokens) - 1) if parents is None else parents  # by draft: the draft before it
        self.paths: list[list[int]] = [[]]
        for token, parent in zip(tokens, self.parents, strict=True):
            self.paths.append([*self.paths[parent + 1], token])

    def before(self, row: int) -> list[int]:
        return [*self.ids, *self.paths[row]]

    def index(self, ids: Iterable[int]) -> Tensor:
        return torch.tensor(list(ids), dtype=torch.int64, device=self.logits.device)


class Processor:
    """The steps that a request asks for. ``rows`` changes ``logits`` f32 [1 + drafts, V] in place.

    ``ids``: the committed ids; ``tokens``: the drafts; ``parents``: those of a tree (parents[j] < j, -1 = child of the
    committed ids), None for a chain. Raises what the caller's functions raise, and OptionError if they allow nothing.
    """

    def __init__(self, steps: Sequence[Callable[[Rows], None]]):
        self.steps = steps

    def rows(self, logits: Tensor, ids: Sequence[int], tokens: Sequence[int], parents=None) -> None:
        rows = Rows(logits, ids, tokens, parents)
        for step in self.steps:
            step(rows)


def make_processor(options: Options, prompt_tokens: int, vocab_size: int, eos_ids, tokenizer) -> Processor | None:
    """The processor of one request, whose answer begins after ``prompt_tokens`` ids; None if it asks for nothing.

    Raises OptionError for what does not fit this model, before anything is decoded.
    """
    steps: list[Callable[[Rows], None]] = []
    if options.logit_bias:
        steps.append(Bias(options.logit_bias, vocab_size))
    penalties = options.repetition_penalty, options.presence_penalty, options.frequency_penalty
    if penalties != (1.0, 0.0, 0.0):
        steps.append(Penalties(prompt_tokens, *penalties))
    if options.bad_words:
        steps.append(BannedWords(spellings(options.bad_words, tokenizer), vocab_size))
    if options.min_new_tokens:
        steps.append(NoEndBefore(prompt_tokens + options.min_new_tokens, eos_ids))
    if options.allowed is not None:
        steps.append(Allowed(options.allowed, vocab_size, eos_ids))
    if options.grammar is not None:
        from .grammar import Cursor, make_matcher

        matcher = make_matcher(options.grammar, vocab_size, eos_ids, tokenizer)
        cursor = Cursor(matcher, prompt_tokens, vocab_size, eos_ids)
        steps.append(Allowed(cursor.allowed, vocab_size, eos_ids, name="grammar"))
    return Processor(steps) if steps else None


class Bias:
    def __init__(self, bias: dict[int, float], vocab_size: int):
        _check_ids("logit_bias", bias, vocab_size)
        self.ids, self.values = list(bias), torch.tensor(list(bias.values()), dtype=torch.float32)

    def __call__(self, rows: Rows) -> None:
        columns = rows.index(self.ids)
        biased = rows.logits.index_select(1, columns) + self.values.to(columns.device)
        rows.logits.index_copy_(1, columns, biased)


class Penalties:
    """Repetition, presence and frequency.

    What was counted of the ids is kept, as they only grow; where they are others than before, it is counted anew.
    """

    def __init__(self, prompt_tokens: int, repetition: float = 1.0, presence: float = 0.0, frequency: float = 0.0):
        self.prompt_tokens = prompt_tokens
        self.repetition, self.presence, self.frequency = repetition, presence, frequency
        self._forget()

    def _forget(self) -> None:
        self._ids: list[int] = []  # counted so far
        self._place: dict[int, int] = {}  # of the ids that matter, in the next two
        self._tokens = torch.empty(0, dtype=torch.int64)
        self._count = torch.empty(0)  # how often each is in the answer

    def _follow(self, ids: Sequence[int]) -> None:
        known = len(self._ids)
        if ids[:known] != self._ids:
            self._forget()
            known = 0
        self._ids += ids[known:]
        answer = ids[max(known, self.prompt_tokens) :]
        self._tokens, self._count, self._place = self._with(ids[known:] if self.repetition != 1.0 else answer)
        self._count.index_add_(
            0, torch.tensor([self._place[token] for token in answer], dtype=torch.int64), torch.ones(len(answer))
        )

    def _with(self, tokens):
        """The same with columns for these ids, too."""
        place, new = self._place, [token for token in dict.fromkeys(tokens) if token not in self._place]
        if not new:
            return self._tokens, self._count, place
        place = place | {token: at for at, token in enumerate(new, len(place))}
        return torch.cat([self._tokens, torch.tensor(new)]), torch.cat([self._count, torch.zeros(len(new))]), place

    def __call__(self, rows: Rows) -> None:
        self._follow(rows.ids)
        seen = len(self._tokens)
        tokens, count, place = self._with(rows.tokens)
        drafted = torch.zeros(len(rows.paths), len(tokens))
        at = [(row, place[token]) for row, path in enumerate(rows.paths) for token in path]
        if at:
            drafted.index_put_(tuple(torch.tensor(at).T), torch.ones(len(at)), accumulate=True)
        device = rows.logits.device
        tokens, count, drafted = tokens.to(device), count.to(device), drafted.to(device)
        logits = rows.logits.index_select(1, tokens)
        if self.repetition != 1.0:
            occurs = drafted > 0
            occurs[:, :seen] = True
            penalised = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
            logits = torch.where(occurs, penalised, logits)
        if self.presence or self.frequency:
            count = drafted + count
            logits = logits - (count * self.frequency + (count > 0) * self.presence)
        rows.logits.index_copy_(1, tokens, logits)


def spellings(words: Iterable[str | tuple[int, ...]], tokenizer) -> list[tuple[int, ...]]:
    """Sequences of ids; a string is banned as the ids of it alone and after a space. It may have other spellings."""
    found = []
    for word in words:
        if not isinstance(word, str):
            found.append(word)
            continue
        ways = [tuple(tokenizer.encode(text, special=False)) for text in (word, " " + word)]
        if not ways[0]:
            raise OptionError(f"bad_words: expected words that the model's tokens can write, got {show(word)}")
        found += dict.fromkeys(ways)
    return found


class BannedWords:
    """The last id of a sequence may not follow the others; a sequence of one id may not come at all."""

    def __init__(self, words: Collection[tuple[int, ...]], vocab_size: int):
        _check_ids("bad_words", [token for word in words for token in word], vocab_size)
        self.always = sorted({word[0] for word in words if len(word) == 1})
        self.after: dict[int, list[tuple[list[int], int]]] = {}  # by the id before: (all ids before, the banned one)
        for word in words:
            if len(word) > 1:
                self.after.setdefault(word[-2], []).append((list(word[:-1]), word[-1]))
        self.reach = max((len(word) for word in words), default=1) - 1

    def __call__(self, rows: Rows) -> None:
        if self.always:
            rows.logits.index_fill_(1, rows.index(self.always), NEVER)
        if not self.after:
            return
        tail = list(rows.ids[max(len(rows.ids) - self.reach, 0) :])
        for row, path in enumerate(rows.paths):
            before = tail + path
            words = self.after.get(before[-1], ())
            banned = [last for others, last in words if before[-len(others) :] == others]
            if banned:
                rows.logits[row].index_fill_(0, rows.index(banned), NEVER)


class NoEndBefore:
    """The text may not end before it has ``length`` ids, the prompt included."""

    def __init__(self, length: int, eos_ids: Collection[int]):
        self.length, self.eos_ids = length, sorted(eos_ids)

    def __call__(self, rows: Rows) -> None:
        for row, path in enumerate(rows.paths):
            if len(rows.ids) + len(path) < self.length:
                rows.logits[row].index_fill_(0, rows.index(self.eos_ids), NEVER)


class Allowed:
    """Only what ``function(ids)`` allows: booleans [V], ids, or None for everything.

    It is asked for texts only that plain decoding could reach: not behind a draft that it forbids, nor behind the end.
    Rows there are never judged, and stay as they are. Where it fails, or allows nothing, there is no next id: an error
    if the text is there, and none of anybody's business behind drafts that may yet be refused.
    """

    def __init__(self, function: Callable, vocab_size: int, eos_ids: Collection[int] = (), name: str = "allowed"):
        self.function, self.vocab_size, self.eos_ids, self.name = function, vocab_size, eos_ids, name

    def __call__(self, rows: Rows) -> None:
        masks: list[Tensor | None] = []  # by row; None = everything
        reached: list[bool] = []  # by row: whether plain decoding could come there
        for row in range(len(rows.paths)):
            parent = rows.parents[row - 1] + 1 if row else None
            reached.append(parent is None or (reached[parent] and self._goes_on(masks[parent], rows.tokens[row - 1])))
            masks.append(self._mask(rows, row) if reached[row] else None)
            if masks[row] is not None:
                _forbid_others(rows.logits[row], masks[row])

    def _goes_on(self, mask, token) -> bool:
        return token not in self.eos_ids and (mask is None or bool(mask[token]))

    def _mask(self, rows, row) -> Tensor | None:
        try:
            answer = self.function(rows.before(row))
            mask = None if answer is None else as_mask(answer, self.vocab_size, self.name)
            if mask is not None and not any(part.any() for part in mask.split(PIECE)):
                raise OptionError(f"{self.name}: expected at least one id to follow {len(rows.ids)} ids, got none")
            return mask
        except Exception:
            if row == 0:
                raise
            return torch.zeros(self.vocab_size, dtype=torch.bool)


def _forbid_others(row: Tensor, allowed: Tensor) -> None:
    if row.device.type == "cpu":
        for values, part in zip(row.split(PIECE), allowed.split(PIECE), strict=True):
            values.masked_fill_(~part, NEVER)
    else:
        row.masked_fill_(~allowed.to(row.device), NEVER)


def as_mask(answer, vocab_size: int, name: str = "allowed") -> Tensor:
    """bool [V] of what an ``allowed`` function returned: booleans or ids; lists, sets, tensors or arrays."""
    if hasattr(answer, "dtype"):  # a tensor or an array
        answer = torch.as_tensor(answer).cpu()
        if answer.dtype != torch.bool:
            answer = answer.flatten().tolist()
    elif isinstance(answer, Iterable):
        answer = list(answer)
        if answer and all(value is True or value is False for value in answer):
            answer = torch.tensor(answer)
    else:
        raise OptionError(f"{name}: expected booleans, ids or None, got {show(answer)}")
    if isinstance(answer, list):
        _check_ids(name, answer, vocab_size)
        ids = torch.tensor([int(token) for token in answer], dtype=torch.int64)
        return torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    if answer.shape != (vocab_size,):
        raise OptionError(f"{name}: expected a mask of {vocab_size} booleans, got one of shape {list(answer.shape)}")
    return answer


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if type(token) is not int and (isinstance(token, bool) or not isinstance(token, Integral)):
            raise OptionError(f"{name}: expected token ids, got {show(token)}")
        if not 0 <= token < vocab_size:
            raise OptionError(f"{name}: expected token ids in [0, {vocab_size}), got {show(token)}")
