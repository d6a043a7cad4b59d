"""Everything that can go wrong with a draft is caught here: it costs a round's drafts, never the text.

After ``MOST_FAULTS`` faults the draft is off for ``FIRST_PAUSE`` rounds. Then it may try again: one more fault doubles
the pause, a proposal without one makes all well again. A draft whose call does not return in time is left alone until
it does. Each fault is noted with its reason.
"""

from __future__ import annotations

import contextvars
import itertools
import logging
import math
import operator
import queue
import threading
import time
import weakref
from collections.abc import Collection, Sequence

from .drafts.base import SLOW_SECONDS, Draft, Proposal

log = logging.getLogger("specloop")

MOST_FAULTS = 3
FIRST_PAUSE, LONGEST_PAUSE = 16, 256  # rounds
BEGIN_SECONDS = 10.0  # the same for reading a prompt
MOST_NODES = 64  # of a tree


class GuardedDraft:
    """A draft as the decode loop uses it: never raises, never proposes what can't be verified. None = no draft.

    One thread uses it; ``let_go`` may be called from any.
    """

    def __init__(self, draft: Draft | None, vocab_size: int, eos_ids: Collection[int] = ()):
        self.draft = draft
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self.faults: list[str] = []
        self.seconds = 0.0
        self._lost = True  # the draft's state has to be built from the committed ids
        self._gone: str | None = None
        self._strikes = 0  # faults since the draft was last known to be well
        self._pause, self._wait = FIRST_PAUSE, 0  # rounds: the next pause; what is left of this one
        self._resting: str | None = None  # why, if not because of faults
        self._timely = getattr(draft, "timely", False)
        self._worker: _Worker | None = None
        self._warned = False
        self._known_ids = None  # the map of a cut vocabulary that was checked

    def let_go(self, why: str, name: str | None = None) -> None:
        """Frees the draft: from the next round on there is none. ``name``: only if it is that one, or, of several
        (drafts/chain.py), that one alone.
        """
        draft = self.draft
        if name is not None and hasattr(draft, "without"):
            if draft.without(name) is not None:
                return
        elif name not in (None, getattr(draft, "name", None)):
            return
        self._gone, self.draft = why, None

    def rest(self, rounds: int, why: str) -> None:
        """No drafts for so many rounds."""
        self._wait, self._resting = max(self._wait, rounds + 1), why

    @property
    def off_reason(self) -> str | None:
        if self._gone is not None:
            return self._gone
        if self._wait and self._resting:
            return self._resting
        if self._wait:
            return f"the draft failed {len(self.faults)} times; last: {self.faults[-1]}"
        return f"the draft is still busy; {self.faults[-1]}" if self._busy else None

    @property
    def _busy(self):
        return self._worker is not None and self._worker.busy

    def round(self) -> None:
        """A round of the decode loop begins."""
        self._wait = max(0, self._wait - 1)
        if not self._wait:
            self._resting = None

    def outlook(self, ids: Sequence[int]) -> tuple[int, int]:
        """The draft's outlook after the committed ``ids``; (0, 0) if there is no draft, or it is off or busy."""
        if self._wait or self._busy:
            return 0, 0
        return self._guard(self._outlook, ids) or (0, 0)

    def propose(self, k: int) -> Proposal:
        """A chain of at most k ids, nothing after an end-of-sequence id, or a tree that is at most k deep."""
        if k and not self._wait and not self._busy:
            return self._guard(self._propose, k) or Proposal([])
        return Proposal([])

    def append(self, ids: Sequence[int]) -> None:
        if not self._lost:
            self._guard(self._append, ids)

    def _append(self, draft, ids):
        self._call(draft.append, ids)

    def _outlook(self, draft, ids):
        if self._lost:
            self._call(draft.begin, ids, within=BEGIN_SECONDS)
            self._lost = False
        strength, limit = self._call(draft.outlook)
        return int(strength), int(limit)

    def _propose(self, draft, k):
        found = self._checked(self._call(_proposal, draft, k), k)
        if found.fault is not None:
            self._fault(found.fault)
        elif found.tokens and self._strikes >= MOST_FAULTS:
            self._strikes, self._pause = 0, FIRST_PAUSE
        return found

    # ---- what a proposal has to be -----------------------------------------------------------------------------------

    def _checked(self, found, k):
        found.tokens = [operator.index(token) for token in found.tokens]
        for token in found.tokens:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token id {token} proposed, the vocabulary has {self.vocab_size}")
        return self._checked_chain(found, k) if found.parents is None else self._checked_tree(found, k)

    def _checked_tree(self, found, k):
        from specdec_kernels.tree import tree_depth

        found.parents = [operator.index(parent) for parent in found.parents]
        if len(found.parents) != len(found.tokens):
            raise ValueError(f"{len(found.parents)} parents for a tree of {len(found.tokens)} nodes")
        if found.logits is not None:
            raise ValueError("logits proposed with a tree, whose nodes are chosen, not drawn")
        if len(found.tokens) > MOST_NODES:
            raise ValueError(f"a tree of {len(found.tokens)} nodes proposed, {MOST_NODES} are allowed")
        depth = tree_depth(found.tokens, found.parents, self.vocab_size)
        if depth > k:
            raise ValueError(f"a tree {depth} deep proposed, {k} asked for")
        return found

    def _checked_chain(self, found, k):
        if len(found.tokens) > k:
            raise ValueError(f"{len(found.tokens)} tokens proposed, {k} asked for")
        if found.logits is not None:
            self._check_logits(found)
        elif found.ids is not None:
            raise ValueError("ids of a cut vocabulary proposed without logits")
        for i, token in enumerate(found.tokens):
            if token in self.eos_ids:
                found = found.first(i + 1)
                break
        if found.logits is not None:
            for i, total in enumerate(found.logits.sum(-1).tolist()):
                if math.isnan(total) and bool(found.logits[i].isnan().any()):  # inf - inf in the sum is no fault
                    return found.first(i, f"the draft's logits of token {i + 1} have NaN")
        return found

    def _check_logits(self, found):
        import torch

        logits, ids = found.logits, found.ids
        width = self.vocab_size if ids is None else len(ids)
        if not isinstance(logits, torch.Tensor) or logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"expected logits as a tensor of floats, got {getattr(logits, 'dtype', type(logits))}")
        if list(logits.shape) != [len(found.tokens), width] or logits.stride(1) != 1:
            raise ValueError(f"expected logits of shape [{len(found.tokens)}, {width}], got {list(logits.shape)}")
        if ids is not None and ids is not self._known_ids:
            in_order = ids.dtype == torch.int32 and ids.dim() == 1 and bool((ids[1:] > ids[:-1]).all())
            if not in_order or not len(ids) or int(ids[0]) < 0 or int(ids[-1]) >= self.vocab_size:
                raise ValueError(f"expected ascending int32 ids in [0, {self.vocab_size}), got {ids}")
            self._known_ids = ids

    # ---- calls and their faults --------------------------------------------------------------------------------------

    def _call(self, function, *arguments, within=None):
        if self._timely:
            return function(*arguments)
        if self._worker is None:
            self._worker = _Worker()
            weakref.finalize(self, self._worker.end)
        return self._worker.call(function, arguments, SLOW_SECONDS if within is None else within)

    def _guard(self, call, argument):
        draft, start = self.draft, time.perf_counter()
        if draft is None:
            return None
        try:
            return call(draft, argument)
        except Exception as error:
            self._fault(_describe(error))
            return None
        finally:
            self.seconds += time.perf_counter() - start

    def _fault(self, why):
        self.faults.append(why)
        self._lost = True
        self._strikes += 1
        if self._strikes < MOST_FAULTS:
            return
        self._wait, self._pause = self._pause + 1, min(2 * self._pause, LONGEST_PAUSE)
        if not self._warned:
            self._warned = True
            log.warning("speculation off: %s", self.off_reason)


