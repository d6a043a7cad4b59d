"""The command line: ``specloop generate``, ``bench``, ``evaluate``, ``train``, ``convert``, ``info``.

Answers go to stdout; progress, statistics and errors to stderr. An error is one line and exit code 2; Ctrl-C ends the
text where it is, exit code 130. torch is imported by the thread that loads the model, while the progress bar moves.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
import warnings
from typing import Annotated, Optional

import typer

from . import cli_options as flags
from . import train_options as trained
from .errors import OptionError, PromptError, SpecloopError
from .interrupts import Interrupts

# torch says so where NumPy is not installed; nothing here uses it.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Speculative decoding that changes no token.",
)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="the prompt; - reads it from stdin")],
    model: flags.Model = "smollm2",
    draft: flags.Draft = "auto",
    require_draft: flags.Required = False,
    k: flags.K = "auto",
    rule: flags.Rule = "lossless",
    theta: flags.Theta = None,
    theta_window: flags.ThetaWindow = None,
    agreement: flags.Agreement = None,
    tree: flags.Tree = None,
    confidence: flags.Confidence = 0.0,
    on_fallbacks: flags.OnFallbacks = "plain",
    max_fallbacks: flags.MaxFallbacks = 8,
    draft_until: flags.DraftUntil = 4096,
    verify_timeout: flags.VerifyTimeout = None,
    temperature: flags.Temperature = 0.0,
    top_k: flags.TopK = 0,
    top_p: flags.TopP = 1.0,
    min_p: flags.MinP = 0.0,
    seed: flags.Seed = None,
    max_new_tokens: flags.MaxNewTokens = 128,
    min_new_tokens: flags.MinNewTokens = 0,
    stop: flags.Stop = None,
    logit_bias: flags.Bias = None,
    repetition_penalty: flags.Repetition = 1.0,
    presence_penalty: flags.Presence = 0.0,
    frequency_penalty: flags.Frequency = 0.0,
    bad_words: flags.Ban = None,
    grammar: flags.GrammarText = None,
    dtype: flags.Dtype = "int8",
    kv: flags.Kv = "int8",
    context: flags.Context = 2048,
    memory_budget: flags.Budget = None,
    device: flags.Device = "auto",
    threads: flags.Threads = None,
    chat: flags.Chat = None,
    logprobs: flags.Logprobs = None,
    stats: flags.Stats = False,
    as_json: flags.Json = False,
):
    """Continue or answer a prompt."""
    options = flags.request_options(locals())
    from .controller import worth_loading
    from .draft_loader import needs_target, presumed
    from .live import View
    from .options import check_request, is_model
    from .summary import summary
    from .text.chat import prepare

    check_request(**options, loaded=presumed(options["draft"]))  # before seconds go into loading
    text = _stdin() if prompt == "-" else prompt
    spared = is_model(options["draft"]) and k == "auto" and not require_draft and not worth_loading(max_new_tokens)
    spared = spared and not needs_target(options["draft"])  # the files of drafts are small
    if spared:
        options |= {"draft": "none", "tree": None, "confidence": 0.0}
    loading = {"dtype": dtype, "context": context, "threads": threads, "kv": kv, "device": device}
    loading["require_draft"] = require_draft
    if chat is not False:
        prepare()  # beside the loading
    pair = _load(model, options["draft"], memory_budget=flags.bytes_of(memory_budget), **loading)
    stream = pair.stream(text, **options)
    view = View(stream, shown=stats, out=None if as_json else sys.stdout)
    with Interrupts(stream.cancel), view:
        for event in stream:
            view.write(event.text)
    result = stream.result
    if spared:
        why = f"the draft was not loaded: at most {max_new_tokens} tokens do not win back the time"
        result.stats.speculation.off_reason = why
    if as_json:
        print(json.dumps(result.as_dict()))
    else:
        print()
    if stats:
        print(summary(result), file=sys.stderr)
    if result.finish_reason == "cancelled":
        raise typer.Exit(130)


@app.command()
def bench(
    model: flags.Model = "smollm2",
    draft: flags.Draft = "auto",
    k: flags.K = "auto",
    dtype: flags.Dtype = "int8",
    kv: flags.Kv = "int8",
    context: flags.Context = 2048,
    memory_budget: flags.Budget = None,
    threads: flags.Threads = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens")] = 64,
    category: flags.Categories = None,
    prompts: Annotated[Optional[int], typer.Option("--prompts", help="at most this many of each category")] = None,  # noqa: UP045
    repeat: Annotated[int, typer.Option("--repeat", help="measurements per prompt")] = 1,
    as_json: flags.Json = False,
    plot: flags.Plot = None,
):
    """Plain and speculative decoding side by side, on the same prompts, taking turns."""
    from . import bench as measure
    from . import plot as chart
    from .measure import load_prompts
    from .options import check_draft_model

    if plot is not None:
        chart.check_plot(plot)
    chosen = load_prompts(category or (), prompts)
    loading = {"dtype": dtype, "kv": kv, "context": context, "threads": threads}
    pair = _load(model, check_draft_model(draft), memory_budget=flags.bytes_of(memory_budget), **loading)
    options = {"draft": draft, "k": flags.k_of(k), "max_new_tokens": max_new_tokens, "repeat": repeat}
    report = measure.run(pair, chosen, model=model, progress=_progress, **options)
    print(json.dumps(report) if as_json else measure.table(report))
    if plot is not None:
        chart.plot(report, plot)


@app.command()
def evaluate(
    model: flags.Model = "smollm2",
    draft: flags.Drafts = None,
    k: flags.Ks = None,
    temperature: flags.Temperatures = None,
    repetition_penalty: flags.Penalties = None,
    category: flags.Categories = None,
    quick: flags.Quick = False,
    pairs: flags.Pairs = None,
    max_new_tokens: flags.MaxNewTokens = 128,
    seed: flags.Seed = None,
    dtype: flags.Dtype = "int8",
    kv: flags.Kv = "int8",
    context: flags.Context = 2048,
    memory_budget: flags.Budget = None,
    device: flags.Device = "auto",
    threads: flags.Threads = None,
    as_json: flags.Json = False,
    plot: flags.Plot = None,
):
    """Drafts on the evaluation prompts: acceptance, tokens per pass, times and speed-up, by category and temperature.

    Exit code 1 if greedy ids were not those of plain decoding.
    """
    from . import evaluate as measure
    from . import plot as chart
    from .evaluation_table import differing, table

    if plot is not None:
        chart.check_plot(plot)
    chosen = measure.evaluation_prompts(category or (), quick=quick)
    given = {
        "drafts": draft,
        "ks": k and [flags.k_of(text) for text in k],
        "temperatures": temperature,
        "repetition_penalties": repetition_penalty,
        "pairs": measure.QUICK_PAIRS if quick and pairs is None else pairs,
    }
    given = {name: value for name, value in given.items() if value is not None}
    plan = measure.check_plan(**given, max_new_tokens=max_new_tokens, seed=seed)
    loading = {"dtype": dtype, "kv": kv, "context": context, "threads": threads, "device": device}
    pair = _load(model, "lookup", memory_budget=flags.bytes_of(memory_budget), **loading)
    report = measure.run(pair, chosen, plan, progress=_progress)
    print(json.dumps(report, allow_nan=False) if as_json else table(report))
    if plot is not None:
        chart.plot_evaluation(report, plot)
    if places := differing(report):
        print(f"specloop: greedy ids differ from plain decoding: {'; '.join(places)}", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def info(
    model: flags.Model = "smollm2",
    dtype: flags.Dtype = "int8",
    kv: flags.Kv = "int8",
    context: flags.Context = 2048,
    memory_budget: flags.Budget = None,
    threads: flags.Threads = None,
    as_json: flags.Json = False,
):
    """The model, the backends, the memory plan, and what passes over 1, 2, ... rows cost."""
    pair = _load(
        model, dtype=dtype, kv=kv, context=context, threads=threads, memory_budget=flags.bytes_of(memory_budget)
    )
    report = describe(pair)
    if as_json:
        print(json.dumps(report))
        return
    for name, value in report.items():
        if name == "backends":
            for backend, state in value.items():
                print(f"backend {backend:<15} {'usable' if state['usable'] else 'not usable: ' + str(state['reason'])}")
        elif name == "memory_plan" and value is not None:
            print("\n".join(f"{'plan' if i == 0 else '':<23} {line}" for i, line in enumerate(value)))
        elif name == "row_costs_ms":
            print(f"{'ms per rows':<23} " + "  ".join(f"{n}: {ms:.2f}" for n, ms in enumerate(value, 1)))
        else:
            print(f"{name.replace('_', ' '):<23} {f'{value:.2f}' if isinstance(value, float) else value}")


@app.command()
def convert(
    output: Annotated[str, typer.Argument(help="the pack to write")],
    model: flags.Model = "smollm2",
    dtype: flags.Dtype = "int8",
):
    """Writes a model as a pack: one file, laid out in the order in which a pass reads it, to stream or to share."""
    from .convert import convert as write
    from .formats.locate import find_model, is_pack, open_checkpoint

    path = find_model(model)
    if is_pack(path):
        raise OptionError(f"model: expected a GGUF or a folder to convert, got the pack {path}")
    with open_checkpoint(path) as checkpoint:
        write(checkpoint, output, dtype=dtype, progress=lambda fraction: _progress("converting", fraction))
    _progress(None, 1.0)


@app.command()
def train(
    corpus: trained.Corpus,
    out: trained.Out,
    target: trained.Target = "smollm2",
    dtype: trained.Dtype = "int8",
    shards: trained.Shards = None,
    answer_tokens: trained.AnswerTokens = None,
    made_up: trained.MadeUp = None,
    kind: trained.Kind = "feature",
    minutes: trained.Minutes = None,
    steps: trained.Steps = None,
    rows: trained.Rows = 4096,
    micro_rows: trained.MicroRows = None,
    depths: trained.Depths = 3,
    loss: trained.Loss = None,
    rate: trained.Rate = 1e-3,
    last_rate: trained.LastRate = 1e-4,
    ema: trained.Ema = 0.995,
    seed: trained.Seed = 0,
    vocabulary: trained.Vocabulary = None,
    parameters: trained.Parameters = 13.5e6,
    precision: trained.Precision = "auto",
    checkpointing: trained.Checkpointing = False,
    start: trained.Start = None,
    logged: trained.Logged = None,
    logged_shards: trained.LoggedShards = 0,
    device: trained.Device = "auto",
    threads: trained.Threads = None,
    as_json: flags.Json = False,
):
    """Trains a draft for a model, by distillation from text that the model wrote. Ctrl-C or SIGTERM saves and ends."""
    settings = trained.settings_of(locals())
    writing, given = trained.writing_of(locals())
    from .train.log import finite
    from .train.run import train as run
    from .train.run import write_corpus

    ended = threading.Event()

    def tell(fraction):
        if ended.is_set():
            raise typer.Exit(signals.code)
        _training(fraction, "the target writes")

    with Interrupts(ended.set, signal.SIGTERM) as signals:
        where = {"target": target, "dtype": dtype, "device": device, "threads": threads}
        write_corpus(corpus, writing, shards=shards, given=given, progress=tell, **where)
        more = {"start": start, "logged": logged, "writing": writing}
        trainer, done = run(corpus, out, settings, progress=_training, stop=ended.is_set, **more, **where)
    _progress(None, 1.0)
    print(json.dumps(finite(trainer.measured[-1:] and trainer.measured[-1])) if as_json else trainer.report())
    if not done:
        raise typer.Exit(signals.code)


def _training(fraction, text):
    """A bar on a terminal; elsewhere a line now and then, as logs want it."""
    if sys.stderr.isatty():
        _progress(text, fraction)
    elif time.monotonic() - _training.last > 15:
        _training.last = time.monotonic()
        print(f"{fraction:6.1%} {text}", file=sys.stderr, flush=True)


_training.last = 0.0


def describe(pair) -> dict:
    from specdec_kernels import backends

    from .session import backend_name
    from .stats import peak_memory

    model = pair.model
    plan = getattr(getattr(model, "weights", None), "plan", None)
    return {
        "model": pair.settings.get("model"),
        "dtype": pair.settings.get("dtype"),
        "kv": pair.settings.get("kv"),
        "vocabulary": model.vocab_size,
        "context": model.context,
        "chat_template": pair.chat_template is not None,
        "draft": pair.draft,
        "draft_model": pair.draft_name,
        "draft_bytes": pair.draft_nbytes,
        "k": pair.k,
        "weights_bytes": getattr(model, "weights_nbytes", None),  # all, streamed ones with them
        "weights_in_memory_bytes": getattr(model, "nbytes", None),
        "memory_plan": None if plan is None else str(plan).splitlines(),
        "load_s": pair.load_seconds,
        "row_costs_ms": [seconds * 1e3 for seconds in pair.costs],
        "peak_memory_bytes": peak_memory(),
        "backend": backend_name(model),
        "backends": backends(),
    }


def _stdin():
    if sys.stdin is None:
        raise PromptError("prompt: - reads it from stdin, which is closed")
    return sys.stdin.read()


def _load(model, draft="auto", **options):
    """Loads, with a progress bar if someone is looking."""
    from .pair import load

    done = [0.0]
    pair = load(model, draft, progress=lambda fraction: done.__setitem__(0, fraction), **options)
    while not pair.ready(timeout=0.1):
        _progress("loading", done[0])
    _progress(None, 1.0)
    gc.freeze()  # what loading made is there to stay; looking through it costs 0.1 s in the middle of a text
    return pair


def _progress(label, fraction):
    """Draws a bar on a terminal; ``label`` None removes it."""
    if not sys.stderr.isatty():
        return
    from .live import columns

    width, line = 30, ""
    if label is not None:
        bar, room = f" [{'#' * int(fraction * width):<{width}}] {fraction:4.0%}", columns(sys.stderr) - 1
        line = f"{label[: max(8, room - len(bar))]}{bar}"[:room]  # a line that is wider would stay at every step
    sys.stderr.write(f"\r\x1b[K{line}")
    sys.stderr.flush()


def main(arguments=None) -> None:
    """Runs the command line and exits."""
    if sys.stderr is None:  # closed by whoever called us
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        sys.exit(_fail("stdout is closed"))
    for out in (sys.stdout, sys.stderr):
        if hasattr(out, "reconfigure"):
            out.reconfigure(errors="replace")
    code = run(arguments)
    if threading.active_count() > 1:  # still loading, perhaps inside C++, where the interpreter's end would abort it
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments=None) -> int:
    """Runs the command line: the exit code."""
    command = typer.main.get_command(app)
    try:
        return command.main(arguments, prog_name="specloop", standalone_mode=False) or 0
    except (SpecloopError, OSError, MemoryError) as error:
        return _fail(str(error) or type(error).__name__)
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # usage errors; their class lives in click or in typer, by version
        if type(error).__name__ == "Abort":
            return 130
        if type(error).__name__ == "BackendUnavailable":
            return _fail(str(error))
        if not hasattr(error, "format_message"):
            raise
        return _fail(error.format_message() or "no command; see specloop --help")


def _fail(message) -> int:
    _progress(None, 1.0)
    line = message.partition("\n")[0] if "\n" in message.strip() else message  # a table may follow
    print("specloop: " + " ".join(line.split()), file=sys.stderr)
    return 2
