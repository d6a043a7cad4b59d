"""Calls that may hang, made in a thread that can be left behind."""

from __future__ import annotations

import contextvars
import queue
import threading


class Worker:
    """A thread that makes one call at a time. Who asked waits so long and no longer; the thread may hang for good."""

    def __init__(self, name: str):
        self._calls = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        threading.Thread(target=_work, args=(self._calls,), name=name, daemon=True).start()

    @property
    def busy(self) -> bool:
        """Whether a call that was given up has not returned yet; no other can be made then."""
        return not self._idle.is_set()

    def call(self, function, arguments, seconds: float):
        """``function(*arguments)``. Raises what that raises, and TimeoutError; what comes later is dropped."""
        found = []
        self._idle.clear()
        self._calls.put((contextvars.copy_context(), function, arguments, found, self._idle))
        if not self._idle.wait(max(0.0, seconds)):
            raise TimeoutError(f"{getattr(function, '__name__', 'a call').strip('_')} took more than {seconds:g} s")
        value, error = found
        if error is not None:
            raise error
        return value

    def end(self) -> None:
        """The thread ends, after the call that is under way."""
        self._calls.put(None)


def _work(calls):
    while (call := calls.get()) is not None:
        context, function, arguments, found, idle = call
        del call
        try:
            found += [context.run(function, *arguments), None]
        except Exception as error:
            found += [None, error]
        except BaseException as error:  # an interrupt of the process goes to the main thread, so this is its own doing
            found += [None, RuntimeError(type(error).__name__)]
        del context, function, arguments, found  # nothing is held on to while waiting
        idle.set()
        del idle
