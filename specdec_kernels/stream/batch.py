"""What goes between a reader and its engines: pieces of files to read, and batches of them to wait for."""

from typing import NamedTuple


class Piece(NamedTuple):
    """``nbytes`` at ``offset`` of a file, to be read to ``address``.

    file : which one, for whoever reports a failure
    direct : a descriptor that reads past the page cache, for pieces whose numbers are all multiples of a page, or -1
    buffered : one that reads any bytes, through the page cache
    """

    file: int
    direct: int
    buffered: int
    offset: int
    nbytes: int
    address: int


class Failure(NamedTuple):
    """Reading stopped at ``offset`` of ``file`` with ``errno``; 0 = the file ends there."""

    file: int
    offset: int
    errno: int


class Pace:
    """When reads may start so that together they take no more than ``limit`` bytes per second (None: at once).

    Time in which there was something to read counts, whatever came of it, up to ``CREDIT`` seconds; idle time does not.
    """

    CREDIT = 0.1

    def __init__(self, limit):
        self._limit, self._due, self._paid = limit, 0.0, False

    def wake(self, now):
        """After a time with nothing to read."""
        self._due = max(self._due, now)

    def early(self, nbytes, now):
        """Seconds until the next ``nbytes`` are paid for; 0.0 = they start now."""
        if self._limit is None:
            return 0.0
        if not self._paid:
            self._due, self._paid = max(self._due, now - self.CREDIT) + nbytes / self._limit, True
        self._paid = self._due > now
        return max(0.0, self._due - now)
