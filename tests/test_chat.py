"""Chat templates: what they give, and that none of them can hang or eat the memory."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from specloop.errors import PromptError, TemplateError
from specloop.formats.gguf import GGUF
from specloop.text import chat, template_process
from specloop.text.chat import chat_prompt

USER = [{"role": "user", "content": "Hi"}]


def test_the_real_template(smollm2):
    with GGUF.open(smollm2) as g:
        template = g.metadata["tokenizer.chat_template"]
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    turn = "<|im_start|>user\nHi<|im_end|>\n"
    assert chat_prompt(template, USER) == system + turn + "<|im_start|>assistant\n"
    assert chat_prompt(template, USER, add_generation_prompt=False) == system + turn
    own = [{"role": "system", "content": "Be brief. 日本 🎉"}, *USER, {"role": "assistant", "content": "Yo"}]
    assert chat_prompt(template, own, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief. 日本 🎉<|im_end|>\n" + turn + "<|im_start|>assistant\nYo<|im_end|>\n"
    )


@pytest.mark.parametrize(
    "template, text",
    [
        ("{{ bos_token }}{{ messages[0]['content'] }}{{ messages[0].role }}{{ eos_token }}", "<s>Hiuser</s>"),
        ("{% if true %}\n  {% for m in messages %}\n{{ m.content }}\n  {% endfor %}\n{% endif %}\nend\n", "Hi\nend"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Hi"}]'),
        ("{{ {'a': '<é>'} | tojson(indent=1) }}", '{\n "a": "<é>"\n}'),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{{ undefined_thing }}{% if tools %}x{% endif %}", ""),
        ("{{ strftime_now('%Y') | int > 2000 }}", "True"),
        ("{{ '\ud83d' }}", "\ud83d"),
    ],
)
def test_what_templates_may_use(template, text):
    assert chat_prompt(template, USER, bos="<s>", eos="</s>") == text


@pytest.mark.parametrize(
    "template, words",
    [
        (
            "{{ raise_exception('roles must\nalternate') }}",
            "^chat template: refuses these messages: roles must alternate$",
        ),
        ("a\n{{ }", "^chat template: line 2: "),
        ("{% for m in messages %}", "line 1: Unexpected end of template"),
        ("{{ messages[0].x.y }}", "UndefinedError: "),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError: "),
        ("{{ messages.append(1) }}", "SecurityError: "),
        ("{% include 'x' %}", "TypeError: no loader"),
    ],
)
def test_refusals(template, words):
    with pytest.raises(TemplateError, match=words) as caught:
        chat_prompt(template, USER)
    assert "\n" not in str(caught.value)


TIME, MEMORY, OUTPUT = "s of processor time", "MB of memory", "wrote more than 4194304 characters"
NESTED = "".join("{% for a in 'xxxxxxxxxxxxxxxxxxxx' %}" for _ in range(12)) + "{% endfor %}" * 12
RUNAWAYS = {
    "huge range": ("{% for i in range(10**9) %}{% endfor %}", "OverflowError: Range too big"),
    "nested ranges": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", TIME),
    "nested strings": (NESTED, TIME),
    "recursive macro": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nests too deeply"),
    "branching macro": (
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        TIME,
    ),
    "recursive loop": ("{% set x = [1] %}{% for i in x recursive %}{{ loop(x) }}{% endfor %}", "nests too deeply"),
    "deep expression": ("{{ " + "(" * 100000 + "1" + ")" * 100000 + " }}", "nests too deeply"),
    "deep blocks": ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, ""),
    "doubling": (
        "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
        f"{TIME}|{MEMORY}",
    ),
    "doubled list": (
        "{% set n = namespace(s=[0]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
        f"{TIME}|{MEMORY}",
    ),
    "repeated text": ("{{ 'a' * 10**10 }}", f"{TIME}|{MEMORY}"),
    "padded": ("{{ 'a'.ljust(10**10) }}{{ 'a' | center(10**10) }}", f"{TIME}|{MEMORY}"),
    "formatted": ("{{ '%10000000000d' % 1 }}", ""),
    "power": ("{{ 10**(10**10) }}", f"{TIME}|{MEMORY}"),
    "power modulo": ("{% if 7 ** (10**8) % 3 %}x{% endif %}", TIME),
    "much text": ("{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}", OUTPUT),
    "lorem ipsum": ("{{ lipsum(n=10**9) }}", f"{TIME}|{MEMORY}"),
    "slow expression": ("{{ ('a' * 300000 ~ '://') | urlize }}", ""),
}


@pytest.mark.parametrize("case", RUNAWAYS)
def test_runaways(case, monkeypatch):
    monkeypatch.setattr(chat, "CPU_SECONDS", 0.5)
    template, words = RUNAWAYS[case]
    start = time.monotonic()
    try:
        text = chat_prompt(template, USER)
    except TemplateError as error:
        assert len(str(error)) < 400 and "\n" not in str(error)
        assert any(word in str(error) for word in words.split("|"))
    else:
        assert words == "" and len(text) <= chat.OUTPUT_CHARACTERS
    assert time.monotonic() - start < 20


def test_from_several_threads():
    """No signal, alarm or trace function of this process is involved."""
    replies = {}

    def run(name, template):
        try:
            replies[name] = chat_prompt(template, USER)
        except TemplateError as error:
            replies[name] = str(error)

    threads = [threading.Thread(target=run, args=(i, f"{{{{ {i} }}}}")) for i in range(2)]
    threads.append(threading.Thread(target=run, args=("loop", RUNAWAYS["nested strings"][0])))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (replies[0], replies[1]) == ("0", "1") and TIME in replies["loop"]


def test_wall_clock_limit(monkeypatch):
    monkeypatch.setattr(chat, "WALL_SECONDS", 0.3)
    monkeypatch.setattr(chat, "CPU_SECONDS", 60.0)
    with pytest.raises(TemplateError, match=r"took more than 0\.3 s$"):
        chat_prompt(RUNAWAYS["nested strings"][0], USER)


def test_worker_that_dies_or_does_not_start(monkeypatch, tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text("import os; os._exit(3)")
    monkeypatch.setattr(chat, "_WORKER", worker)
    with pytest.raises(TemplateError, match="its process ended with status 3"):
        chat_prompt("x", USER)
    monkeypatch.setattr("sys.executable", str(tmp_path / "missing"))
    with pytest.raises(TemplateError, match="its process did not start"):
        chat_prompt("x", USER)


def kept():
    """The id of the process that waits for the next template."""
    (process,) = template_process._kept
    return process._process.pid


def test_the_next_template_needs_no_new_process():
    chat_prompt("x", USER)
    before = kept()
    assert chat_prompt("{{ messages[0].content }}", USER) == "Hi"
    with pytest.raises(TemplateError, match="Undefined"):
        chat_prompt("{{ nothing.at.all }}", USER)
    with pytest.raises(TemplateError, match=TIME):  # its own fork ends, the one that waits does not
        chat_prompt(RUNAWAYS["power modulo"][0], USER)
    assert chat_prompt("y", USER) == "y" and kept() == before


def test_a_process_may_be_started_ahead():
    template_process._close()
    chat.prepare()
    before = kept()
    chat.prepare()
    assert chat_prompt("x", USER) == "x" and kept() == before


def test_a_process_that_ended_meanwhile_is_replaced():
    chat_prompt("x", USER)
    before = kept()
    os.kill(before, signal.SIGKILL)
    assert chat_prompt("y", USER) == "y" and kept() != before


def test_a_program_that_ignores_its_children():
    """As some servers do, so that none is left behind; what they start inherits it."""
    template_process._close()
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert [chat_prompt(text, USER) for text in "xy"] == ["x", "y"]
    finally:
        template_process._close()
        signal.signal(signal.SIGCHLD, before)


def test_a_fork_has_a_process_of_its_own():
    """Two that wrote to the same pipe would get each other's prompts."""
    chat_prompt("x", USER)
    before = kept()
    child = os.fork()
    if not child:
        ended = 1
        with contextlib.suppress(BaseException):
            ended = int(not (chat_prompt("y", USER) == "y" and kept() != before))
        template_process._close()
        os._exit(ended)
    assert os.waitpid(child, 0)[1] == 0
    assert chat_prompt("z", USER) == "z" and kept() == before


@pytest.mark.parametrize("how", ["nothing asked", "nobody to ask"])
def test_the_process_ends_by_itself(how):
    worker = chat._WORKER.read_text()
    assert "IDLE_SECONDS = 10.0" in worker
    command = [sys.executable, "-c", worker.replace("IDLE_SECONDS = 10.0", "IDLE_SECONDS = 0.2"), json.dumps(sys.path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    if how == "nobody to ask":
        process.stdin.close()
    assert process.wait(20) == 0
    process.stdin.close()
    process.stdout.close()


@pytest.mark.parametrize(
    "messages", [None, "hi", ["hi"], [{"role": "user", "content": {1, 2}}], [{"role": "user", "content": object()}]]
)
def test_bad_messages(messages):
    with pytest.raises(PromptError, match="messages: expected"):
        chat_prompt("x", messages)


def test_bad_template():
    with pytest.raises(TemplateError, match="chat template: expected a str, got NoneType"):
        chat_prompt(None, USER)
