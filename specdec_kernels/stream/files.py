"""Files that weights are read from: opened once, read by position, watched for changes."""

import os
import stat
import threading

from .errors import PackError, StreamError

# Binary, because where text mode exists it rewrites line ends and stops at byte 0x1A. Not blocking, because a pipe
# without a writer would wait for ever before it could be refused.
FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
CUT = 1 << 30  # bytes per call; Linux reads at most 0x7ffff000

# What a file that is no safetensors file begins with, and what to say about it.
_OTHERS = (
    (b"GGUF", "this is a GGUF file; convert it to a pack first"),
    (b"PK\x03\x04", "this is a zip archive, likely a pickle checkpoint of torch.save; only safetensors are read"),
    (b"\x80", "this is a pickle, which can run code when it is read; only safetensors are read"),
    (b"version https://git-lfs", "this is a Git LFS pointer, not the file itself; fetch the file with git lfs pull"),
)


def show(value):
    """Something that came out of a file, as it may stand in a message: quoted, one line, not too long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than some thousand digits
        text = "an integer too long to write"
    return text if len(text) <= 80 else text[:77] + "..."


class PackFile:
    """An open file. ``fd`` reads through the page cache and is closed with this object.

    ``identity``: device, inode, size and time of modification when it was opened. A file that is renamed or deleted
    later stays readable, with its old content; one that is written to is not the file that was checked any more.
    """

    fd = -1  # until it is open

    def __init__(self, source):
        """``source``: a path, or a descriptor, which is duplicated."""
        if isinstance(source, int) and not isinstance(source, bool):
            self.path, self.fd = _path_of(source), os.dup(source)
        else:
            self.path = os.fspath(source)
            if isinstance(self.path, bytes):
                self.path = os.fsdecode(self.path)
            try:
                self.fd = os.open(self.path, FLAGS)
            except ValueError as error:  # a zero byte in the name
                raise PackError(f"{show(self.path)}: {error}") from None
        try:
            status = os.fstat(self.fd)
            if not stat.S_ISREG(status.st_mode):
                kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
                raise PackError(f"{self.path}: expected a safetensors file, got {kind}")
            self.size, self.identity = status.st_size, _identity(status)
        except BaseException:
            self.close()
            raise

    def check_unchanged(self):
        """Raises StreamError if the file was written to since it was opened."""
        self._check_open()
        status = os.fstat(self.fd)
        if _identity(status) != self.identity:
            what = "its content was rewritten"
            if status.st_size != self.size:
                what = f"its size went from {self.size} to {status.st_size} bytes"
            raise StreamError(f"{self.path}: the file changed while it was open: {what}")

    def read_into(self, memory, offset):
        """Fills ``memory`` (a writable buffer of bytes) from ``offset`` on; raises StreamError where that fails."""
        self._check_open()
        view, done = memoryview(memory), 0
        while done < len(view):
            try:
                n = pread(self.fd, view[done : done + CUT], offset + done)
            except OSError as error:
                raise StreamError(f"{self.path}: reading at byte {offset + done} failed: {error.strerror}") from error
            if n == 0:
                raise StreamError(f"{self.path}: the file ends at byte {offset + done}; it was cut while it was open")
            done += n

    def what_else(self):
        """A sentence if the file is of a known kind that is not read, else None."""
        start = bytearray(min(self.size, 64))
        self.read_into(start, 0)
        return next((sentence for magic, sentence in _OTHERS if start.startswith(magic)), None)

    def _check_open(self):
        if self.fd < 0:
            raise StreamError(f"{self.path}: the file is closed")

    def close(self):
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self):
        self.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __repr__(self):
        return f"PackFile({self.path!r}, {self.size} bytes)"


def _identity(status):
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _path_of(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return f"descriptor {fd}"


if hasattr(os, "preadv"):

    def pread(fd, view, offset):
        """Reads up to len(view) bytes at ``offset`` into ``view``; how many, 0 at the end of the file."""
        return os.preadv(fd, [view], offset)

else:  # Windows: no positional reads, so one thread at a time moves the position
    _one_at_a_time = threading.Lock()

    def pread(fd, view, offset):
        with _one_at_a_time:
            os.lseek(fd, offset, os.SEEK_SET)
            data = os.read(fd, len(view))
        view[: len(data)] = data
        return len(data)
