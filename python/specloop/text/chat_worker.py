"""Renders chat templates, each in a process of its own: a line of JSON on stdin, a line on stdout (see chat.py).

Importing jinja2 is what takes long, and a fork of a process that has done so takes a millisecond. So this one waits for
requests and runs none of their templates; nothing that a template does outlives its own fork. It ends with its input,
or when nothing was asked for a while. Run as a script and without the package around it, so that it starts soon.
"""

import contextlib
import json
import os
import resource
import select
import signal
import sys
from datetime import datetime

IDLE_SECONDS = 10.0


class Refused(Exception):
    """The template called raise_exception, or wrote too much."""


def render(template, variables, output_characters):
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    pieces, room = [], output_characters
    for piece in environment.from_string(template).generate(variables):
        room -= len(piece)
        if room < 0:
            raise Refused(f"wrote more than {output_characters} characters")
        pieces.append(piece)
    return "".join(pieces)


def raise_exception(message):
    raise Refused(f"refuses these messages: {message}")


def strftime_now(form):
    return datetime.now().strftime(form)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Without the HTML escapes of jinja2's own filter: prompts are not web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def reply_to(request):
    from jinja2 import TemplateSyntaxError

    limits = request["limits"]
    memory = limits["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, limits["cpu_seconds"])  # its signal ends the process
    try:
        return {"text": render(request["template"], request["variables"], limits["output_characters"])}
    except Refused as error:
        return {"error": one_line(error)}
    except TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {one_line(error.message)}"}
    except MemoryError:
        return {"error": f"needs more than {memory >> 20} MB of memory"}
    except RecursionError:
        return {"error": "nests too deeply"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {one_line(error)}"}


def one_line(message):
    return " ".join(str(message).split())[:300]


def answer(line):
    """{"status", "reply"}: how the fork that rendered the request ended, and what it wrote."""
    request = json.loads(line)
    ours, theirs = os.pipe()
    fork = os.fork()
    if not fork:
        with contextlib.suppress(BaseException):
            os.close(ours)
            with open(theirs, "wb") as file:
                file.write(json.dumps(reply_to(request)).encode())
            os._exit(0)
        os._exit(1)
    os.close(theirs)
    with open(ours, "rb") as file:
        reply = file.read(12 * request["limits"]["output_characters"] + 4096)  # JSON's longest character is 12 bytes
        if file.read(1):
            os.kill(fork, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
    return {"status": status, "reply": reply.decode("ascii", "replace")}


def main():
    sys.path[:] = json.loads(sys.argv[1])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whoever started this may ignore it, and so would this, by heritage
    with contextlib.suppress(Exception):  # a fork will say what is wrong with it
        render("{% if x %}{{ x | trim + 'y' }}{% endif %}", {"x": "x"}, 2)  # what is made once is made here
    while select.select([sys.stdin], [], [], IDLE_SECONDS)[0]:
        line = sys.stdin.buffer.readline()
        if not line.endswith(b"\n"):
            break
        sys.stdout.write(json.dumps(answer(line)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
