"""Signals that ask for an end, as a request that what runs can follow in its own time."""

import signal


class Interrupts:
    """The first Ctrl-C, or signal of ``also``, calls ``cancel``; the next one does what it usually does.

    A signal that is ignored, as a shell has Ctrl-C ignored by what it runs in the background, or that has a handler,
    stays as it is. ``code``: the exit code that says which one it was.
    """

    def __init__(self, cancel, *also):
        self.code = 128 + signal.SIGINT
        self._cancel, self._signals, self._before = cancel, (signal.SIGINT, *also), {}

    def __enter__(self):
        for number in self._signals:
            before = signal.getsignal(number)
            if before is (signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL):
                self._before[number] = before
                signal.signal(number, self._first)
        return self

    def _first(self, number, _):
        self.code = 128 + number
        self.__exit__()
        self._cancel()

    def __exit__(self, *_):
        for number, before in self._before.items():
            signal.signal(number, before)
