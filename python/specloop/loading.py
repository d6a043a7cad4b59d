"""Loading in the background: several models at once, one fraction of progress, and a way to end it."""

from __future__ import annotations

import atexit
import logging
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError

from .errors import LoadCancelled, ModelError

log = logging.getLogger("specloop")


class Progress:
    """Joins the progress of several loads to one fraction that never falls. Also the way in which a load is ended:
    its next report raises.

    ``tell(fraction)`` is called from the loading threads, one at a time; ``sizes``: how much each load weighs.
    """

    def __init__(self, tell: Callable[[float], None] | None = None, sizes: Sequence[float] = (1.0,)):
        self._tell = (lambda fraction: None) if tell is None else tell
        self._sizes = [max(float(size), 1.0) for size in sizes]
        self._done = [0.0] * len(self._sizes)
        self._told = 0.0
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def of(self, index: int) -> Callable[[float], None]:
        """What load number ``index`` calls with 0 .. 1."""

        def progress(fraction):
            self.check()
            with self._lock:
                self._done[index] = max(self._done[index], min(float(fraction), 1.0))
                done = sum(d * size for d, size in zip(self._done, self._sizes, strict=True)) / sum(self._sizes)
                if done > self._told:
                    self._told = done
                    self._tell(done)

        return progress

    def end(self) -> None:
        self._ended.set()

    def check(self) -> None:
        """Raises LoadCancelled once loading is to end."""
        if self._ended.is_set():
            raise LoadCancelled("loading was cancelled")


_under_way: weakref.WeakSet = weakref.WeakSet()
PATIENCE = 5.0  # seconds that the end of the process waits for a thread


@atexit.register
def _end_all():
    """A thread that is in C++ when the interpreter ends would abort the process."""
    for loading in list(_under_way):
        loading.cancel()
        loading.join(PATIENCE)


class Watched:
    """A model whose passes raise once loading is to end."""

    def __init__(self, model, progress: Progress):
        self._model, self._progress = model, progress

    def __getattr__(self, name):
        return getattr(self._model, name)

    def forward(self, *args, **options):
        self._progress.check()
        return self._model.forward(*args, **options)


class Loading:
    """Calls ``jobs`` at once, each in a thread of its own, then ``prepare(found)`` and ``commit(found)`` with the list
    of what they returned.

    When a job fails, the others are ended by ``progress``. What was found goes to ``discard``, one by one, unless it
    was committed. ``cancel`` comes before ``commit`` or after it, never in between.
    """

    def __init__(self, jobs: Sequence[Callable], prepare, commit, discard, progress: Progress):
        self._progress, self._prepare, self._commit, self._discard = progress, prepare, commit, discard
        self._found, self._errors = [None] * len(jobs), [None] * len(jobs)
        self.error: BaseException | None = None
        self._over, self._lock = threading.Event(), threading.Lock()
        self._threads = [
            threading.Thread(target=self._work, args=(i, job), name=f"specloop-load-{i}", daemon=True)
            for i, job in enumerate(jobs)
        ]
        _under_way.add(self)
        for thread in self._threads[1:]:
            thread.start()
        self._threads[0].start()  # the first waits for the others in the end

    def _work(self, index, job):
        try:
            self._progress.check()
            self._found[index] = job()
        except BaseException as error:
            self._errors[index] = error
            self._progress.end()
        del job  # which may know what it made, and this frame may be in an error's traceback
        if index == 0:
            self._conclude()

    def _conclude(self):
        for thread in self._threads[1:]:
            thread.join()
        error = self._first_error() or _error_of(self._prepare, self._found)
        _forget_locals(error)
        if not self._settle(error):
            for version in filter(None, self._found):
                self._discard(version)
                del version  # this frame may be in the error's traceback
        # What is over is kept, but not what it made and what it worked with.
        self._found, self._errors = [], []
        self._prepare = self._commit = self._discard = None

    def _first_error(self):
        """Of the job that failed, not of one that was only told to end because of it."""
        errors = [error for error in self._errors if error is not None]
        return next((e for e in errors if not isinstance(e, LoadCancelled)), errors[0] if errors else None)

    def _settle(self, error):
        """Ends it, with ``error`` or by committing what was found. Whether it was committed."""
        with self._lock:
            if self._over.is_set():
                return False
            self.error = error = error or _error_of(self._commit, self._found)
            self._over.set()
            return error is None

    def cancel(self) -> bool:
        """Ends the loading, and every wait for it at once. The threads end at their next report of progress.

        False if it was over already.
        """
        self._progress.end()
        with self._lock:
            if self._over.is_set():
                return False
            self.error = LoadCancelled("loading was cancelled")
            self._over.set()
            return True

    def wait(self, timeout: float | None = None) -> bool:
        """Whether all is loaded, after at most ``timeout`` seconds. Raises what loading raised."""
        over = self._over.wait(timeout)
        if self.error is not None:
            raise self.error
        return over

    def join(self, timeout: float | None = None) -> None:
        """Waits for the threads themselves (at most ``timeout`` seconds each), but for the one that calls this."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout)


def telling(future, job):
    """The job of a target, which a draft's job may wait for."""

    def attempt():
        try:
            version = job()
        except BaseException:
            future.set_exception(LoadCancelled("the target could not be loaded"))
            raise
        future.set_result(version)
        return version

    return attempt


def awaited(future, progress):
    """The future's result; raises LoadCancelled once loading is to end."""
    while True:
        try:
            return future.result(0.1)
        except TimeoutError:
            progress.check()


def or_without(job, name, failures, more):
    """The same for a draft, but that one that can't be read is None, and the reason is added to ``failures``. A wrong
    choice of the caller's is still an error, unless it is of the kinds ``more``.
    """

    def attempt():
        try:
            return job()
        except (ModelError, OSError, MemoryError, *more) as error:
            said = " ".join(str(error).split()) or type(error).__name__
            failures.append(f"the draft {name} could not be {'used' if isinstance(error, more) else 'read'}: {said}")
            log.warning("speculation off: %s", failures[-1])
            return None

    return attempt


def _error_of(function, argument):
    try:
        function(argument)
    except BaseException as error:
        return error


def _forget_locals(error):
    """An error that is kept keeps its frames, and these the half-loaded weights in their variables."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