def _proposal(draft, k):
    """What the draft proposes, as a Proposal; of a list no more than shows that it is too long."""
    found = draft.propose(k)
    if not isinstance(found, Proposal):
        found = Proposal(list(itertools.islice(found, k + 1)))
    found.source = found.source or getattr(draft, "name", "")
    return found


def _describe(error):
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # it can't even say what it is
        return type(error).__name__


class _Worker:
    """A thread that makes one call at a time. Who asked waits so long and no longer; the thread may hang for good."""

    def __init__(self):
        self._calls = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        thread = threading.Thread(target=_work, args=(self._calls,), name="specloop draft", daemon=True)
        thread.start()

    @property
    def busy(self):
        return not self._idle.is_set()

    def call(self, function, arguments, seconds):
        """``function(*arguments)``. Raises TimeoutError; what comes later is dropped."""
        found = []
        self._idle.clear()
        self._calls.put((contextvars.copy_context(), function, arguments, found, self._idle))
        if not self._idle.wait(max(0.0, seconds)):
            raise TimeoutError(f"{getattr(function, '__name__', 'a call')} took more than {seconds:g} s")
        value, error = found
        if error is not None:
            raise error
        return value

    def end(self):
        self._calls.put(None)


def _work(calls):
    while (call := calls.get()) is not None:
        context, function, arguments, found, idle = call
        del call
        try:
            found += [context.run(function, *arguments), None]
        except BaseException as error:  # in this thread even a KeyboardInterrupt is the draft's own doing
            found += [None, error if isinstance(error, Exception) else RuntimeError(_describe(error))]
        del context, function, arguments, found
        idle.set()
        del idle
