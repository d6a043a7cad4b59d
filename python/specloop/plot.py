"""The chart of ``specloop bench --plot``: speed-ups, under them one speculative run per category over its rounds."""

from __future__ import annotations

import importlib.util
import os

from .errors import OptionError

WINDOW = 8  # rounds that a point of a curve is the mean of


def check_plot(path) -> None:
    """Whether the chart can be written, before minutes go into measuring."""
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError("plot: needs matplotlib, which is not installed: pip install 'specdec-kernels[bench]'")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise OptionError(f"plot: expected a file in a folder that exists, got {path!r}")
    if os.path.splitext(path)[1].lower() not in (".png", ".svg", ".pdf"):
        raise OptionError(f"plot: expected a name that ends in .png, .svg or .pdf, got {path!r}")


def trace(counts) -> dict:
    """The rounds of one run (``counts``: its statistics) as lists, for :func:`curves`."""
    return {
        "first_round": counts.first_round,
        "k": list(counts.k_history),
        "accepted": list(counts.accepted_history),
        "seconds": list(counts.seconds_history),
    }


def curves(run, window=WINDOW) -> dict:
    """Per round: its number, tokens per second and acceptance over the last ``window`` rounds, and K.

    Acceptance is NaN, a gap in the curve, where nothing was evaluated.
    """
    evaluated = [min(a + 1, k) for k, a in zip(run["k"], run["accepted"], strict=True)]
    speed, acceptance = [], []
    for i in range(len(run["k"])):
        last = slice(max(0, i + 1 - window), i + 1)
        seconds, judged, taken = sum(run["seconds"][last]), sum(evaluated[last]), sum(run["accepted"][last])
        speed.append((taken + len(run["k"][last])) / seconds if seconds else float("nan"))
        acceptance.append(taken / judged if judged else float("nan"))
    rounds = [run["first_round"] + i for i in range(len(speed))]
    return {"round": rounds, "tokens_per_second": speed, "k": list(run["k"]), "acceptance": acceptance}


def plot(report, path) -> None:
    """Writes the chart of a report of :func:`specloop.bench.run`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = {name: curves(run) for name, run in report["runs"].items()}
    figure = pyplot.figure(figsize=(max(7, 2.8 * len(runs)), 10), layout="constrained")
    grid = figure.add_gridspec(4, max(1, len(runs)))
    _speedups(figure.add_subplot(grid[0, :]), report)
    rows = (("tokens_per_second", "tokens per second"), ("k", "K"), ("acceptance", "acceptance"))
    for i, (name, run) in enumerate(runs.items()):
        for j, (what, label) in enumerate(rows):
            axes = figure.add_subplot(grid[1 + j, i])
            axes.plot(run["round"], run[what], linewidth=1, drawstyle="steps-mid" if what == "k" else "default")
            plain = report["categories"][name]["plain_tokens_per_second"]
            if what == "tokens_per_second" and plain is not None:
                axes.axhline(plain, color="0.3", linewidth=0.8, linestyle="--")
            highest = max((y for r in runs.values() for y in r[what] if y == y), default=1.0)
            axes.set_ylim(0, 1.05 * max(highest, 1.0))
            if run["round"]:
                axes.set_xlim(run["round"][0] - 0.5, run["round"][-1] + 0.5)
            axes.tick_params(labelleft=i == 0)
            axes.set_title(name if j == 0 else "")
            axes.set_ylabel(label if i == 0 else "")
            axes.set_xlabel("round" if j == len(rows) - 1 else "")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _speedups(axes, report):
    """One dot per prompt, a bar at the median."""
    for x, (name, total) in enumerate(report["categories"].items()):
        dots = [row["speedup"] for row in report["prompts"] if row["category"] == name and row["speedup"]]
        axes.plot([x] * len(dots), dots, "o", color="0.6")
        if total["speedup"] is not None:
            axes.plot(x, total["speedup"], "_", markersize=30, color="black")
    axes.axhline(1.0, color="0.3", linewidth=0.8)
    axes.set_xticks(range(len(report["categories"])), list(report["categories"]))
    axes.set_ylabel("speed-up over plain decoding")
    axes.set_ylim(bottom=0)
