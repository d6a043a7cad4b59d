"""A folder that one at a time writes to."""

from __future__ import annotations

import contextlib
import errno
import os

from ..errors import OptionError
from ..formats.safetensors import disk_errors

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

NAME = ".lock"  # of the file in the folder; it stays, as whoever removed it could remove another's


@contextlib.contextmanager
def alone(folder, busy):
    """Makes the folder, and holds it. Raises OptionError(``busy``) where another does, in this process or in one that
    lives; the system lets go of it for a process that ends, however it ends. Raises DiskError.
    """
    with disk_errors(folder):
        os.makedirs(folder, exist_ok=True)
    if fcntl is None:
        yield
        return
    path = os.path.join(os.fspath(folder), NAME)
    with disk_errors(path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                raise OptionError(busy) from None
            # some network file systems have no locks
        yield
    finally:
        os.close(fd)
