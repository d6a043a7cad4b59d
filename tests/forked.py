"""Runs code in a process of its own without importing torch each time: a helper process imports it once and forks.

    nursery = Nursery(); done = nursery.run("print(torch.ones(1))", "argument"); done.returncode, done.stdout

The code sees torch, native, and all names of specdec_kernels.stream; ``sys.argv[1:]`` are the arguments as strings.
"""

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from types import SimpleNamespace

TIMEOUT = 60  # seconds, then SIGALRM ends the code


class Nursery:
    def __init__(self):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([sys.executable, __file__], env=environment, **pipes)

    def run(self, code, *arguments):
        """Returns an object with returncode (negative: the signal), stdout and stderr."""
        request = {"code": textwrap.dedent(code), "argv": ["code", *map(str, arguments)]}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return SimpleNamespace(**json.loads(self._process.stdout.readline()))

    def close(self):
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def _serve(names):
    for line in sys.stdin:
        request = json.loads(line)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            pid = os.fork()
            if pid == 0:
                _run(request, out.fileno(), err.fileno(), names)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            out.seek(0), err.seek(0)
            result = {"returncode": status, "stdout": out.read(), "stderr": err.read()}
        print(json.dumps(result), flush=True)


def _run(request, out, err, names):
    import signal
    import traceback

    signal.alarm(TIMEOUT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0), os.dup2(out, 1), os.dup2(err, 2)
    sys.argv, status = request["argv"], 0
    try:
        exec(request["code"], names)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    import torch

    from specdec_kernels import native, stream

    public = {name: getattr(stream, name) for name in dir(stream) if not name.startswith("_")}
    _serve({"os": os, "sys": sys, "torch": torch, "native": native, **public})
