"""Chat messages to a prompt, by the model's own template.

A template is a program that came with a download, so it runs in a process of its own (chat_worker.py), under limits of
time and memory that the system enforces. Nothing inside one interpreter does: a sandbox forbids attributes and large
ranges, but a big power, a padding or a doubling concatenation spends its time and memory inside one C call, which no
trace function, deadline check or asynchronous exception can interrupt. A signal and an address-space limit can, from
any thread. The first costs some 0.1 s, most of it the import of jinja2, which this process is then spared; others that
follow soon take a few milliseconds (template_process.py).
"""

import json
import os
import signal
import sys
from pathlib import Path

from ..errors import PromptError, TemplateError
from .template_process import TookTooLong, ask, start

CPU_SECONDS = 2.0
WALL_SECONDS = 30.0  # for a machine so busy, or a worker so stuck, that its processor time does not run out
MEMORY_BYTES = 512 << 20  # address space of the worker
OUTPUT_CHARACTERS = 4 << 20

_WORKER = Path(__file__).with_name("chat_worker.py")


def chat_prompt(template, messages, *, bos="", eos="", add_generation_prompt=True):
    """Renders the messages (a list of dicts with at least "role" and "content").

    ``bos`` and ``eos`` are the texts of those tokens. Raises TemplateError if the template is malformed, refuses the
    messages, or exceeds a limit; PromptError if the messages are not what a template can take.
    """
    if not isinstance(template, str):
        raise TemplateError(f"chat template: expected a str, got {type(template).__name__}")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise PromptError(f"messages: expected a list of dicts, got {type(messages).__name__}")
    variables = {
        "messages": messages,
        "bos_token": bos,
        "eos_token": eos,
        "add_generation_prompt": add_generation_prompt,
    }
    limits = {"cpu_seconds": CPU_SECONDS, "memory_bytes": MEMORY_BYTES, "output_characters": OUTPUT_CHARACTERS}
    try:
        request = json.dumps({"limits": limits, "template": template, "variables": variables})
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(f"messages: expected values that JSON has: {error}") from None
    reply = _run(request.encode())
    if "error" in reply:
        raise TemplateError(f"chat template: {reply['error']}")
    return reply["text"]


def prepare():
    """Starts what renders templates, for a prompt that comes in a moment."""
    start(_command())


def _command():
    # without site it starts four times faster
    return [sys.executable, "-I", "-S", str(_WORKER), json.dumps([*map(os.fspath, sys.path)])]


def _run(request):
    try:
        status, reply = ask(_command(), request, WALL_SECONDS)
    except TookTooLong:
        return {"error": f"took more than {WALL_SECONDS:g} s"}
    except OSError as error:
        return {"error": f"its process did not start: {error}"}
    if status == -signal.SIGPROF:
        return {"error": f"took more than {CPU_SECONDS:g} s of processor time"}
    try:
        return json.loads(reply)
    except ValueError:
        return {"error": f"its process ended with status {status}"}
