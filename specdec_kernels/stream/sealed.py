"""A pack in memory that other processes can share although no file system has it: a sealed memfd.

It has no name, so that nothing is left behind when processes are killed, and it can't be cut or written to any more,
so that nobody who maps it has to fear either.
"""

import contextlib
import errno
import os

from . import checks
from .errors import StreamError
from .limits import available_memory
from .pack import Pack

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

PIECE = 16 << 20


def seal(pack):
    """The pack's bytes as a sealed memfd: an open descriptor, which the caller closes.

    ``Pack.open(fd)`` opens it, here or in a process that got it (``pass_fds``, ``send_fds``). Raises OSError if there
    is not enough memory, before any of it is used, and StreamError where there is no such thing as a memfd.
    """
    checks.kind("pack", pack, Pack)
    if not hasattr(os, "memfd_create") or not hasattr(fcntl, "F_ADD_SEALS"):
        raise StreamError(f"{pack.path}: this system has no sealed memory files (memfd_create)")
    if len(pack.files) != 1:
        raise StreamError(f"{pack.path}: only a pack of one file can be sealed, got {len(pack.files)} files")
    (file,) = pack.files
    pack.check_unchanged()
    free, why = available_memory()
    if file.size > free:  # where memory is promised freely, making the file would end some process
        raise OSError(errno.ENOMEM, f"{file.size} bytes to share are more than the {free} that are free ({why})")
    fd = os.memfd_create("specdec-pack", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, max(file.size, 1))  # not enough memory is an error here, SIGBUS at first use
        _copy(file, fd)
        pack.check_unchanged()
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        # Kernels before 6.7 map sealed memory only through a descriptor that could not write in the first place.
        with contextlib.suppress(OSError):
            return _instead(fd, os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
        return fd
    except BaseException:
        os.close(fd)
        raise


def _instead(old, new):
    os.close(old)
    return new


def _copy(file, fd):
    """From file to memory within the kernel, or through a buffer where it can't."""
    at = 0
    while at < file.size:
        try:
            n = os.sendfile(fd, file.fd, at, min(PIECE, file.size - at))
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):
                raise StreamError(f"{file.path}: reading at byte {at} failed: {error.strerror}") from error
            return _copy_by_hand(file, fd, at)
        if n == 0:
            raise StreamError(f"{file.path}: the file ends at byte {at}; it was cut while it was open")
        at += n


def _copy_by_hand(file, fd, at):
    buffer = memoryview(bytearray(PIECE))
    while at < file.size:
        piece = buffer[: min(PIECE, file.size - at)]
        file.read_into(piece, at)
        done = 0
        while done < len(piece):
            done += os.pwrite(fd, piece[done:], at + done)
        at += len(piece)
