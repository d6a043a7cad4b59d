"""A target and its draft, loaded or loading, and how they are exchanged while requests run on them."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future

from .checks import function, real
from .costs import CostCurve
from .draft_loader import AUTO, builtin_files, file_for, needs_target
from .drafts.vocabulary import check_same, map_of
from .errors import ModelError, OptionError, PairClosed
from .loading import Loading, Progress, Watched, awaited, or_without, telling
from .options import BUILTIN, check_draft_model, check_target, is_model
from .pressure import Pressure, reads_features
from .versions import Place, Version, check_successor


def opener(*, dtype, kv, context, device, threads, memory_budget):
    """``opened`` of a Stage, for models by name.

    opened(name, progress, beside=..., share=...) opens a target, ``beside`` which a draft of that name has to fit the
    budget; opened(name, progress, draft=True, share=...) a draft, which is in memory as a whole, and with ``target=``
    a Version one of a draft file, which is for that target. ``share``: see ``load_model``; None where the whole budget
    is free.
    """
    options = {"dtype": dtype, "kv": kv, "context": context, "device": device}

    def opened(name, progress, *, draft=False, beside=None, share=None, target=None):
        from . import draft_loader
        from .loader import load_model, size_in_memory

        if threads:
            import torch

            torch.set_num_threads(threads)
        form = {"kv": kv, "context": context}

        def size(model, of_file):
            return draft_loader.size_in_memory(model, **form) if of_file else size_in_memory(model, dtype=dtype, **form)

        if draft:  # in memory as a whole
            if share is not None:
                share(size(name, target is not None))
            if target is not None:
                return draft_loader.load_draft(name, target, progress=progress, **form)
            return load_model(name, progress=progress, **options)
        if memory_budget is None:
            return load_model(name, progress=progress, **options)
        reserved = {}
        if beside:
            with contextlib.suppress(ModelError):  # the draft's own load will say so
                of_file = draft_loader.needs_target(beside)
                beside = draft_loader.file_beside(beside, name) if of_file else beside
                reserved = {} if beside is None else {"draft": size(beside, of_file)}
        budgeted = {"memory_budget": memory_budget, "reserved": reserved}
        return load_model(name, progress=progress, share=share, **budgeted, **options)

    return opened


class Stage:
    """What stands ready for requests: a target, and a draft model if there is one.

    ``target``, ``draft``: names, or functions that return (model, tokenizer, chat template or None). Each is loaded
    in a thread of its own by ``opened(name, progress, ...)``. ``warm_up``: the passes that rounds consist of are made
    before it is ready, so that the first round takes no longer than others. A draft whose file can't be read leaves the
    target alone: ``draft_failure`` says why; with ``require_draft`` it is an error. A context manager: leaving it
    closes it.
    """

    def __init__(
        self,
        target,
        *,
        draft="lookup",
        k="auto",
        settings=None,
        warm_up=False,
        progress=None,
        opened=None,
        require_draft=False,
    ):
        self.k = k
        self.draft_failure: str | None = None
        self._choice = draft  # what was asked for; ``draft`` is what became of it, "auto" until that is known
        self.draft = draft if isinstance(draft, str) else "model"
        if not _is_loaded(draft):
            self.draft = _became(draft, None)
        self.settings = {"model": _name(target)} | (settings or {})
        self.generation = 0  # how often something was exchanged
        self.load_seconds: float | None = None
        self._target, self._draft = Place(), Place()
        self.pressure = Pressure(self._target, self._draft, weakref.WeakMethod(self._draft_is_gone))
        self._target.account = self._draft.account = self.pressure
        self._warm_up, self._opened, self._closed = warm_up, opened, False
        self._came_loose = False  # whether the draft that was chosen is for a target that was here before
        self._swapping = threading.Lock()
        self._loading = self._start(
            target, draft if _is_loaded(draft) else None, progress, self._first, may_lack_draft=not require_draft
        )
        self._latest = self._loading  # or a swap's

    # ---- loading -----------------------------------------------------------------------------------------------------

    def _start(self, target, draft, tell, commit, *, may_lack_draft=False, may_not_fit=False):
        """Begins to load what is not None; ``commit(target version, draft version, failure)`` if all fits: versions are
        None or loaded, and ``failure`` says why there is no draft. ``may_not_fit``: nor for one of another target.
        """
        roles = [(role, name) for role, name in (("target", target), ("draft", draft)) if name is not None]
        progress = Progress(tell, [_size(name) for _, name in roles])
        beside = _name(draft) if draft is not None else self.draft_name
        share = self._share if self._target.version is not None and self.budget is not None else None
        start, loaded, failures = time.perf_counter(), Future(), []

        def job(index, role, name):
            if callable(name):
                return lambda: Version(*name(), _name(name))
            more = {"beside": beside, "share": share}
            if role == "draft":
                more = {"draft": True, "share": share if target is None else None}
                if needs_target(name):
                    return lambda: for_target(name, progress.of(index), more)
            return lambda: Version(*self._opened(name, progress.of(index), **more), str(name))

        def for_target(name, told, more):
            known = self._target.get() if target is None else awaited(loaded, progress)
            path = file_for(name, known)
            return path and Version(*self._opened(path, told, target=known, **more), str(path))

        def by_role(versions):
            found = dict(zip((role for role, _ in roles), versions, strict=True))
            return found.get("target"), found.get("draft")

        def prepare(versions):
            self._check(*by_role(versions))
            for (role, _), version in zip(roles, versions, strict=True):
                if version is not None:
                    self._make_ready(version, Watched(version.model, progress), role)

        def install(versions):
            commit(*by_role(versions), failures[0] if failures else None)
            self.load_seconds = time.perf_counter() - start

        jobs = [job(i, *role) for i, role in enumerate(roles)]
        if target is not None:
            jobs[0] = telling(loaded, jobs[0])
        if may_lack_draft and roles[-1][0] == "draft":
            jobs[-1] = or_without(jobs[-1], _name(draft), failures, (OptionError,) if may_not_fit else ())
        return Loading(jobs, prepare, install, Version.close, progress)

    def _share(self, least):
        """So many bytes of the budget, or more, for a model that comes beside the one that runs."""
        with self._target.lock:
            return self.pressure.share(least)

    def _check(self, target, draft):
        """Raises OptionError unless the two fit each other and what they replace."""
        before = self._target.version
        if target is not None and getattr(target.model, "draft_ids", None) is not None:
            raise OptionError(
                f"target: expected a model that can say every id, {target.name} has a cut vocabulary and can only draft"
            )
        if target is not None and before is not None:
            check_successor(target, before, self.settings.get("context"))
        if draft is not None:
            check_same("draft", draft, target or before)
            draft.ids = map_of(draft.model, (target or before).model.vocab_size)

    def _make_ready(self, version, model, role):
        from .calibration import cost_curve
        from .controller import K_MAX
        from .costs import warm_up

        known = False
        if role == "draft":
            version.costs, known = cost_curve(model, 2)
        elif self._warm_up and self.draft != "none" and self.k == "auto":
            version.costs, known = cost_curve(model)
        if known:
            warm_up(model, 1, 1 if role == "draft" else K_MAX + 1)
        elif version.costs is None and self._warm_up:
            warm_up(model, 1, 1 if self.draft == "none" else self.k + 1)

    def _first(self, target, draft, failure):
        self._target.version, self._draft.version = target, draft
        self.draft, self.draft_failure = _became(self._choice, draft), failure

    def ready(self, timeout: float | None = None) -> bool:
        """Waits until all is loaded (at most ``timeout`` seconds): whether it is. Raises what loading raised."""
        return self._loading.wait(None if timeout is None else real("timeout", timeout, 0.0, threading.TIMEOUT_MAX))

    def cancel_load(self) -> bool:
        """Ends a loading, or a swap, that is under way: what waits for it raises LoadCancelled at once.

        The loading threads end within a piece of a few MB. False if nothing was loading. From any thread.
        """
        return self._latest.cancel()

    def swap(self, *, target=None, draft=None, progress: Callable[[float], None] | None = None) -> None:
        """Exchanges the target, the draft or both, while requests run.

        The new ones are loaded and validated first; what goes wrong is raised here and changes nothing. Then they take
        the old ones' place between two rounds, and the old ones' memory, files and threads are given back.

        A stream keeps the tokens that it has (with the rest of its round, which the old target has verified) and goes
        on with what the new target says after them: its caches are filled anew from the committed ids, so that it is
        the text of a new request whose prompt they are. ``generate`` without a callback, of which nobody has seen a
        token, begins again with the new target: what it returns is the text of one version. A request that starts
        after the swap is what a fresh load of the new version makes. No exchange of a draft changes a token of greedy
        text.

        ``target``: as of :func:`load`, with the same vocabulary (by content) and no smaller context than the old one.
        A draft that reads the old one's hidden states goes with it: it is loaded anew, for "auto" the best that the new
        one has, and where it is for the old one alone there is none any more (``draft_failure``).
        ``draft``: as of :func:`load`; requests that chose "lookup" or "none" keep it. Both versions are in memory
        until the old one is gone, each within the budget. Raises OptionError, what loading raises, and LoadCancelled.
        """
        if target is None and draft is None:
            raise TypeError("swap() expects a target or a draft")
        if draft is not None and not callable(draft):
            draft = check_draft_model(draft)
        if target is not None and not callable(target):
            check_target(target)
        function("progress", progress)
        self.ready()
        with self._swapping:
            self._check_open()
            follows = draft is None and (self._choice == AUTO or self.draft_reads_features or self._came_loose)
            wanted = self._choice if follows else draft

            def commit(new_target, new_draft, failure=None):
                self._exchange(new_target, wanted, new_draft, failure)
                self._came_loose = follows and failure is not None
                if target is not None:
                    self.settings = self.settings | {"model": _name(target)}

            model = wanted if wanted is not None and _is_loaded(wanted) else None
            if target is None and model is None:
                commit(None, None)
                return
            soft = {"may_lack_draft": True, "may_not_fit": True} if follows else {}
            self._latest = loading = self._start(target, model, progress, commit, **soft)
            try:
                loading.wait()
            except BaseException:
                loading.cancel()  # nothing if it is over; an interrupt of this thread ends the loading
                loading.join()
                with self._target.lock:
                    if not self._closed:
                        self.pressure.settle()
                raise
            finally:
                self._latest, self.pressure.promised = self._loading, 0

    def _draft_is_gone(self):
        """Its memory was needed (pressure.py)."""
        self.draft = self._choice = "none"

    def _exchange(self, target, draft, draft_version, failure):
        with self._target.lock, self._draft.lock:
            self._check_open()
            if draft is not None:
                _close(self._draft.put(draft_version))
                self._choice = draft
                self.draft, self.draft_failure = _became(draft, draft_version), failure
            if target is not None:
                _close(self._target.put(target))
            self.generation += 1
            if target is not None:
                self.pressure.settle()

    def close(self) -> None:
        """Gives back memory, files and threads. Ends a loading; running requests raise PairClosed. Twice is fine."""
        self._closed = True
        loading = self._latest
        loading.cancel()
        with self._target.lock, self._draft.lock:
            _close(self._target.put(None))
            _close(self._draft.put(None))
            self.generation += 1
        loading.join()

    def _check_open(self):
        if self._closed:
            raise PairClosed("the pair is closed")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    # ---- what is loaded ----------------------------------------------------------------------------------------------

    @property
    def _version(self) -> Version:
        self.ready()
        return self._target.get()

    @property
    def model(self):
        return self._version.model

    @property
    def tokenizer(self):
        return self._version.tokenizer

    @property
    def chat_template(self) -> str | None:
        return self._version.chat_template

    @property
    def context(self) -> int:
        """Most tokens of a request, prompt and answer together."""
        return min(self.model.context, self.settings.get("context", self.model.context))

    @property
    def costs(self) -> CostCurve:
        """Seconds of a pass over 1..16 rows, known from an earlier load (calibration.py) or measured once: by the
        warm-up if ``k`` is "auto", else on first use. The rounds keep them fresh.
        """
        from .calibration import cost_curve

        self.ready()
        with self._target.lock:
            version = self._target.get()  # under the lock: until then it may be exchanged or closed
            if version.costs is None:
                version.costs, _ = cost_curve(version.model)
            return version.costs

    @property
    def budget(self) -> int | None:
        """Bytes that were asked for, or None."""
        return getattr(self.model, "budget", None) if self.settings.get("memory_budget") is not None else None

    @property
    def draft_costs(self) -> CostCurve | None:
        """Seconds of the draft model's passes, whose first entry the rounds keep fresh; None where there is none."""
        version = self._draft.version
        return version.costs if version is not None and isinstance(version.costs, CostCurve) else None

    @property
    def draft_cost(self) -> float:
        """Seconds per token that the draft model proposes; 0 where the draft is none."""
        version = self._draft.version
        return version.costs[0] if version is not None else 0.0

    @property
    def draft_name(self) -> str | None:
        """Of the draft model: a path, where it came from one."""
        return self._draft.version.name if self._draft.version is not None else None

    @property
    def draft_nbytes(self) -> int | None:
        """Of the draft model's weights."""
        version = self._draft.version
        return None if version is None else getattr(version.model, "weights_nbytes", None)

    @property
    def draft_reads_features(self) -> bool:
        """Whether the draft goes by the target's hidden states (models/feature_head.py)."""
        version = self._draft.version
        return version is not None and reads_features(version.model)

    @property
    def nominal_costs(self) -> tuple[tuple[float, ...], float]:
        """Costs to decide by that are the same at every load: (of passes over 1, 2, ... rows, of a draft)."""
        from .costs import NOMINAL_DRAFT, nominal_costs

        target, draft = self.model, self._draft.version
        sizes = [getattr(model, "weights_nbytes", None) for model in (draft and draft.model, target)]
        share = sizes[0] / sizes[1] if all(sizes) else NOMINAL_DRAFT
        return nominal_costs(target), share

    @property
    def draft_ids(self):
        """The target's ids that the draft model's logits stand for; None = all (drafts/vocabulary.py)."""
        version = self._draft.version
        return None if version is None else version.ids

    @property
    def place(self):
        """Where the target is."""
        return self._target

    def seat(self, capacity):
        """For a request of so many tokens: the target with a cache."""
        return self._target.seat(capacity)

    def draft_seat(self, capacity):
        return self._draft.seat(capacity)


def _is_loaded(draft) -> bool:
    """Whether there may be something to load for that choice."""
    return is_model(draft) or (draft == AUTO and bool(builtin_files()))


def _became(draft, version) -> str:
    """What a pair's choice of a draft turned out to be."""
    if draft == AUTO:
        return "lookup" if version is None else BUILTIN
    return draft if isinstance(draft, str) else "model"


def _close(version: Version | None) -> None:
    if version is not None:
        version.close()


def _name(model) -> str:
    return "model" if callable(model) else str(model)


def _size(name) -> int:
    """Bytes on disk, to weigh progress by; anything where that can't be said."""
    from .formats.locate import find_model

    try:
        path = find_model(name)
        return sum(file.stat().st_size for file in path.iterdir()) if path.is_dir() else path.stat().st_size
    except Exception:  # the load itself will say what is wrong
        return 1
