"""Processes that render templates (chat_worker.py), kept for the next request: to start one takes 0.1 s.

A process serves one request at a time. One is kept, and ends by itself if nothing is asked for some seconds; requests
that come while it is busy start others.
"""

import atexit
import contextlib
import json
import os
import signal
import subprocess
import threading


class TookTooLong(Exception):
    """The process was killed."""


class TemplateProcess:
    """One process; raises OSError if it does not start."""

    def __init__(self, command):
        self.command = command
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that its forks can be killed with it, and Ctrl-C does not reach it
        )

    def ask(self, request: bytes, seconds: float) -> tuple[int, str] | None:
        """How the rendering ended and what it wrote; None if the process is gone."""
        late = threading.Event()

        def kill():
            late.set()
            self.kill()

        timer = threading.Timer(seconds, kill)
        try:
            timer.start()
            self._process.stdin.write(request + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:  # a broken pipe
            line = b""
        finally:
            timer.cancel()
            if timer.ident is not None:
                timer.join()
        if late.is_set():
            raise TookTooLong
        if not line.endswith(b"\n"):
            return None
        said = json.loads(line)
        return said["status"], said["reply"]

    def kill(self):
        with contextlib.suppress(OSError):  # it has ended
            os.killpg(self._process.pid, signal.SIGKILL)

    def disown(self):
        """It is another process' child: only lets go of the pipes."""
        self._process.returncode = 0
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()

    def close(self) -> int:
        """Ends it, if it has not ended: its status."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            status = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.kill()
            status = self._process.wait()
        self._process.stdout.close()
        return status


_kept: list[TemplateProcess] = []  # one at most
_lock = threading.Lock()


def start(command: list[str]) -> None:
    """Has a process ready for the next request. One that can't be started is told of then."""
    if not _kept:
        with contextlib.suppress(OSError):
            _keep(TemplateProcess(command))


def ask(command: list[str], request: bytes, seconds: float) -> tuple[int, str]:
    """The status of the rendering's process, 0 or as of ``subprocess``, and what it wrote.

    Raises TookTooLong after so many ``seconds``, OSError if the process can't be started.
    """
    process, fresh = _take(command), False
    while True:
        if process is None:
            process, fresh = TemplateProcess(command), True
        try:
            said = process.ask(request, seconds)
        except BaseException:
            process.kill()
            process.close()
            raise
        if said is not None:
            _keep(process)
            return said
        status, process = process.close(), None
        if fresh:
            return status, ""
        # The one that was kept had ended meanwhile.


def _take(command):
    with _lock:
        process = _kept.pop() if _kept else None
    if process is None or process.command == command:
        return process
    process.close()
    return None


def _keep(process):
    with _lock:
        if not _kept:
            _kept.append(process)
            return
    process.kill()
    process.close()


def _close():
    while _kept:
        _kept.pop().close()


def _after_fork():
    """What is kept is the parent's."""
    global _lock
    _lock = threading.Lock()
    for process in _kept:
        process.disown()
    _kept.clear()


atexit.register(_close)
os.register_at_fork(after_in_child=_after_fork)
