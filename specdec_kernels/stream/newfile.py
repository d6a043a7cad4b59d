"""A file that appears under its name when it is complete, or not at all.

Where the system can, it is written without a name (O_TMPFILE), so that even a killed process leaves nothing behind.
Elsewhere it has a temporary name next to its place, and whoever writes to the same place next removes those whose
writers are gone: a writer holds a lock on its file for as long as it lives.
"""

import contextlib
import errno
import os
import secrets
import stat

from . import checks

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_BINARY = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


class NewFile:
    def __init__(self, path):
        # A link is not replaced by the file that it leads to.
        self.path = os.path.realpath(checks.path("path", path))
        self._folder, self._base = os.path.split(self.path)
        self._name = None  # the temporary name, if there is one
        self._mode = None  # of the file that is replaced
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(self.path)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"path: expected a new or a regular file, got {self.path}")
            self._mode = stat.S_IMODE(status.st_mode)
        self._sweep()
        self._fd = self._unnamed()
        while self._fd is None:
            self._fd = self._named()
        _lock(self._fd)

    def _unnamed(self):
        """A file without a name; None where there is no such thing, or where it can't get a name later."""
        flag = getattr(os, "O_TMPFILE", None)
        if flag is None:
            return None
        try:
            probe = os.open(self._folder, flag | os.O_RDWR | _BINARY, 0o666)
            try:
                _lock(probe)
                os.unlink(self._link(probe))
            finally:
                os.close(probe)
            return os.open(self._folder, flag | os.O_RDWR | _BINARY, 0o666)
        except OSError:
            return None

    def _named(self):
        name = self._temporary()
        try:
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)
        except OSError as error:  # the name that was asked for says more
            raise type(error)(error.errno, error.strerror, self.path) from None
        _lock(fd)
        try:  # before it was locked, another writer may have taken it for one that was left
            if os.path.samestat(os.fstat(fd), os.stat(name)):
                self._name = name
                return fd
        except FileNotFoundError:
            pass
        os.close(fd)
        return None

    def _link(self, fd):
        """Gives an unnamed file a temporary name, which it returns."""
        name = self._temporary()
        folder = os.open(self._folder, os.O_RDONLY | _BINARY)
        try:  # with a folder given, Python uses the call that follows the link in /proc
            os.link(f"/proc/self/fd/{fd}", os.path.basename(name), dst_dir_fd=folder, follow_symlinks=True)
        finally:
            os.close(folder)
        return name

    def _temporary(self):
        return os.path.join(self._folder, f".{self._base}.{secrets.token_hex(4)}.tmp")

    def _sweep(self):
        """Removes what killed writers of the same file left."""
        try:
            names = os.listdir(self._folder)
        except OSError:
            return  # what is wrong with the folder shows when the file is made
        for name in names:
            if name.startswith(f".{self._base}.") and name.endswith(".tmp"):
                with contextlib.suppress(OSError):
                    _remove_if_left(os.path.join(self._folder, name))

    def write(self, data, offset):
        view, done = memoryview(data), 0
        while done < len(view):
            done += _pwrite(self._fd, view[done:], offset + done)

    def read(self, count, offset):
        data = b""
        while len(data) < count:
            os.lseek(self._fd, offset + len(data), os.SEEK_SET)
            piece = os.read(self._fd, count - len(data))
            if not piece:
                raise OSError(errno.EIO, "the file that is being written became shorter", self.path)
            data += piece
        return data

    def commit(self):
        """Puts the file in its place: readers see the old one or the whole new one."""
        if self._mode is not None and hasattr(os, "fchmod"):
            with contextlib.suppress(OSError):  # a file system without modes
                os.fchmod(self._fd, self._mode)
        os.fsync(self._fd)
        if self._name is None:
            self._name = self._link(self._fd)
        if os.name == "nt":
            os.close(self._fd)
            self._fd = -1
        os.replace(self._name, self.path)
        self._name = None
        self._sync_folder()
        self.abort()

    def _sync_folder(self):
        with contextlib.suppress(OSError):  # not every system can; the file itself is on the disk
            folder = os.open(self._folder, os.O_RDONLY | _BINARY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def abort(self):
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        name, self._name = self._name, None
        if name is not None:
            with contextlib.suppress(OSError):
                os.unlink(name)


def _lock(fd):
    if fcntl is not None:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(fd, fcntl.LOCK_EX)


def _remove_if_left(path):
    if fcntl is None:
        return
    fd = os.open(path, os.O_RDONLY | _BINARY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its writer lives
        os.unlink(path)
    finally:
        os.close(fd)


if hasattr(os, "pwrite"):
    _pwrite = os.pwrite
else:  # Windows

    def _pwrite(fd, view, offset):
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, view)
