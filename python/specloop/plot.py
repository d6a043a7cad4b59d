"""The charts of ``--plot``.

``specloop bench``: speed-ups, under them one speculative run per category over its rounds. ``specloop evaluate``: a
column per draft and way of choosing K; speed-ups, tokens per pass and acceptance by position.
"""

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
    pyplot = _pyplot()
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


def plot_evaluation(report, path) -> None:
    """Writes the chart of a report of :func:`specloop.evaluate.run`."""
    pyplot, cells = _pyplot(), report["cells"]
    ways = list(dict.fromkeys((c["draft"], c["k"]) for c in cells))
    figure, grid = pyplot.subplots(
        3, len(ways), figsize=(max(7, 5.5 * len(ways)), 10), layout="constrained", squeeze=False, sharey="row"
    )
    for i, (way, column) in enumerate(zip(ways, grid.T, strict=True)):
        mine = [c for c in cells if (c["draft"], c["k"]) == way]
        _by_setting(column[0], mine, "speedup", "speedup_interval")
        _by_setting(column[1], mine, "tokens_per_pass")
        _by_position(column[2], mine)
        column[0].set_title(f"{os.path.basename(way[0]) or way[0]}, K {way[1]}")
        for axes in column[:2]:
            axes.axhline(1.0, color="0.3", linewidth=0.8)
        if i == 0:
            for axes, label in zip(
                column, ("speed-up over plain decoding", "tokens per pass", "acceptance"), strict=True
            ):
                axes.set_ylabel(label)
                axes.legend(fontsize="small")
                axes.set_ylim(bottom=0)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _by_setting(axes, cells, what, interval=None):
    """Categories side by side, in each a mark per temperature and penalty."""
    settings = list(dict.fromkeys((c["temperature"], c["repetition_penalty"]) for c in cells))
    categories = list(dict.fromkeys(c["category"] for c in cells))
    for s, setting in enumerate(settings):
        mine = [c for c in cells if (c["temperature"], c["repetition_penalty"]) == setting]
        xs = [categories.index(c["category"]) + 0.7 * ((s + 0.5) / len(settings) - 0.5) for c in mine]
        ys = [_known(c[what]) for c in mine]
        line = axes.plot(xs, ys, "o", markersize=4, label=f"T {setting[0]:g}, penalty {setting[1]:g}")[0]
        for x, c in zip(xs, mine, strict=True):
            if interval and c[interval]:
                axes.plot([x, x], c[interval], linewidth=1, color=line.get_color())
    axes.set_xticks(range(len(categories)), categories)


def _by_position(axes, cells):
    """A line per category, in the first setting."""
    first, most = (cells[0]["temperature"], cells[0]["repetition_penalty"]), 1
    for c in cells:
        if (c["temperature"], c["repetition_penalty"]) == first:
            ys = [_known(rate) for rate in c["per_position"]]
            most = max(most, len(ys))
            axes.plot(range(1, len(ys) + 1), ys, marker=".", linewidth=1, label=c["category"])
    axes.set_xlim(0.5, most + 0.5)
    axes.set_xlabel(f"position of the draft (T {first[0]:g}, penalty {first[1]:g})")
    axes.xaxis.get_major_locator().set_params(integer=True)


def _known(value):
    """A gap where there is nothing to show."""
    return float("nan") if value is None else value


def _pyplot():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


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
