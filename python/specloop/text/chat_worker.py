"""Renders one chat template in a process of its own: a JSON request on stdin, a JSON reply on stdout (see chat.py).

Run as a script and without the package around it, so that it starts in milliseconds.
"""

import json
import resource
import signal
import sys
from datetime import datetime


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


if __name__ == "__main__":
    request = json.load(sys.stdin.buffer)
    sys.path[:] = request["path"]
    sys.stdout.write(json.dumps(reply_to(request)))
