"""The command line on a scripted model: output, exit codes, one-line errors."""

import json
import math
import os
import signal
import subprocess
import sys
import threading

import pytest

import specloop.pair
from scripted import ToyTokenizer, scripted
from specloop import cli
from specloop.pair import Pair

PIECES = ["", "foo", " bar", "END", "a", "b", " ", "🙂"]
SAYS = [1, 2, 7, 1, 2, 7, 1, 2, 7, 1, 2, 3, 1]
EOS = 0


def scripted_pair(says=SAYS, **settings):
    start = {}

    def following(prefix):
        n = len(prefix) - start.get("length", 0)
        return says[n] if 0 <= n < len(says) else EOS

    model = scripted(following, len(PIECES), eos_ids=[EOS], context=512)
    pair = Pair(lambda: (model, ToyTokenizer(PIECES, [EOS]), None), settings=settings)
    encode = pair.encode

    def spy(*args):
        ids = encode(*args)
        start["length"] = len(ids)
        return ids

    pair.encode = spy
    return pair


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs the command line in this process: (exit code, stdout, stderr)."""
    loaded = []

    def load(target, draft="auto", progress=None, **settings):
        loaded.append((target, settings))
        return scripted_pair(**settings)

    monkeypatch.setattr(specloop.pair, "load", load)

    def run(*arguments):
        code = cli.run(list(arguments))
        return (code, *capsys.readouterr())

    run.loaded = loaded
    return run


def test_generate_prints_the_text(command):
    code, out, err = command("generate", "a b", "--k", "2")
    assert (code, out, err) == (0, "foo bar🙂foo bar🙂foo bar🙂foo barENDfoo\n", "")


def test_json_is_one_object(command):
    code, out, _ = command("generate", "a b", "--json", "--k", "3", "--max-new-tokens", "6", "--seed", "7")
    report = json.loads(out)
    assert code == 0 and report["text"] == "foo bar🙂foo bar🙂" and report["finish_reason"] == "length"
    assert report["tokens"] == SAYS[:6] and report["usage"]["completion_tokens"] == 6
    assert {"rounds", "proposed", "evaluated", "accepted", "acceptance_rate", "tokens_per_pass", "per_position",
            "draft_ms", "verify_ms", "k_history", "theta", "off_reason"} <= set(report["speculation"])  # fmt: skip
    assert set(report["memory"]) == {"budget", "peak", "resident", "streamed_bytes", "released"}
    assert {"load_s", "prefill_ms", "tokens_per_second"} <= set(report["timing"])
    assert report["backend"] and report["settings"]["seed"] == 7


@pytest.mark.parametrize("draft, k", [("none", "auto"), ("lookup", "0"), ("lookup", "5"), ("auto", "auto")])
def test_the_text_does_not_depend_on_the_draft(command, draft, k):
    assert command("generate", "a b", "--draft", draft, "--k", k)[1] == command("generate", "a b")[1]


def test_stop_strings(command):
    assert command("generate", "a", "--stop", "x", "--stop", "END")[1] == "foo bar🙂foo bar🙂foo bar🙂foo bar\n"


def test_stats_go_to_stderr(command):
    code, out, err = command("generate", "a b", "--stats", "--k", "4")
    assert code == 0 and "bar" in out and "tokens per pass" in err and "settings: " in err and "k=4" in err
    _, _, err = command("generate", "a b", "--stats", "--draft", "none")
    assert "speculation off: no draft" in err and "- of the evaluated" in err


def test_stats_compare_with_plain_decoding(command):
    _, out, err = command("generate", "a b a b a b", "--raw", "--stats", "--json")
    timing = json.loads(out)["timing"]
    assert timing["estimated_speedup"] == timing["tokens_per_second"] / timing["plain_tokens_per_second"] > 0
    assert "one row at a time would be about" in err and f"{timing['estimated_speedup']:.2f}x" in err
    _, out, err = command("generate", "a b a b a b", "--raw", "--stats", "--json", "--draft", "none")
    assert json.loads(out)["timing"]["plain_tokens_per_second"] is None and "one row" not in err


def test_the_prompt_may_come_from_stdin(command, monkeypatch):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("a b a"))
    assert json.loads(command("generate", "-", "--json")[1])["usage"]["prompt_tokens"] == 5


def test_load_options_arrive(command):
    options = "--model x.gguf --dtype f32 --kv f16 --context 99 --threads 1 --memory-budget 90MB --require-draft"
    command("generate", "a", *options.split())
    expected = {"dtype": "f32", "context": 99, "threads": 1, "kv": "f16", "device": "auto", "memory_budget": "90MB"}
    assert command.loaded == [("x.gguf", expected | {"require_draft": True})]


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "a", "--k", "-1"],
        ["generate", "a", "--k", "many"],
        ["generate", "a", "--temperature", "-1"],
        ["generate", "a", "--temperature", "nan"],
        ["generate", "a", "--temperature", "inf"],
        ["generate", "a", "--temperature", "1e39"],
        ["generate", "a", "--temperature", "warm"],
        ["generate", "a", "--top-p", "1.5"],
        ["generate", "a", "--min-p", "-0.5"],
        ["generate", "a", "--stop", ""],
        ["generate", "a", "--max-new-tokens", "-3"],
        ["generate", "a", "--rule", "typical"],
        ["generate", "a", "--draft", "some/dir"],
        ["generate", "a", "--theta", "0.3"],
        ["generate", ""],
        ["generate", "a" * 512],
        ["generate", "a", "--chat"],
        ["generate"],
        ["bench", "--category", "poems"],
        ["bench", "--prompts", "0"],
        ["bench", "--repeat", "0", "--prompts", "1"],
        ["train"],
        [],
    ],
)
def test_errors_are_one_line_and_exit_code_2(command, arguments):
    code, out, err = command(*arguments)
    assert code == 2 and out == "" and err.startswith("specloop: ") and err.count("\n") == 1 and len(err) > 20


@pytest.mark.parametrize(
    "options",
    [["--model", "no/such.gguf"], ["--dtype", "int4"], ["--kv", "int4"], ["--context", "1"], ["--device", "cuda"]],
)
def test_load_errors_are_one_line_too(capsys, options):
    assert cli.run(["generate", "a", *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("specloop: ") and err.count("\n") == 1


def test_a_malformed_model_file(tmp_path, capsys):
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF" + bytes(40))
    assert cli.run(["generate", "a", "--model", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.fixture
def ctrl_c():
    """Python's own handler, also where these tests run in the background of a shell, which ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_the_text_and_exits_130(command, monkeypatch):
    pair = scripted_pair([1, 2] * 100)
    forward = pair.model.forward

    def interrupted(tokens, cache, *, last):
        if cache.length > 20:
            signal.raise_signal(signal.SIGINT)
        return forward(tokens, cache, last=last)

    pair.model.forward = interrupted
    monkeypatch.setattr(specloop.pair, "load", lambda *args, **kwargs: pair)
    before = signal.getsignal(signal.SIGINT)
    code, out, _ = command("generate", "a", "--json", "--draft", "none")
    report = json.loads(out)
    assert code == 130 and report["finish_reason"] == "cancelled" and 15 < len(report["tokens"]) < 30
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_while_loading(command, monkeypatch):
    def load(*args, **kwargs):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        return Pair(lambda: threading.Event().wait(5))

    monkeypatch.setattr(specloop.pair, "load", load)
    assert command("generate", "a")[0] == 130


@pytest.mark.parametrize("closed", [0, 1])
def test_closed_stdin_and_stdout(closed):
    command = [sys.executable, "-m", "specloop", "generate", "-"]
    code = f"import os; os.close({closed}); os.execv({sys.executable!r}, {command!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("specloop: ") and "closed" in done.stderr and done.stderr.count("\n") == 1


def test_info(command):
    code, out, _ = command("info", "--json")
    report = json.loads(out)
    assert code == 0 and len(report["row_costs_ms"]) == 16 and "reference" in report["backends"]
    code, out, _ = command("info")
    assert code == 0 and "ms per rows" in out and "backend reference" in out


def test_a_rule_that_is_none_lists_those_that_are(command):
    code, out, err = command("generate", "a", "--rule", "loseless")
    assert code == 2 and out == "" and not command.loaded
    assert err == "specloop: rule: expected one of lossless, block, threshold, got 'loseless'\n"


def test_bench(command):
    code, out, err = command("bench", "--prompts", "1", "--max-new-tokens", "12", "--json", "--k", "2")
    assert err == ""
    report = json.loads(out)
    assert code == 0 and list(report["categories"]) == ["chat", "code", "summarise", "repeat", "edit"]
    assert report["all"]["same_tokens"] and len(report["prompts"]) == 5
    assert report["all"]["speedup"] > 0 and len(report["all"]["noise_interval"]) == 2
    code, out, _ = command("bench", "--prompts", "1", "--category", "code", "--repeat", "2", "--max-new-tokens", "12")
    assert code == 0 and out.startswith("plain against itself") and "code" in out and "chat" not in out


@pytest.mark.parametrize("name", ["no/such/folder/chart.png", "chart.mp3", "chart"])
def test_a_chart_that_cant_be_written_is_refused_before_measuring(command, monkeypatch, tmp_path, name):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # as if matplotlib were installed
    code, out, err = command("bench", "--plot", str(tmp_path / name))
    assert code == 2 and out == "" and err.startswith("specloop: plot: expected") and err.count("\n") == 1


def test_the_chart_shows_the_rounds(command, tmp_path):
    from specloop.plot import curves

    arguments = ("bench", "--prompts", "1", "--category", "repeat", "--max-new-tokens", "30", "--k", "2", "--json")
    _, out, _ = command(*arguments)
    report = json.loads(out)
    run = report["runs"]["repeat"]
    assert len(run["k"]) == len(run["accepted"]) == len(run["seconds"]) and max(run["k"]) == 2
    assert sum(run["accepted"]) + len(run["k"]) == report["prompts"][0]["tokens"] and min(run["seconds"]) > 0
    shown = curves({"first_round": 3, "k": [0, 2, 2, 4], "accepted": [0, 2, 0, 2], "seconds": [0.5] * 4}, window=2)
    assert shown["round"] == [3, 4, 5, 6] and shown["k"] == [0, 2, 2, 4]
    assert shown["tokens_per_second"] == [2.0, 4.0, 4.0, 4.0]
    assert math.isnan(shown["acceptance"][0]) and shown["acceptance"][1:] == [1.0, 2 / 3, 2 / 4]
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    for name in ("chart.png", "chart.svg"):
        assert command(*arguments, "--plot", str(tmp_path / name))[0] == 0
        assert (tmp_path / name).stat().st_size > 5000


def test_shipped_prompts():
    from specloop.measure import load_prompts

    prompts = load_prompts()
    assert len(prompts) == 20 and all(p["prompt"].strip() for p in prompts)
    assert len(load_prompts(["chat"], 2)) == 2


def test_intervals():
    from specloop.measure import interval

    assert interval([]) is None and interval([2.0]) == [2.0, 2.0]
    low, high = interval([1.0, 1.1, 0.9, 1.05, 0.95])
    assert 0.9 <= low <= 1.0 <= high <= 1.1


def test_a_progress_line_is_no_wider_than_the_terminal(monkeypatch):
    import io

    for columns, label in ((80, "step 1 " + 90 * "x"), (80, "short"), (20, "short")):
        screen = io.StringIO()
        screen.isatty = lambda: True
        monkeypatch.setattr(sys, "stderr", screen)
        monkeypatch.setattr("specloop.live.columns", lambda file, columns=columns: columns)
        cli._progress(label, 0.5)
        line = screen.getvalue().removeprefix("\r\x1b[K")
        assert line.startswith(label[:5]) and len(line) <= columns - 1 and (columns < 40 or line.endswith("]  50%"))


def test_help_needs_no_torch():
    code = "import sys\nfrom specloop.cli import run\nrun(['generate', '--help'])\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "--max-new-tokens" in done.stdout
